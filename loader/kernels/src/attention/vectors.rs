//! Sixteen floats at a time, as each platform has them.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::array;

use crate::{
    exp::{COEFFICIENTS, HIGHEST, LEAST, LN2_HIGH, LN2_LOW, ROUNDER},
    floats::{bf16_to_f32, f16_to_f32},
    lanes::{LANES, tree},
    platform::Task,
};

/// Vectors of one platform. Operations are those of f32, rounded once, so that all platforms have
/// the same bits.
pub(crate) trait Vectors {
    /// One for each of [`LANES`].
    type Floats: Copy;
    /// Two vectors whose lanes have been added up in part.
    type Pair: Copy;
    /// Four vectors whose lanes have been added up in part.
    type Quarter: Copy;
    /// Sixteen 32-bit integers.
    type Integers: Copy;
    /// Twice as many of 16 bits.
    type Shorts: Copy;
    /// Query heads whose products with [`Self::KEYS`] keys stay in registers.
    const KEY_HEADS: usize;
    /// Keys that are computed with so many heads: two or four.
    const KEYS: usize;
    /// Vectors of a value whose weighted sums for four query heads stay in registers.
    const VALUE_VECTORS: usize;
    /// Most query heads that are computed with keys and values together: one, two or four.
    const HEADS: usize;
    /// Whether loops are compiled for the usual widths of heads too.
    const USUAL_WIDTHS: bool;

    /// Carries out a task in a function of its own: within a larger one its sums would not stay
    /// in registers.
    fn run<T: Task>(task: T) -> T::Output;

    fn load(from: &[f32; LANES]) -> Self::Floats;
    /// Of IEEE f16.
    fn load_f16(from: &[u16; LANES]) -> Self::Floats;
    /// Of bf16.
    fn load_bf16(from: &[u16; LANES]) -> Self::Floats;
    /// The same in pairs: first the first of each, then the second.
    fn load_bf16_pairs(from: &[u16; 2 * LANES]) -> [Self::Floats; 2];
    fn load_i8(from: &[i8; LANES]) -> Self::Floats;
    fn store(floats: Self::Floats, to: &mut [f32; LANES]);
    fn splat(value: f32) -> Self::Floats;
    fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a` where it is larger, and else `b`.
    fn max(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Two to the power of what the low bits of each say, as [`crate::exp::exp_of_negative`] counts.
    fn power_of_two(bits: Self::Floats) -> Self::Floats;
    /// `a · b + c`.
    fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Rows as columns.
    #[inline(always)]
    fn transpose(from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        for (column, to) in to.iter_mut().enumerate() {
            *to = array::from_fn(|row| from[row][column]);
        }
    }

    /// Begins to add the lanes of two vectors, each by itself.
    fn pair(vectors: [Self::Floats; 2]) -> Self::Pair;
    /// The same of four.
    fn quarter(pairs: [Self::Pair; 2]) -> Self::Quarter;
    /// The sums of the lanes of sixteen vectors, as [`tree`] adds them.
    fn sums(quarters: [Self::Quarter; 4]) -> [f32; LANES];

    fn no_integers() -> Self::Integers;
    fn from_integers(integers: Self::Integers) -> Self::Floats;
    /// The lower 16 bits of each.
    #[inline(always)]
    fn low_halves(from: &[f32; LANES]) -> [i16; LANES] {
        from.map(|float| float.to_bits() as i16)
    }

    fn shorts(from: &[i16; 2 * LANES]) -> Self::Shorts;
    fn bytes(from: &[i8; 2 * LANES]) -> Self::Shorts;
    /// One of the first, one of the second, and so on.
    fn pairs(first: &[i8; LANES], second: &[i8; LANES]) -> Self::Shorts;
    fn splat_pair(pair: [i16; 2]) -> Self::Shorts;
    /// The same of a pair that was read as one number.
    fn splat_two(pair: i32) -> Self::Shorts;
    /// Of each four the first and the third, and the second and the fourth.
    fn even_and_odd(from: &[i8; 4 * LANES]) -> [Self::Shorts; 2];
    /// Adds both products of each pair.
    fn add_products(sums: Self::Integers, a: Self::Shorts, b: Self::Shorts) -> Self::Integers;
    /// The sum of all lanes of each.
    fn integer_sums(vectors: [Self::Integers; 4]) -> [i32; 4];
}

/// [`crate::exp::exp_of_negative`] of each.
#[inline(always)]
pub(super) fn exp_of_negative<V: Vectors>(x: V::Floats) -> V::Floats {
    let x = V::max(V::splat(LEAST), x);
    let rounded = V::fma(x, V::splat(std::f32::consts::LOG2_E), V::splat(ROUNDER));
    let whole = V::add(rounded, V::splat(-ROUNDER));
    let rest = V::fma(whole, V::splat(-LN2_LOW), V::fma(whole, V::splat(-LN2_HIGH), x));
    let mut sum = V::splat(HIGHEST);
    for coefficient in COEFFICIENTS {
        sum = V::fma(sum, rest, V::splat(coefficient));
    }
    let value = V::add(V::fma(V::mul(sum, rest), rest, rest), V::splat(1.0));
    V::mul(value, V::power_of_two(rounded))
}

/// Plain Rust.
pub(crate) struct Plain;

impl Vectors for Plain {
    type Floats = [f32; LANES];
    type Pair = [f32; 2];
    type Quarter = [f32; 4];
    type Integers = [i32; LANES];
    type Shorts = [i16; 2 * LANES];
    const KEY_HEADS: usize = 1;
    const KEYS: usize = 4;
    const VALUE_VECTORS: usize = 1;
    // Loops over arrays are unrolled: more of them take minutes to compile.
    const HEADS: usize = 1;
    const USUAL_WIDTHS: bool = false;

    /// Fused operations are a call of a function each where the processor has no instruction for
    /// them, or is not known to have it: so what is plain is compiled for both.
    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        #[cfg(target_arch = "x86_64")]
        return crate::avx2::run_if_available(task);
        #[cfg(not(target_arch = "x86_64"))]
        task.run()
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> [f32; LANES] {
        *from
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> [f32; LANES] {
        from.map(f16_to_f32)
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> [f32; LANES] {
        from.map(bf16_to_f32)
    }

    #[inline(always)]
    fn load_bf16_pairs(from: &[u16; 2 * LANES]) -> [[f32; LANES]; 2] {
        let half = |odd| array::from_fn(|lane| bf16_to_f32(from[2 * lane + odd]));
        [half(0), half(1)]
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> [f32; LANES] {
        from.map(f32::from)
    }

    #[inline(always)]
    fn store(floats: [f32; LANES], to: &mut [f32; LANES]) {
        *to = floats;
    }

    #[inline(always)]
    fn splat(value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn add(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        array::from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    fn max(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        array::from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn power_of_two(bits: [f32; LANES]) -> [f32; LANES] {
        bits.map(|bits| {
            let power = bits.to_bits().wrapping_sub(ROUNDER.to_bits());
            f32::from_bits(power.wrapping_add(127) << 23)
        })
    }

    #[inline(always)]
    fn pair(vectors: [[f32; LANES]; 2]) -> [f32; 2] {
        vectors.map(tree)
    }

    #[inline(always)]
    fn quarter([[a, b], [c, d]]: [[f32; 2]; 2]) -> [f32; 4] {
        [a, b, c, d]
    }

    #[inline(always)]
    fn sums(quarters: [[f32; 4]; 4]) -> [f32; LANES] {
        array::from_fn(|index| quarters[index / 4][index % 4])
    }

    #[inline(always)]
    fn no_integers() -> [i32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn from_integers(integers: [i32; LANES]) -> [f32; LANES] {
        integers.map(|integer| integer as f32)
    }

    #[inline(always)]
    fn shorts(from: &[i16; 2 * LANES]) -> [i16; 2 * LANES] {
        *from
    }

    #[inline(always)]
    fn bytes(from: &[i8; 2 * LANES]) -> [i16; 2 * LANES] {
        from.map(i16::from)
    }

    #[inline(always)]
    fn pairs(first: &[i8; LANES], second: &[i8; LANES]) -> [i16; 2 * LANES] {
        array::from_fn(|lane| i16::from(if lane % 2 == 0 { first } else { second }[lane / 2]))
    }

    #[inline(always)]
    fn splat_pair(pair: [i16; 2]) -> [i16; 2 * LANES] {
        array::from_fn(|lane| pair[lane % 2])
    }

    #[inline(always)]
    fn splat_two(pair: i32) -> [i16; 2 * LANES] {
        Self::splat_pair(zerocopy::transmute!(pair))
    }

    #[inline(always)]
    fn even_and_odd(from: &[i8; 4 * LANES]) -> [[i16; 2 * LANES]; 2] {
        let half = |odd| array::from_fn(|lane| i16::from(from[2 * lane + odd]));
        [half(0), half(1)]
    }

    #[inline(always)]
    fn add_products(sums: [i32; LANES], a: [i16; 2 * LANES], b: [i16; 2 * LANES]) -> [i32; LANES] {
        let product = |lane: usize| i32::from(a[lane]) * i32::from(b[lane]);
        array::from_fn(|lane| sums[lane] + (product(2 * lane) + product(2 * lane + 1)))
    }

    #[inline(always)]
    fn integer_sums(vectors: [[i32; LANES]; 4]) -> [i32; 4] {
        vectors.map(|vector| vector.iter().sum())
    }
}
