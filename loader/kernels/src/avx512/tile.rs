//! Tiles of 32 weight rows, 16 to a vector.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use super::block::six_bits;
use crate::tiles::{Lanes, Shape, SpanRows, turn_by_words};

/// 16 sums. Used by tasks that [`super::run`] carries out, and nowhere else.
#[derive(Clone, Copy)]
pub(crate) struct V(__m512i);

/// Registers hold the sums of 6 rows and 2 vectors twice: of a span's integers, and of what they
/// are added to. With 8 rows the latter go through memory, span after span.
pub(crate) struct Tiles;

impl Shape for Tiles {
    type Lanes = V;
    const ROWS: usize = 6;
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
    fn turn<const BITS: usize>(from: &SpanRows<'_>, out: &mut [u32]) {
        let &SpanRows { held, outputs, span_bytes, .. } = from;
        if held != outputs || !outputs.is_multiple_of(16) || span_bytes != 8 * BITS {
            return turn_by_words::<BITS>(from, Self::SIGNED, out);
        }
        for first in (0..outputs).step_by(16) {
            let words = match BITS {
                4 => turned_nibbles(from, first),
                _ => transpose(rows_of_bytes::<BITS>(from, first)),
            };
            for (words, out) in words.iter().zip(out.chunks_exact_mut(outputs)) {
                let out = &mut out[first..][..16];
                // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), *words) }
            }
        }
    }
}

/// A span of 64 weights of each of 16 rows from `first` on, a byte for each weight.
#[inline(always)]
fn rows_of_bytes<const BITS: usize>(from: &SpanRows<'_>, first: usize) -> [__m512i; 16] {
    let mut rows = [V::zero().0; 16];
    for (index, out) in rows.iter_mut().enumerate() {
        let row = from.row(first + index);
        // SAFETY: the mask admits what the row's span has; the processor as for `value!`.
        let packed =
            unsafe { _mm512_maskz_loadu_epi8(u64::MAX >> (64 - row.len()), row.as_ptr().cast()) };
        *out = if BITS == 6 { value!(six_bits(packed)) } else { packed };
    }
    rows
}

/// A span of 64 weights of each of 16 rows from `first` on, turned: the words of weights with even
/// numbers, then those of weights with odd ones. What is turned has two weights in each byte.
#[inline(always)]
fn turned_nibbles(from: &SpanRows<'_>, first: usize) -> [__m512i; 16] {
    let mut a = [V::zero().0; 8];
    for (index, a) in a.iter_mut().enumerate() {
        let halves = [from.row(first + index), from.row(first + index + 8)].map(|row| &row[..32]);
        // SAFETY: the slices above are as long as the vectors; the processor as for `value!`.
        let [low, high] = unsafe {
            [
                _mm256_loadu_si256(halves[0].as_ptr().cast()),
                _mm256_loadu_si256(halves[1].as_ptr().cast()),
            ]
        };
        *a = value!(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high));
    }
    let mut pairs = a;
    for i in 0..4 {
        pairs[2 * i] = value!(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]));
        pairs[2 * i + 1] = value!(_mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
    }
    let mut fours = pairs;
    for i in 0..2 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        fours[4 * i] = value!(_mm512_unpacklo_epi64(a, c));
        fours[4 * i + 1] = value!(_mm512_unpackhi_epi64(a, c));
        fours[4 * i + 2] = value!(_mm512_unpacklo_epi64(b, d));
        fours[4 * i + 3] = value!(_mm512_unpackhi_epi64(b, d));
    }
    // Quarters of fours[4i + c]: words c and 4 + c of rows 4i to 4i + 3, then of those 8 further.
    let low = value!(_mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13));
    let high = value!(_mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15));
    let mask = value!(_mm512_set1_epi8(15));
    let mut out = [V::zero().0; 16];
    for c in 0..4 {
        let both = [
            value!(_mm512_permutex2var_epi64(fours[c], low, fours[4 + c])),
            value!(_mm512_permutex2var_epi64(fours[c], high, fours[4 + c])),
        ];
        for (quad, words) in both.into_iter().enumerate() {
            out[4 * quad + c] = value!(_mm512_and_si512(words, mask));
            out[8 + 4 * quad + c] = value!(_mm512_and_si512(_mm512_srli_epi16::<4>(words), mask));
        }
    }
    out
}

/// Turns a square of words.
#[inline(always)]
fn transpose(a: [__m512i; 16]) -> [__m512i; 16] {
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
