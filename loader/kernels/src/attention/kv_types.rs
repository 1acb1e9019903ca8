//! Rows of keys and values in the element types of the KV cache.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use super::vectors::Vectors;
use crate::lanes::LANES;

/// An element type of the KV cache.
pub(super) trait Stored: Copy {
    type Element: Copy;
    /// Whether each row has a scale.
    const SCALED: bool;

    fn load<V: Vectors>(from: &[Self::Element; LANES]) -> V::Floats;
}

/// 32-bit floats.
#[derive(Clone, Copy)]
pub(super) struct F32;

/// IEEE f16.
#[derive(Clone, Copy)]
pub(super) struct F16;

/// bf16: the upper half of an f32.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

/// Integers times the row's scale.
#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Stored for F32 {
    type Element = f32;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[f32; LANES]) -> V::Floats {
        V::load(from)
    }
}

impl Stored for F16 {
    type Element = u16;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[u16; LANES]) -> V::Floats {
        V::load_f16(from)
    }
}

impl Stored for Bf16 {
    type Element = u16;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[u16; LANES]) -> V::Floats {
        V::load_bf16(from)
    }
}

impl Stored for Q8 {
    type Element = i8;
    const SCALED: bool = true;

    #[inline(always)]
    fn load<V: Vectors>(from: &[i8; LANES]) -> V::Floats {
        V::load_i8(from)
    }
}

/// Rows `[count, width]`; `width` is a multiple of [`LANES`].
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, S: Stored> {
    pub(super) elements: &'a [S::Element],
    /// One for each row, if they are scaled.
    pub(super) scales: &'a [f32],
    pub(super) width: usize,
}

impl<'a, S: Stored> Rows<'a, S> {
    pub(super) fn count(self) -> usize {
        self.elements.len() / self.width
    }

    /// Vectors of some rows.
    #[inline(always)]
    pub(super) fn rows(self, rows: Range<usize>) -> &'a [[S::Element; LANES]] {
        self.elements[rows.start * self.width..rows.end * self.width].as_chunks().0
    }

    #[inline(always)]
    pub(super) fn scale<V: Vectors>(self, index: usize) -> V::Floats {
        V::splat(if S::SCALED { self.scales[index] } else { 1.0 })
    }
}

#[inline(always)]
pub(super) fn load<V: Vectors, S: Stored>(
    from: &[S::Element; LANES],
    scale: V::Floats,
) -> V::Floats {
    let floats = S::load::<V>(from);
    if S::SCALED { V::mul(floats, scale) } else { floats }
}
