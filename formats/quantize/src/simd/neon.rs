//! NEON, which every 64-bit Arm has: 4 lanes.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads and stores")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::aarch64::*;

use super::{Lanes, MAX_LANES, Task};

/// Evidence that the processor has the instructions of this file.
#[derive(Clone, Copy)]
pub(super) struct Proof(());

impl Proof {
    pub(super) fn detect() -> Option<Self> {
        (std::arch::is_aarch64_feature_detected!("neon")).then_some(Self(()))
    }
}

/// Whether this machine has all that kernels of this platform use.
#[inline]
pub(super) fn is_available() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
        && std::arch::is_aarch64_feature_detected!("dotprod")
}

/// Runs a task inside a function that has the instructions enabled.
pub(super) fn run<T: Task>(task: T) -> T::Output {
    let proof = Proof::detect().expect("the caller chose a platform of this machine");
    // SAFETY: the proof was made by asking the processor.
    unsafe { enabled(task, proof) }
}

#[target_feature(enable = "neon")]
fn enabled<T: Task>(task: T, proof: Proof) -> T::Output {
    task.run::<V>(proof)
}

/// 4 numbers. Made only with a [`Proof`] or from another.
#[derive(Clone, Copy)]
pub(super) struct V(float32x4_t);

/// 4 words. Made only with a [`Proof`] or from another.
#[derive(Clone, Copy)]
pub(super) struct W(uint32x4_t);

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: the arguments are proofs, or vectors, which are made only with a proof that the
        // processor has the instruction; it touches no memory.
        unsafe { $instruction }
    };
}

impl Lanes for V {
    const N: usize = 4;
    type Proof = Proof;
    type Words = W;

    #[inline(always)]
    fn splat(_: Proof, value: f32) -> Self {
        Self(value!(vdupq_n_f32(value)))
    }

    #[inline(always)]
    fn load(_: Proof, from: &[f32]) -> Self {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        Self(unsafe { vld1q_f32(from.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { vst1q_f32(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(value!(vaddq_f32(self.0, other.0)))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(value!(vsubq_f32(self.0, other.0)))
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(value!(vmulq_f32(self.0, other.0)))
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(value!(vdivq_f32(self.0, other.0)))
    }

    #[inline(always)]
    fn mul_add_exact(self, factor: Self, addend: Self) -> Self {
        Self(value!(vfmaq_f32(addend.0, self.0, factor.0)))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // Arm's own minimum treats NaN and zeros of both signs differently.
        Self::less(self, other, self, other)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::less(other, self, self, other)
    }

    #[inline(always)]
    fn less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        let mask = value!(vcltq_f32(a.0, b.0));
        Self(value!(vbslq_f32(mask, yes.0, no.0)))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self(value!(vabsq_f32(self.0)))
    }

    #[inline(always)]
    fn rint(self) -> Self {
        Self(value!(vrndnq_f32(self.0)))
    }

    #[inline(always)]
    fn words(self) -> W {
        W(value!(vreinterpretq_u32_f32(self.0)))
    }

    #[inline(always)]
    fn from_words(words: W) -> Self {
        Self(value!(vreinterpretq_f32_u32(words.0)))
    }

    #[inline(always)]
    fn splat_word(_: Proof, value: u32) -> W {
        W(value!(vdupq_n_u32(value)))
    }

    #[inline(always)]
    fn load_words(_: Proof, from: &[u32]) -> W {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        W(unsafe { vld1q_u32(from.as_ptr()) })
    }

    #[inline(always)]
    fn store_words(words: W, to: &mut [u32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { vst1q_u32(to.as_mut_ptr(), words.0) }
    }

    #[inline(always)]
    fn load_bytes(_: Proof, from: &[u8]) -> W {
        let from = &from[..4 * Self::N];
        // SAFETY: the slice above is as long as the vector; the proof is the caller's.
        W(unsafe { vreinterpretq_u32_u8(vld1q_u8(from.as_ptr())) })
    }

    #[inline(always)]
    fn store_bytes(words: W, to: &mut [u8]) {
        let to = &mut to[..4 * Self::N];
        // SAFETY: the slice above is as long as the vector, which is made only with a proof.
        unsafe { vst1q_u8(to.as_mut_ptr(), vreinterpretq_u8_u32(words.0)) }
    }

    #[inline(always)]
    fn and(a: W, b: W) -> W {
        W(value!(vandq_u32(a.0, b.0)))
    }

    #[inline(always)]
    fn or(a: W, b: W) -> W {
        W(value!(vorrq_u32(a.0, b.0)))
    }

    #[inline(always)]
    fn plus(a: W, b: W) -> W {
        W(value!(vaddq_u32(a.0, b.0)))
    }

    #[inline(always)]
    fn shift_left(a: W, by: u32) -> W {
        W(value!(vshlq_u32(a.0, vdupq_n_s32(by.cast_signed()))))
    }

    #[inline(always)]
    fn shift_right(a: W, by: u32) -> W {
        // A shift to the left by a negative number.
        W(value!(vshlq_u32(a.0, vdupq_n_s32(-by.cast_signed()))))
    }

    #[inline(always)]
    fn transpose(block: &mut [Self; MAX_LANES]) {
        let (a, b, c, d) = (block[0].0, block[1].0, block[2].0, block[3].0);
        let (ab_even, ab_odd) = (value!(vtrn1q_f32(a, b)), value!(vtrn2q_f32(a, b)));
        let (cd_even, cd_odd) = (value!(vtrn1q_f32(c, d)), value!(vtrn2q_f32(c, d)));
        for (column, ab, cd) in [(0, ab_even, cd_even), (1, ab_odd, cd_odd)] {
            let (ab, cd) = (value!(vreinterpretq_f64_f32(ab)), value!(vreinterpretq_f64_f32(cd)));
            block[column] = Self(value!(vreinterpretq_f32_f64(vtrn1q_f64(ab, cd))));
            block[column + 2] = Self(value!(vreinterpretq_f32_f64(vtrn2q_f64(ab, cd))));
        }
    }
}
