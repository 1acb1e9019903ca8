//! Sixteen floats of attention in four registers.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::aarch64::*;

use crate::{attention::Vectors, exp::ROUNDER, lanes::LANES, platform::Task};

/// Used by tasks that [`super::run`] carries out, and nowhere else.
pub(crate) struct Sixteen;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; loads and stores are of parts of arrays as long as their vectors.
        unsafe { $instruction }
    };
}

/// The same instruction for each of four registers.
macro_rules! each {
    ($instruction:ident $(::<$by:literal>)?($($four:expr),*)) => {
        [
            value!($instruction$(::<$by>)?($($four[0]),*)),
            value!($instruction$(::<$by>)?($($four[1]),*)),
            value!($instruction$(::<$by>)?($($four[2]),*)),
            value!($instruction$(::<$by>)?($($four[3]),*)),
        ]
    };
}

/// Where the quarters of an array begin.
macro_rules! quarters {
    ($from:expr, $len:literal) => {{
        let [a, b, c, d] = $from.as_chunks::<$len>().0 else { unreachable!("four quarters") };
        [a.as_ptr(), b.as_ptr(), c.as_ptr(), d.as_ptr()]
    }};
}

#[inline(never)]
#[target_feature(enable = "neon,dotprod")]
fn apart<T: Task>(task: T) -> T::Output {
    task.run()
}

/// 16-bit numbers in two registers.
#[inline(always)]
fn words(from: &[u16; LANES]) -> [uint16x8_t; 2] {
    let [a, b] = [&from[..8], &from[8..]];
    [value!(vld1q_u16(a.as_ptr())), value!(vld1q_u16(b.as_ptr()))]
}

/// Bytes as numbers of 16 bits.
#[inline(always)]
fn widened(bytes: int8x16_t) -> [int16x8_t; 2] {
    [value!(vmovl_s8(vget_low_s8(bytes))), value!(vmovl_high_s8(bytes))]
}

#[inline(always)]
fn sixteen_bytes(from: &[i8; LANES]) -> int8x16_t {
    value!(vld1q_s8(from.as_ptr()))
}

/// Half-precision floats of the lower and of the upper half.
#[inline(always)]
fn half_precision(eight: uint16x8_t) -> [float32x4_t; 2] {
    let floats = value!(vreinterpretq_f16_u16(eight));
    [value!(vcvt_f32_f16(vget_low_f16(floats))), value!(vcvt_high_f32_f16(floats))]
}

#[inline(always)]
fn upper_halves(eight: uint16x8_t) -> [float32x4_t; 2] {
    let low = value!(vshlq_n_u32::<16>(vmovl_u16(vget_low_u16(eight))));
    let high = value!(vshlq_n_u32::<16>(vmovl_high_u16(eight)));
    [value!(vreinterpretq_f32_u32(low)), value!(vreinterpretq_f32_u32(high))]
}

/// There is no sum of neighbouring products as long as these: so the first numbers of all pairs are
/// in two registers, and the second ones in two more.
impl Vectors for Sixteen {
    type Floats = [float32x4_t; 4];
    type Pair = float32x4_t;
    type Quarter = float32x4_t;
    type Integers = [int32x4_t; 4];
    type Shorts = [int16x8_t; 4];
    // Two heads with two keys, or four heads with one vector, are 16 of 32 registers.
    const KEY_HEADS: usize = 2;
    const KEYS: usize = 2;
    const VALUE_VECTORS: usize = 1;
    const HEADS: usize = 4;
    const USUAL_WIDTHS: bool = true;

    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        value!(apart(task))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> [float32x4_t; 4] {
        let from = quarters!(from, 4);
        each!(vld1q_f32(from))
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> [float32x4_t; 4] {
        let [low, high] = words(from);
        let ([a, b], [c, d]) = (half_precision(low), half_precision(high));
        [a, b, c, d]
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> [float32x4_t; 4] {
        let [low, high] = words(from);
        let ([a, b], [c, d]) = (upper_halves(low), upper_halves(high));
        [a, b, c, d]
    }

    #[inline(always)]
    fn load_bf16_pairs(from: &[u16; 2 * LANES]) -> [[float32x4_t; 4]; 2] {
        let from = quarters!(from, 8);
        let both = each!(vld1q_u16(from));
        let both = each!(vreinterpretq_u32_u16(both));
        let upper = [value!(vdupq_n_u32(0xffff_0000)); 4];
        let (even, odd) = (each!(vshlq_n_u32::<16>(both)), each!(vandq_u32(both, upper)));
        [each!(vreinterpretq_f32_u32(even)), each!(vreinterpretq_f32_u32(odd))]
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> [float32x4_t; 4] {
        let [low, high] = widened(sixteen_bytes(from));
        Self::from_integers([
            value!(vmovl_s16(vget_low_s16(low))),
            value!(vmovl_high_s16(low)),
            value!(vmovl_s16(vget_low_s16(high))),
            value!(vmovl_high_s16(high)),
        ])
    }

    #[inline(always)]
    fn store(floats: [float32x4_t; 4], to: &mut [f32; LANES]) {
        let [e, f, g, h] = to.as_chunks_mut::<4>().0 else { unreachable!("four quarters") };
        let to = [e.as_mut_ptr(), f.as_mut_ptr(), g.as_mut_ptr(), h.as_mut_ptr()];
        each!(vst1q_f32(to, floats));
    }

    #[inline(always)]
    fn splat(value: f32) -> [float32x4_t; 4] {
        [value!(vdupq_n_f32(value)); 4]
    }

    #[inline(always)]
    fn add(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn mul(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vmulq_f32(a, b))
    }

    /// The processor's own maximum would keep what is no number, whichever of both it is.
    #[inline(always)]
    fn max(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        let larger = each!(vcgtq_f32(a, b));
        each!(vbslq_f32(larger, a, b))
    }

    #[inline(always)]
    fn power_of_two(bits: [float32x4_t; 4]) -> [float32x4_t; 4] {
        let less = [value!(vdupq_n_u32(127_u32.wrapping_sub(ROUNDER.to_bits()))); 4];
        let bits = each!(vreinterpretq_u32_f32(bits));
        let powers = each!(vaddq_u32(bits, less));
        let powers = each!(vshlq_n_u32::<23>(powers));
        each!(vreinterpretq_f32_u32(powers))
    }

    #[inline(always)]
    fn fma(a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vfmaq_f32(c, a, b))
    }

    /// Two lanes are left of each vector.
    #[inline(always)]
    fn pair([a, b]: [[float32x4_t; 4]; 2]) -> float32x4_t {
        let [a, b] =
            [value!(vreinterpretq_f64_f32(four(a))), value!(vreinterpretq_f64_f32(four(b)))];
        let [low, high] = [value!(vzip1q_f64(a, b)), value!(vzip2q_f64(a, b))];
        value!(vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high)))
    }

    /// One lane is left of each.
    #[inline(always)]
    fn quarter([a, b]: [float32x4_t; 2]) -> float32x4_t {
        value!(vpaddq_f32(a, b))
    }

    #[inline(always)]
    fn sums(quarters: [float32x4_t; 4]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        Self::store(quarters, &mut out);
        out
    }

    #[inline(always)]
    fn no_integers() -> [int32x4_t; 4] {
        [value!(vdupq_n_s32(0)); 4]
    }

    #[inline(always)]
    fn from_integers(integers: [int32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vcvtq_f32_s32(integers))
    }

    /// As they lie, like [`Self::bytes`]: these meet, and the sum of all lanes is what counts.
    #[inline(always)]
    fn shorts(from: &[i16; 2 * LANES]) -> [int16x8_t; 4] {
        let from = quarters!(from, 8);
        each!(vld1q_s16(from))
    }

    #[inline(always)]
    fn bytes(from: &[i8; 2 * LANES]) -> [int16x8_t; 4] {
        let [a, b] = from.as_chunks::<LANES>().0 else { unreachable!("two halves") };
        let ([a, b], [c, d]) = (widened(sixteen_bytes(a)), widened(sixteen_bytes(b)));
        [a, b, c, d]
    }

    #[inline(always)]
    fn pairs(first: &[i8; LANES], second: &[i8; LANES]) -> [int16x8_t; 4] {
        in_pairs(sixteen_bytes(first), sixteen_bytes(second))
    }

    #[inline(always)]
    fn splat_pair([even, odd]: [i16; 2]) -> [int16x8_t; 4] {
        let [even, odd] = [value!(vdupq_n_s16(even)), value!(vdupq_n_s16(odd))];
        [even, even, odd, odd]
    }

    #[inline(always)]
    fn splat_two(pair: i32) -> [int16x8_t; 4] {
        Self::splat_pair([pair as i16, (pair >> 16) as i16])
    }

    #[inline(always)]
    fn even_and_odd(from: &[i8; 4 * LANES]) -> [[int16x8_t; 4]; 2] {
        let int8x16x4_t(a, b, c, d) = value!(vld4q_s8(from.as_ptr()));
        [in_pairs(a, c), in_pairs(b, d)]
    }

    #[inline(always)]
    fn add_products(
        sums: [int32x4_t; 4],
        [a, b, c, d]: [int16x8_t; 4],
        [e, f, g, h]: [int16x8_t; 4],
    ) -> [int32x4_t; 4] {
        sixteen_products(sixteen_products(sums, [a, b], [e, f]), [c, d], [g, h])
    }

    #[inline(always)]
    fn integer_sums([a, b, c, d]: [[int32x4_t; 4]; 4]) -> [i32; 4] {
        let [a, b] =
            [value!(vpaddq_s32(folded(a), folded(b))), value!(vpaddq_s32(folded(c), folded(d)))];
        let mut out = [0; 4];
        value!(vst1q_s32(out.as_mut_ptr(), vpaddq_s32(a, b)));
        out
    }
}

/// Halves added to halves, until four lanes are left.
#[inline(always)]
fn four([a, b, c, d]: [float32x4_t; 4]) -> float32x4_t {
    value!(vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d)))
}

#[inline(always)]
fn folded([a, b, c, d]: [int32x4_t; 4]) -> int32x4_t {
    value!(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)))
}

#[inline(always)]
fn in_pairs(first: int8x16_t, second: int8x16_t) -> [int16x8_t; 4] {
    let ([a, b], [c, d]) = (widened(first), widened(second));
    [a, b, c, d]
}

/// Adds one product to each sum.
#[inline(always)]
fn sixteen_products(
    [s, t, u, v]: [int32x4_t; 4],
    [a, b]: [int16x8_t; 2],
    [c, d]: [int16x8_t; 2],
) -> [int32x4_t; 4] {
    [
        value!(vmlal_s16(s, vget_low_s16(a), vget_low_s16(c))),
        value!(vmlal_high_s16(t, a, c)),
        value!(vmlal_s16(u, vget_low_s16(b), vget_low_s16(d))),
        value!(vmlal_high_s16(v, b, d)),
    ]
}
