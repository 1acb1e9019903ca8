//! AVX-512 (F, BW): 16 lanes.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads and stores")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::x86_64::*;

use super::{Lanes, MAX_LANES, Task};

/// Evidence that the processor has the instructions of this file.
#[derive(Clone, Copy)]
pub(super) struct Proof(());

impl Proof {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw"))
            .then_some(Self(()))
    }
}

/// Whether this machine has all that kernels of this platform use.
#[inline]
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Runs a task inside a function that has the instructions enabled.
pub(super) fn run<T: Task>(task: T) -> T::Output {
    let proof = Proof::detect().expect("the caller chose a platform of this machine");
    // SAFETY: the proof was made by asking the processor.
    unsafe { enabled(task, proof) }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn enabled<T: Task>(task: T, proof: Proof) -> T::Output {
    task.run::<V>(proof)
}

/// 16 numbers. Made only with a [`Proof`] or from another.
#[derive(Clone, Copy)]
pub(super) struct V(__m512);

/// 16 words. Made only with a [`Proof`] or from another.
#[derive(Clone, Copy)]
pub(super) struct W(__m512i);

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: the arguments are proofs, or vectors, which are made only with a proof that the
        // processor has the instruction; it touches no memory.
        unsafe { $instruction }
    };
}

impl Lanes for V {
    const N: usize = 16;
    type Proof = Proof;
    type Words = W;

    #[inline(always)]
    fn splat(_: Proof, value: f32) -> Self {
        Self(value!(_mm512_set1_ps(value)))
    }

    #[inline(always)]
    fn load(_: Proof, from: &[f32]) -> Self {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        Self(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(value!(_mm512_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(value!(_mm512_sub_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(value!(_mm512_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(value!(_mm512_div_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn mul_add_exact(self, factor: Self, addend: Self) -> Self {
        Self(value!(_mm512_fmadd_ps(self.0, factor.0, addend.0)))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(value!(_mm512_min_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(value!(_mm512_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    fn less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        let mask = value!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0));
        Self(value!(_mm512_mask_blend_ps(mask, no.0, yes.0)))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self(value!(_mm512_abs_ps(self.0)))
    }

    #[inline(always)]
    fn rint(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Self(value!(_mm512_roundscale_ps::<NEAREST>(self.0)))
    }

    #[inline(always)]
    fn words(self) -> W {
        W(value!(_mm512_castps_si512(self.0)))
    }

    #[inline(always)]
    fn from_words(words: W) -> Self {
        Self(value!(_mm512_castsi512_ps(words.0)))
    }

    #[inline(always)]
    fn splat_word(_: Proof, value: u32) -> W {
        W(value!(_mm512_set1_epi32(value.cast_signed())))
    }

    #[inline(always)]
    fn load_words(_: Proof, from: &[u32]) -> W {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        W(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) })
    }

    #[inline(always)]
    fn store_words(words: W, to: &mut [u32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words.0) }
    }

    #[inline(always)]
    fn load_bytes(_: Proof, from: &[u8]) -> W {
        let from = &from[..4 * Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        W(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) })
    }

    #[inline(always)]
    fn store_bytes(words: W, to: &mut [u8]) {
        let to = &mut to[..4 * Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words.0) }
    }

    #[inline(always)]
    fn and(a: W, b: W) -> W {
        W(value!(_mm512_and_si512(a.0, b.0)))
    }

    #[inline(always)]
    fn or(a: W, b: W) -> W {
        W(value!(_mm512_or_si512(a.0, b.0)))
    }

    #[inline(always)]
    fn plus(a: W, b: W) -> W {
        W(value!(_mm512_add_epi32(a.0, b.0)))
    }

    #[inline(always)]
    fn shift_left(a: W, by: u32) -> W {
        W(value!(_mm512_sll_epi32(a.0, _mm_cvtsi32_si128(by.cast_signed()))))
    }

    #[inline(always)]
    fn shift_right(a: W, by: u32) -> W {
        W(value!(_mm512_srl_epi32(a.0, _mm_cvtsi32_si128(by.cast_signed()))))
    }

    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
        let mut pairs = [block[0].0; 16];
        for i in 0..8 {
            let (a, b) = (block[2 * i].0, block[2 * i + 1].0);
            pairs[2 * i] = value!(_mm512_unpacklo_ps(a, b));
            pairs[2 * i + 1] = value!(_mm512_unpackhi_ps(a, b));
        }
        // Vector 4 i + c then holds, in quarter k, column 4 k + c of rows 4 i to 4 i + 3.
        let mut fours = pairs;
        for i in 0..4 {
            for half in 0..2 {
                let a = value!(_mm512_castps_pd(pairs[4 * i + half]));
                let b = value!(_mm512_castps_pd(pairs[4 * i + 2 + half]));
                fours[4 * i + 2 * half] = value!(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
                fours[4 * i + 2 * half + 1] = value!(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
            }
        }
        for c in 0..4 {
            let (a, b, d, e) = (fours[c], fours[4 + c], fours[8 + c], fours[12 + c]);
            let even = value!(_mm512_shuffle_f32x4::<0x88>(a, b));
            let odd = value!(_mm512_shuffle_f32x4::<0xdd>(a, b));
            let later_even = value!(_mm512_shuffle_f32x4::<0x88>(d, e));
            let later_odd = value!(_mm512_shuffle_f32x4::<0xdd>(d, e));
            block[c] = Self(value!(_mm512_shuffle_f32x4::<0x88>(even, later_even)));
            block[4 + c] = Self(value!(_mm512_shuffle_f32x4::<0x88>(odd, later_odd)));
            block[8 + c] = Self(value!(_mm512_shuffle_f32x4::<0xdd>(even, later_even)));
            block[12 + c] = Self(value!(_mm512_shuffle_f32x4::<0xdd>(odd, later_odd)));
        }
    }
}
