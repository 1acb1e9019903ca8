//! Instruction sets: which there are, how one is chosen, and the lane operations that arithmetic
//! over many groups is written in. Knows nothing of groups, bits or files.
//!
//! Arithmetic is written once, in safe code over `Lanes`, as a `Task`. `Platform::run`
//! compiles it for each instruction set. Every operation is one IEEE operation on each lane (no
//! estimates, and a fused multiply-add only where the product is exact), so a lane's result
//! depends neither on the vector's width nor on the instruction set; `f32` itself is the vector of
//! the portable twin.

#![expect(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables its instructions"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

use std::{fmt, str::FromStr};

/// An instruction set that arithmetic is written or compiled for: that of this crate, and the
/// kernels of the engine. Results are equal bit for bit on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// Plain Rust; runs everywhere.
    Portable,
    /// 64-bit Arm with dot products of bytes: 4 lanes.
    Neon,
    /// x86-64 with AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI and VNNI, and all of [`Self::Avx2`]: 16 lanes.
    Avx512,
}

impl Platform {
    /// Every platform there is code for, here or elsewhere, the fastest last.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// The fastest platform of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|platform| platform.is_available()).unwrap_or(Self::Portable)
    }

    /// The platforms that run on this machine, the fastest last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|platform| platform.is_available()).collect()
    }

    /// Whether this machine has all the instructions.
    #[inline]
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::is_available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::is_available(),
            _ => false,
        }
    }

    /// The fastest platform of this machine for the arithmetic of this crate, which needs fewer
    /// instructions than kernels: AVX-512 F and BW, AVX2 and FMA, NEON. Kernels may refuse it.
    #[must_use]
    pub fn detect_for_quantizing() -> Self {
        Self::ALL.into_iter().rfind(|platform| platform.has_lanes()).unwrap_or(Self::Portable)
    }

    /// The platforms on which the arithmetic of this crate runs on this machine, the fastest last.
    #[must_use]
    pub fn available_for_quantizing() -> Vec<Self> {
        Self::ALL.into_iter().filter(|platform| platform.has_lanes()).collect()
    }

    /// Whether this machine has the instructions of the platform's [`Lanes`].
    fn has_lanes(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Proof::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Proof::detect().is_some(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::Proof::detect().is_some(),
            _ => false,
        }
    }

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Runs a task compiled for this platform.
    ///
    /// # Panics
    /// When this machine does not have the instructions of the platform's [`Lanes`].
    #[inline]
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self {
            Self::Portable => task.run::<f32>(()),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::run(task),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::run(task),
            other => panic!("{other} code was asked for on a machine without it"),
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|platform| platform.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("unknown platform {name:?}; known: {known}")
        })
    }
}

/// Arithmetic that is compiled for every platform. `run` and all that it calls with vectors is
/// `#[inline(always)]`, and closures compute nothing with vectors: what is compiled apart runs
/// without the instructions, correctly and twenty times as slowly.
pub(crate) trait Task {
    type Output;

    fn run<V: Lanes>(self, proof: V::Proof) -> Self::Output;
}

/// Most lanes that any platform has.
pub(crate) const MAX_LANES: usize = 16;

/// A vector of [`Lanes::N`] numbers. It is made only with a proof that the processor has the
/// instructions, so that having one is permission to use them.
pub(crate) trait Lanes: Copy {
    /// Lanes; a power of two, at most [`MAX_LANES`].
    const N: usize;
    /// Evidence that the instructions exist.
    type Proof: Copy;
    /// As many 32-bit words.
    type Words: Copy;

    fn splat(proof: Self::Proof, value: f32) -> Self;
    /// The first `N` of `from`.
    fn load(proof: Self::Proof, from: &[f32]) -> Self;
    /// Into the first `N` of `to`.
    fn store(self, to: &mut [f32]);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self · factor + addend`, for a product that is exact: whether it is rounded by itself
    /// changes nothing then.
    fn mul_add_exact(self, factor: Self, addend: Self) -> Self;
    /// `self < other ? self : other`: `other` when they are equal or either is NaN.
    fn min(self, other: Self) -> Self;
    /// `self > other ? self : other`: `other` when they are equal or either is NaN.
    fn max(self, other: Self) -> Self;
    /// `a < b ? yes : no` in each lane; NaN picks `no`.
    fn less(a: Self, b: Self, yes: Self, no: Self) -> Self;
    fn abs(self) -> Self;
    /// To the nearest integer, ties to even.
    fn rint(self) -> Self;
    /// The same for numbers from 0 to 2²², where plain Rust has a faster way.
    #[inline(always)]
    fn rint_small(self, _: Self::Proof) -> Self {
        self.rint()
    }

    fn words(self) -> Self::Words;
    fn from_words(words: Self::Words) -> Self;
    fn splat_word(proof: Self::Proof, value: u32) -> Self::Words;
    /// The first `N` of `from`.
    fn load_words(proof: Self::Proof, from: &[u32]) -> Self::Words;
    /// Into the first `N` of `to`.
    fn store_words(words: Self::Words, to: &mut [u32]);
    /// The little-endian words that the first `4 N` bytes of `from` are.
    fn load_bytes(proof: Self::Proof, from: &[u8]) -> Self::Words;
    /// Into the first `4 N` bytes of `to`, little-endian.
    fn store_bytes(words: Self::Words, to: &mut [u8]);
    fn and(a: Self::Words, b: Self::Words) -> Self::Words;
    fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Modulo 2³².
    fn plus(a: Self::Words, b: Self::Words) -> Self::Words;
    /// By less than 32.
    fn shift_left(a: Self::Words, by: u32) -> Self::Words;
    /// By less than 32.
    fn shift_right(a: Self::Words, by: u32) -> Self::Words;

    /// Transposes the square that the first `N` vectors are: lane `i` of vector `k` and lane `k`
    /// of vector `i` change places.
    fn transpose(block: &mut [Self; MAX_LANES]);

    /// Drops the low bits of the significand, rounding to nearest, ties to even. Overflows into
    /// infinity as the narrower type does when it shares the exponent's width.
    #[inline(always)]
    fn round_significand(self, proof: Self::Proof, dropped_bits: u32) -> Self {
        let words = self.words();
        let one = Self::splat_word(proof, 1);
        let odd = Self::and(Self::shift_right(words, dropped_bits), one);
        let half = Self::splat_word(proof, (1 << (dropped_bits - 1)) - 1);
        let kept = Self::splat_word(proof, u32::MAX << dropped_bits);
        Self::from_words(Self::and(Self::plus(Self::plus(words, half), odd), kept))
    }

    /// The nearest bf16, ties to even. NaN stays NaN or becomes infinite.
    #[inline(always)]
    fn round_bf16(self, proof: Self::Proof) -> Self {
        self.round_significand(proof, 16)
    }

    /// The nearest f16, ties to even; infinite from 65520 on. NaN stays NaN or becomes infinite.
    #[inline(always)]
    fn round_f16(self, proof: Self::Proof) -> Self {
        let magnitude = self.abs();
        // Below 2⁻¹⁴ f16 has a fixed step of 2⁻²⁴, which is that of f32 from one half to one.
        let half = Self::splat(proof, 0.5);
        let subnormal = magnitude.add(half).sub(half);
        let normal = magnitude.round_significand(proof, 13);
        let smallest_normal = Self::splat(proof, 1.0 / 16384.0);
        let rounded = Self::less(magnitude, smallest_normal, subnormal, normal);
        let infinity = Self::splat(proof, f32::INFINITY);
        let rounded = Self::less(Self::splat(proof, 65504.0), rounded, infinity, rounded);
        let sign = Self::and(self.words(), Self::splat_word(proof, 1 << 31));
        Self::from_words(Self::or(rounded.words(), sign))
    }
}
