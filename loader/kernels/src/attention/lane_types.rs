//! Element types of [`super::Order::Lanes`], and their multiply-add.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use super::{
    kv_layout::{TOGETHER_BF16, TOGETHER_Q8},
    kv_types::{Bf16, F16, F32, Q8},
    vectors::Vectors,
};
use crate::lanes::LANES;

/// An element type of [`Order::Lanes`] and its multiply-add.
pub(super) trait LaneType {
    type Element: Copy;
    /// Elements of sixteen lanes.
    type Line;
    /// The factors of the elements of a lane.
    type Factors: Copy;
    /// One element of every lane, or what is multiplied at a time.
    type Part<V: Vectors>: Copy;
    /// Sums of every lane.
    type Sums<V: Vectors>: Copy;
    /// Elements of a lane.
    const TOGETHER: usize;
    /// Parts of a line: one or two.
    const PARTS: usize;
    /// Whether each part is an element, which may have to be left out.
    const APART: bool;

    fn lines(elements: &[Self::Element]) -> &[Self::Line];
    fn parts<V: Vectors>(line: &Self::Line) -> [Self::Part<V>; 2];
    fn splat<V: Vectors>(factors: Self::Factors) -> [Self::Part<V>; 2];
    fn nothing<V: Vectors>() -> Self::Sums<V>;
    /// Adds products.
    fn add<V: Vectors>(
        sums: Self::Sums<V>,
        factor: Self::Part<V>,
        part: Self::Part<V>,
    ) -> Self::Sums<V>;
    fn floats<V: Vectors>(sums: Self::Sums<V>) -> V::Floats;
}

/// Float element types.
pub(super) trait FloatLanes {
    type Element: Copy;
    type Line;
    type Factors: Copy;
    const TOGETHER: usize;

    fn lines(elements: &[Self::Element]) -> &[Self::Line];
    fn parts<V: Vectors>(line: &Self::Line) -> [V::Floats; 2];
    fn splat<V: Vectors>(factors: Self::Factors) -> [V::Floats; 2];
    /// Factors of consecutive elements.
    fn factors(floats: &[f32]) -> &[Self::Factors];
}

/// Types with one element per lane.
macro_rules! one_in_a_lane {
    ($form:ident, $number:ident, $load:ident) => {
        impl FloatLanes for $form {
            type Element = $number;
            type Line = [$number; LANES];
            type Factors = f32;
            const TOGETHER: usize = 1;

            #[inline(always)]
            fn lines(elements: &[$number]) -> &[[$number; LANES]] {
                elements.as_chunks().0
            }

            #[inline(always)]
            fn parts<V: Vectors>(line: &[$number; LANES]) -> [V::Floats; 2] {
                [V::$load(line); 2]
            }

            #[inline(always)]
            fn splat<V: Vectors>(factor: f32) -> [V::Floats; 2] {
                [V::splat(factor); 2]
            }

            #[inline(always)]
            fn factors(floats: &[f32]) -> &[f32] {
                floats
            }
        }
    };
}
one_in_a_lane!(F32, f32, load);
one_in_a_lane!(F16, u16, load_f16);

impl FloatLanes for Bf16 {
    type Element = u16;
    type Line = [u16; TOGETHER_BF16 * LANES];
    type Factors = [f32; TOGETHER_BF16];
    const TOGETHER: usize = TOGETHER_BF16;

    #[inline(always)]
    fn lines(elements: &[u16]) -> &[Self::Line] {
        elements.as_chunks().0
    }

    #[inline(always)]
    fn parts<V: Vectors>(line: &Self::Line) -> [V::Floats; 2] {
        V::load_bf16_pairs(line)
    }

    #[inline(always)]
    fn splat<V: Vectors>([even, odd]: Self::Factors) -> [V::Floats; 2] {
        [V::splat(even), V::splat(odd)]
    }

    #[inline(always)]
    fn factors(floats: &[f32]) -> &[Self::Factors] {
        floats.as_chunks().0
    }
}

impl<S: FloatLanes> LaneType for S {
    type Element = S::Element;
    type Line = S::Line;
    type Factors = S::Factors;
    type Part<V: Vectors> = V::Floats;
    type Sums<V: Vectors> = V::Floats;
    const TOGETHER: usize = S::TOGETHER;
    const PARTS: usize = S::TOGETHER;
    const APART: bool = S::TOGETHER > 1;

    #[inline(always)]
    fn lines(elements: &[Self::Element]) -> &[Self::Line] {
        S::lines(elements)
    }

    #[inline(always)]
    fn parts<V: Vectors>(line: &Self::Line) -> [V::Floats; 2] {
        S::parts::<V>(line)
    }

    #[inline(always)]
    fn splat<V: Vectors>(factors: Self::Factors) -> [V::Floats; 2] {
        S::splat::<V>(factors)
    }

    #[inline(always)]
    fn nothing<V: Vectors>() -> V::Floats {
        V::splat(0.0)
    }

    #[inline(always)]
    fn add<V: Vectors>(sums: V::Floats, factor: V::Floats, part: V::Floats) -> V::Floats {
        V::fma(factor, part, sums)
    }

    #[inline(always)]
    fn floats<V: Vectors>(sums: V::Floats) -> V::Floats {
        sums
    }
}

/// Products with 16-bit integers are added in pairs, of which both factors are one number of 32 bits:
/// so they come from memory to all lanes at once.
impl LaneType for Q8 {
    type Element = i8;
    type Line = [i8; TOGETHER_Q8 * LANES];
    type Factors = [i32; 2];
    type Part<V: Vectors> = V::Shorts;
    type Sums<V: Vectors> = V::Integers;
    const TOGETHER: usize = TOGETHER_Q8;
    const PARTS: usize = 2;
    const APART: bool = false;

    #[inline(always)]
    fn lines(elements: &[i8]) -> &[Self::Line] {
        elements.as_chunks().0
    }

    #[inline(always)]
    fn parts<V: Vectors>(line: &Self::Line) -> [V::Shorts; 2] {
        V::even_and_odd(line)
    }

    #[inline(always)]
    fn splat<V: Vectors>([even, odd]: Self::Factors) -> [V::Shorts; 2] {
        [V::splat_two(even), V::splat_two(odd)]
    }

    #[inline(always)]
    fn nothing<V: Vectors>() -> V::Integers {
        V::no_integers()
    }

    #[inline(always)]
    fn add<V: Vectors>(sums: V::Integers, factor: V::Shorts, part: V::Shorts) -> V::Integers {
        V::add_products(sums, factor, part)
    }

    #[inline(always)]
    fn floats<V: Vectors>(sums: V::Integers) -> V::Floats {
        V::from_integers(sums)
    }
}
