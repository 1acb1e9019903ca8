//! Sixteen floats of attention in one register.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::{attention::Vectors, lanes::LANES, platform::Task};

/// Used by tasks that [`super::run`] carries out, and nowhere else.
pub(crate) struct Sixteen;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; loads and stores are of arrays as long as the vector.
        unsafe { $instruction }
    };
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn apart<T: Task>(task: T) -> T::Output {
    task.run()
}

impl Vectors for Sixteen {
    type Floats = __m512;
    type Quarter = __m512;
    const DOT_HEADS: usize = 4;
    const SUM_VECTORS: usize = 4;

    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        value!(apart(task))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> __m512 {
        value!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> __m512 {
        value!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> __m512 {
        let words = value!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast())));
        value!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> __m512 {
        value!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }

    #[inline(always)]
    fn store(floats: __m512, to: &mut [f32; LANES]) {
        value!(_mm512_storeu_ps(to.as_mut_ptr(), floats));
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

    /// Four lanes are left of each vector.
    #[inline(always)]
    fn quarter([a, b, c, d]: [__m512; 4]) -> __m512 {
        let (a, b) = (lower_and_upper(a, b), lower_and_upper(c, d));
        let low = value!(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b));
        Self::add(low, value!(_mm512_shuffle_f32x4::<0b11_01_11_01>(a, b)))
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [__m512; 4]) -> [f32; LANES] {
        let (a, b) = (pairs(a, b), pairs(c, d));
        let even = value!(_mm512_shuffle_ps::<0b10_00_10_00>(a, b));
        let sums = Self::add(even, value!(_mm512_shuffle_ps::<0b11_01_11_01>(a, b)));
        // Quarter q has the sums of vectors q, 4 + q, 8 + q and 12 + q.
        let order = value!(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        let mut out = [0.0; LANES];
        Self::store(value!(_mm512_permutexvar_ps(order, sums)), &mut out);
        out
    }
}

/// The halves of each added.
#[inline(always)]
fn lower_and_upper(a: __m512, b: __m512) -> __m512 {
    let low = value!(_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b));
    Sixteen::add(low, value!(_mm512_shuffle_f32x4::<0b11_10_11_10>(a, b)))
}

/// The first pair of each four added to the second.
#[inline(always)]
fn pairs(a: __m512, b: __m512) -> __m512 {
    let low = value!(_mm512_shuffle_ps::<0b01_00_01_00>(a, b));
    Sixteen::add(low, value!(_mm512_shuffle_ps::<0b11_10_11_10>(a, b)))
}
