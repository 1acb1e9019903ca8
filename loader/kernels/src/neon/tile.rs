//! Tiles of 16 weight rows, 4 to a vector.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::aarch64::*;

use crate::tiles::{Lanes, Shape};

/// 4 sums. Used by tasks that [`super::run`] carries out, and nowhere else.
#[derive(Clone, Copy)]
pub(crate) struct V(int32x4_t);

/// 4 sums of integers become registers for 4 rows and 4 vectors.
pub(crate) struct Tiles;

impl Shape for Tiles {
    type Lanes = V;
    const VECTORS: usize = 4;
}

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; the instruction touches no memory.
        unsafe { $instruction }
    };
}

impl Lanes for V {
    const N: usize = 4;
    const SIGNED: bool = true;
    type Weights = int8x16_t;
    type Pairs = int32x4_t;
    type Floats = float32x4_t;

    #[inline(always)]
    fn zero() -> Self {
        Self(value!(vdupq_n_s32(0)))
    }

    #[inline(always)]
    fn weights<const BITS: usize>(from: &[u32]) -> int8x16_t {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { vreinterpretq_s8_u32(vld1q_u32(from.as_ptr())) }
    }

    #[inline(always)]
    fn no_pairs() -> int32x4_t {
        value!(vdupq_n_s32(0))
    }

    #[inline(always)]
    fn add_products<const BITS: usize>(sums: int32x4_t, weights: int8x16_t, x: u32) -> int32x4_t {
        value!(super::sdot(sums, weights, vreinterpretq_s8_u32(vdupq_n_u32(x))))
    }

    #[inline(always)]
    fn plus_pairs(self, sums: int32x4_t) -> Self {
        Self(value!(vaddq_s32(self.0, sums)))
    }

    #[inline(always)]
    fn plus(self, value: i32) -> Self {
        Self(value!(vaddq_s32(self.0, vdupq_n_s32(value))))
    }

    #[inline(always)]
    fn floats(self) -> float32x4_t {
        value!(vcvtq_f32_s32(self.0))
    }

    #[inline(always)]
    fn load(from: &[f32]) -> float32x4_t {
        let from = &from[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { vld1q_f32(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(floats: float32x4_t, to: &mut [f32]) {
        let to = &mut to[..Self::N];
        // SAFETY: the slice above is as long as the vector; the processor as for `value!`.
        unsafe { vst1q_f32(to.as_mut_ptr(), floats) }
    }

    #[inline(always)]
    fn splat(value: f32) -> float32x4_t {
        value!(vdupq_n_f32(value))
    }

    #[inline(always)]
    fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        value!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        value!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        value!(vfmaq_f32(c, a, b))
    }
}
