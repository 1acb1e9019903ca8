//! One lane of plain Rust: what all other platforms are compared with.

use super::{Lanes, MAX_LANES};

impl Lanes for f32 {
    const N: usize = 1;
    type Proof = ();
    type Words = u32;

    #[inline(always)]
    fn splat((): (), value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn load((): (), from: &[f32]) -> Self {
        from[0]
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        to[0] = self;
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self + other
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self - other
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self * other
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self / other
    }

    #[inline(always)]
    fn mul_add_exact(self, factor: Self, addend: Self) -> Self {
        self * factor + addend
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        if self < other { self } else { other }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline(always)]
    fn less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        if a < b { yes } else { no }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }

    #[inline(always)]
    fn rint(self) -> Self {
        self.round_ties_even()
    }

    #[inline(always)]
    fn rint_small(self, (): ()) -> Self {
        // Above 2²³ there are no fractions. An instruction to round is not in every processor.
        self + 8_388_608.0 - 8_388_608.0
    }

    #[inline(always)]
    fn words(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn from_words(words: u32) -> Self {
        f32::from_bits(words)
    }

    #[inline(always)]
    fn splat_word((): (), value: u32) -> u32 {
        value
    }

    #[inline(always)]
    fn load_words((): (), from: &[u32]) -> u32 {
        from[0]
    }

    #[inline(always)]
    fn store_words(words: u32, to: &mut [u32]) {
        to[0] = words;
    }

    #[inline(always)]
    fn load_bytes((): (), from: &[u8]) -> u32 {
        u32::from_le_bytes([from[0], from[1], from[2], from[3]])
    }

    #[inline(always)]
    fn store_bytes(words: u32, to: &mut [u8]) {
        to[..4].copy_from_slice(&words.to_le_bytes());
    }

    #[inline(always)]
    fn and(a: u32, b: u32) -> u32 {
        a & b
    }

    #[inline(always)]
    fn or(a: u32, b: u32) -> u32 {
        a | b
    }

    #[inline(always)]
    fn plus(a: u32, b: u32) -> u32 {
        a.wrapping_add(b)
    }

    #[inline(always)]
    fn shift_left(a: u32, by: u32) -> u32 {
        a << by
    }

    #[inline(always)]
    fn shift_right(a: u32, by: u32) -> u32 {
        a >> by
    }

    #[inline(always)]
    fn transpose(_: &mut [Self; MAX_LANES]) {}
}
