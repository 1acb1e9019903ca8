//! Sixteen floats of attention in two registers.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::{attention::Vectors, lanes::LANES, platform::Task};

/// Used by tasks that [`super::run`] carries out, and nowhere else.
pub(crate) struct Sixteen;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; loads and stores are of halves of arrays as long as two vectors.
        unsafe { $instruction }
    };
}

/// Sixteen bytes from element `at` of sixteen.
#[inline(always)]
fn bytes<T>(from: &[T; LANES], at: usize) -> __m128i {
    let from = &from[at..][..16 / size_of::<T>()];
    value!(_mm_loadu_si128(from.as_ptr().cast()))
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn apart<T: Task>(task: T) -> T::Output {
    task.run()
}

#[inline(always)]
fn upper_halves(eight: __m128i) -> __m256 {
    value!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight))))
}

#[inline(always)]
fn integers(eight: __m128i) -> __m256 {
    value!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)))
}

impl Vectors for Sixteen {
    type Floats = [__m256; 2];
    type Pair = __m256;
    type Quarter = [__m256; 2];
    const KEY_HEADS: usize = 2;
    const KEYS: usize = 2;
    const VALUE_VECTORS: usize = 2;

    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        value!(apart(task))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> [__m256; 2] {
        let [a, b] = [&from[..8], &from[8..]];
        [value!(_mm256_loadu_ps(a.as_ptr())), value!(_mm256_loadu_ps(b.as_ptr()))]
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> [__m256; 2] {
        [value!(_mm256_cvtph_ps(bytes(from, 0))), value!(_mm256_cvtph_ps(bytes(from, 8)))]
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> [__m256; 2] {
        [upper_halves(bytes(from, 0)), upper_halves(bytes(from, 8))]
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> [__m256; 2] {
        let all = bytes(from, 0);
        [integers(all), integers(value!(_mm_unpackhi_epi64(all, all)))]
    }

    #[inline(always)]
    fn store([a, b]: [__m256; 2], to: &mut [f32; LANES]) {
        let (low, high) = to.split_at_mut(8);
        value!(_mm256_storeu_ps(low.as_mut_ptr(), a));
        value!(_mm256_storeu_ps(high.as_mut_ptr(), b));
    }

    #[inline(always)]
    fn splat(value: f32) -> [__m256; 2] {
        [value!(_mm256_set1_ps(value)); 2]
    }

    #[inline(always)]
    fn add([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_add_ps(a, c)), value!(_mm256_add_ps(b, d))]
    }

    #[inline(always)]
    fn max([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_max_ps(a, c)), value!(_mm256_max_ps(b, d))]
    }

    #[inline(always)]
    fn mul([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_mul_ps(a, c)), value!(_mm256_mul_ps(b, d))]
    }

    #[inline(always)]
    fn fma([a, b]: [__m256; 2], [c, d]: [__m256; 2], [e, f]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_fmadd_ps(a, c, e)), value!(_mm256_fmadd_ps(b, d, f))]
    }

    /// Four lanes are left of each vector.
    #[inline(always)]
    fn pair([a, b]: [[__m256; 2]; 2]) -> __m256 {
        four_of_eight(eight(a), eight(b))
    }

    #[inline(always)]
    fn quarter(pairs: [__m256; 2]) -> [__m256; 2] {
        pairs
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [[__m256; 2]; 4]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        Self::store([ones(twos(a), twos(b)), ones(twos(c), twos(d))], &mut out);
        out
    }
}

#[inline(always)]
fn eight([low, high]: [__m256; 2]) -> __m256 {
    value!(_mm256_add_ps(low, high))
}

/// The halves of each added.
#[inline(always)]
pub(crate) fn four_of_eight(a: __m256, b: __m256) -> __m256 {
    let own = value!(_mm256_blend_ps::<0b1111_0000>(a, b));
    value!(_mm256_add_ps(own, _mm256_permute2f128_ps::<0x21>(a, b)))
}

/// The first pair of each four added to the second.
#[inline(always)]
fn twos([a, b]: [__m256; 2]) -> __m256 {
    let own = value!(_mm256_blend_ps::<0b1100_1100>(a, b));
    value!(_mm256_add_ps(own, _mm256_shuffle_ps::<0b01_00_11_10>(a, b)))
}

/// The pairs added.
#[inline(always)]
fn ones(a: __m256, b: __m256) -> __m256 {
    let even = value!(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
    let sums = value!(_mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(a, b)));
    // The lower half has the sums of vectors 0, 2, 4 and 6.
    let order = value!(_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    value!(_mm256_permutevar8x32_ps(sums, order))
}
