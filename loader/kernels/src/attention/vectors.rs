//! Sixteen floats at a time, as each platform has them.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::array;

use crate::{
    floats::{bf16_to_f32, f16_to_f32},
    lanes::{LANES, tree},
    platform::Task,
};

/// Vectors of one platform. Operations are those of f32, each rounded by itself, so that all
/// platforms have the same bits.
pub(crate) trait Vectors {
    /// One for each of [`LANES`].
    type Floats: Copy;
    /// Four vectors whose lanes have been added up in part.
    type Quarter: Copy;
    /// Query heads whose products with four keys stay in registers.
    const DOT_HEADS: usize;
    /// Vectors of a row whose weighted sums for four query heads stay in registers.
    const SUM_VECTORS: usize;

    /// Carries out a task in a function of its own: within a larger one its sums would not stay
    /// in registers.
    fn run<T: Task>(task: T) -> T::Output;

    fn load(from: &[f32; LANES]) -> Self::Floats;
    /// Of IEEE half-precision floats.
    fn load_f16(from: &[u16; LANES]) -> Self::Floats;
    /// Of upper halves of f32.
    fn load_bf16(from: &[u16; LANES]) -> Self::Floats;
    fn load_i8(from: &[i8; LANES]) -> Self::Floats;
    fn store(floats: Self::Floats, to: &mut [f32; LANES]);
    fn splat(value: f32) -> Self::Floats;
    fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Begins to add the lanes of four vectors, each by itself.
    fn quarter(vectors: [Self::Floats; 4]) -> Self::Quarter;
    /// The sums of the lanes of sixteen vectors, as [`tree`] adds them.
    fn sums(quarters: [Self::Quarter; 4]) -> [f32; LANES];
}

/// Plain Rust.
pub(crate) struct Plain;

impl Vectors for Plain {
    type Floats = [f32; LANES];
    type Quarter = [f32; 4];
    const DOT_HEADS: usize = 1;
    const SUM_VECTORS: usize = 1;

    /// On processors without vectors of ours the caller's function is as good.
    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
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
    fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    fn quarter(vectors: [[f32; LANES]; 4]) -> [f32; 4] {
        vectors.map(tree)
    }

    #[inline(always)]
    fn sums(quarters: [[f32; 4]; 4]) -> [f32; LANES] {
        array::from_fn(|index| quarters[index / 4][index % 4])
    }
}
