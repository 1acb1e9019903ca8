//! Tiles of 16 weight rows, 8 to a vector.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::{
    quantized::Packed,
    tiles::{Lanes, Shape},
};

/// 8 sums. Used by tasks that [`super::run`] carries out, and nowhere else.
#[derive(Clone, Copy)]
pub(crate) struct V(__m256i);

/// 8 sums of integers become registers for 4 rows and 2 vectors.
pub(crate) struct Tiles;

impl Shape for Tiles {
    type Lanes = V;
    const VECTORS: usize = 2;
}

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; the instruction touches no memory.
        unsafe { $instruction }
    };
}

impl Lanes for V {
    const N: usize = 8;
    const SIGNED: bool = true;
    type Weights = __m256i;
    type Pairs = __m256i;
    type Floats = __m256;

    #[inline(always)]
    fn zero() -> Self {
        Self(value!(_mm256_setzero_si256()))
    }

    #[inline(always)]
    fn weights<const BITS: usize>(from: &[u32]) -> __m256i {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn no_pairs() -> __m256i {
        value!(_mm256_setzero_si256())
    }

    /// 2 · 63 · 127 fits 16 bits twice, 2 · 128 · 127 once. Of 4 bits more would fit, but then
    /// their sums leave the registers.
    #[inline(always)]
    fn words_together<const BITS: usize>() -> usize {
        if BITS == 8 { 1 } else { 2 }
    }

    #[inline(always)]
    fn add_products<const BITS: usize>(pairs: __m256i, weights: __m256i, x: u32) -> __m256i {
        let x = value!(_mm256_set1_epi32(x as i32));
        let products = if BITS == 8 {
            // Sizes times signed numbers, as there is no product of signed bytes.
            let size = value!(_mm256_abs_epi8(weights));
            let x = value!(_mm256_sign_epi8(x, weights));
            value!(_mm256_maddubs_epi16(size, x))
        } else {
            value!(_mm256_maddubs_epi16(weights, x))
        };
        value!(_mm256_add_epi16(pairs, products))
    }

    #[inline(always)]
    fn plus_pairs(self, pairs: __m256i) -> Self {
        let ones = value!(_mm256_set1_epi16(1));
        let sums = value!(_mm256_madd_epi16(pairs, ones));
        Self(value!(_mm256_add_epi32(self.0, sums)))
    }

    #[inline(always)]
    fn transpose_interleaved(
        weights: &Packed<'_>,
        rows: [usize; 3],
        visits: &[usize],
        words: &mut [u32],
    ) {
        value!(super::transpose::transpose(weights, rows, visits, words));
    }

    #[inline(always)]
    fn plus(self, value: i32) -> Self {
        Self(value!(_mm256_add_epi32(self.0, _mm256_set1_epi32(value))))
    }

    #[inline(always)]
    fn floats(self) -> __m256 {
        value!(_mm256_cvtepi32_ps(self.0))
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m256 {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(floats: __m256, to: &mut [f32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), floats) }
    }

    #[inline(always)]
    fn splat(value: f32) -> __m256 {
        value!(_mm256_set1_ps(value))
    }

    #[inline(always)]
    fn add(a: __m256, b: __m256) -> __m256 {
        value!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(a: __m256, b: __m256) -> __m256 {
        value!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        value!(_mm256_fmadd_ps(a, b, c))
    }
}
