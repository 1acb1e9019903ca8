//! Tiles of 32 weight rows, 16 to a vector.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::tiles::{Lanes, Shape};

/// 16 sums. Used by tasks that [`super::run`] carries out, and nowhere else.
#[derive(Clone, Copy)]
pub(crate) struct V(__m512i);

/// 16 sums of integers become registers for 8 rows and 2 vectors.
pub(crate) struct Tiles;

impl Shape for Tiles {
    type Lanes = V;
    const ROWS: usize = 8;
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
    const N: usize = 16;
    const SIGNED: bool = false;
    type Weights = __m512i;
    type Floats = __m512;

    #[inline(always)]
    fn zero() -> Self {
        Self(value!(_mm512_setzero_si512()))
    }

    #[inline(always)]
    fn weights<const BITS: usize>(from: &[u32]) -> __m512i {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn dot<const BITS: usize>(self, weights: __m512i, x: u32) -> Self {
        Self(value!(_mm512_dpbusd_epi32(self.0, weights, _mm512_set1_epi32(x as i32))))
    }

    #[inline(always)]
    fn plus(self, value: i32) -> Self {
        Self(value!(_mm512_add_epi32(self.0, _mm512_set1_epi32(value))))
    }

    #[inline(always)]
    fn floats(self) -> __m512 {
        value!(_mm512_cvtepi32_ps(self.0))
    }

    #[inline(always)]
    fn load(from: &[f32]) -> __m512 {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(floats: __m512, to: &mut [f32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), floats) }
    }

    #[inline(always)]
    fn splat(value: f32) -> __m512 {
        value!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        value!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        value!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        value!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn turn(rows: &[[u32; 16]], words: usize, out: &mut [u32]) {
        let count = rows.len();
        for (index, rows) in rows.as_chunks::<16>().0.iter().enumerate() {
            let turned = transpose(rows);
            for (word, vector) in turned.iter().enumerate().take(words) {
                let out = &mut out[word * count + index * 16..][..16];
                // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), *vector) }
            }
        }
    }
}

/// Turns a square of words.
#[inline(always)]
fn transpose(rows: &[[u32; 16]; 16]) -> [__m512i; 16] {
    let mut a = [V::zero().0; 16];
    for (a, row) in a.iter_mut().zip(rows) {
        *a = V::weights::<8>(row);
    }
    let mut pairs = a;
    for i in 0..8 {
        pairs[2 * i] = value!(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]));
        pairs[2 * i + 1] = value!(_mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
    }
    let mut fours = pairs;
    for i in 0..4 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        fours[4 * i] = value!(_mm512_unpacklo_epi64(a, c));
        fours[4 * i + 1] = value!(_mm512_unpackhi_epi64(a, c));
        fours[4 * i + 2] = value!(_mm512_unpacklo_epi64(b, d));
        fours[4 * i + 3] = value!(_mm512_unpackhi_epi64(b, d));
    }
    // Quarter l of fours[4i + c]: word 4l + c of rows 4i to 4i + 3.
    let mut out = fours;
    for c in 0..4 {
        let [a, b, d, e] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
        let even = value!(_mm512_shuffle_i32x4::<0x88>(a, b));
        let odd = value!(_mm512_shuffle_i32x4::<0xdd>(a, b));
        let even_high = value!(_mm512_shuffle_i32x4::<0x88>(d, e));
        let odd_high = value!(_mm512_shuffle_i32x4::<0xdd>(d, e));
        out[c] = value!(_mm512_shuffle_i32x4::<0x88>(even, even_high));
        out[4 + c] = value!(_mm512_shuffle_i32x4::<0x88>(odd, odd_high));
        out[8 + c] = value!(_mm512_shuffle_i32x4::<0xdd>(even, even_high));
        out[12 + c] = value!(_mm512_shuffle_i32x4::<0xdd>(odd, odd_high));
    }
    out
}
