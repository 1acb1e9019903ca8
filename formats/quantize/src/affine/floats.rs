//! Conversions between the float types of weights. Plain loops that the compiler turns into
//! vectors of whichever [`Platform`] they run on; integer arithmetic, so the bits are the same.

use zerocopy::{
    FromBytes,
    little_endian::{F32, U16},
};

use crate::{
    dtype::Dtype,
    simd::{Lanes, Platform, Task},
};

/// A number that its new type cannot hold.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CastError {
    /// It is no number, or infinite, in the source.
    #[error("element {index} is {value}")]
    NotFinite {
        /// Index of the first such element.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// It would become infinite.
    #[error("element {index} is {value}, which {dtype} cannot hold")]
    TooLarge {
        /// Index of the first such element.
        index: usize,
        /// Its value.
        value: f32,
        /// The new type.
        dtype: Dtype,
    },
}

impl CastError {
    /// The same error in a tensor of which `elements` came before the part that was converted.
    #[must_use]
    pub fn after(mut self, elements: usize) -> Self {
        let (Self::NotFinite { index, .. } | Self::TooLarge { index, .. }) = &mut self;
        *index += elements;
        self
    }
}

/// Widens little-endian floats to f32.
///
/// # Panics
/// When `dtype` is no float type or `bytes` and `out` differ in length.
pub fn widen(platform: Platform, dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    platform.run(Widen { dtype, bytes, out });
}

struct Widen<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Task for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self, _: V::Proof) {
        widen_inline(self.dtype, self.bytes, self.out);
    }
}

/// Rounds to the nearest `dtype`, ties to even, as little-endian bytes. What is too large becomes
/// infinite, NaN becomes a quiet NaN.
///
/// # Panics
/// When `dtype` is no float type or `values` and `out` differ in length.
pub fn narrow(platform: Platform, dtype: Dtype, values: &[f32], out: &mut [u8]) {
    platform.run(Narrow { dtype, values, out });
}

struct Narrow<'a> {
    dtype: Dtype,
    values: &'a [f32],
    out: &'a mut [u8],
}

impl Task for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self, _: V::Proof) {
        narrow_inline(self.dtype, self.values, self.out);
    }
}

/// Converts little-endian floats from one type to another, rounding once. On an error `out`
/// holds nothing of use.
///
/// # Panics
/// When a type is no float type or the lengths do not fit each other.
pub fn cast(
    platform: Platform,
    (from, bytes): (Dtype, &[u8]),
    (to, out): (Dtype, &mut [u8]),
) -> Result<(), CastError> {
    platform.run(Cast { from, bytes, to, out })
}

struct Cast<'a> {
    from: Dtype,
    bytes: &'a [u8],
    to: Dtype,
    out: &'a mut [u8],
}

/// Elements between two looks at what has come along; the block stays in the first-level cache.
const CAST_BLOCK: usize = 1024;

impl Task for Cast<'_> {
    type Output = Result<(), CastError>;

    #[inline(always)]
    fn run<V: Lanes>(self, _: V::Proof) -> Self::Output {
        let (from_size, to_size) = (self.from.size_bytes(), self.to.size_bytes());
        let elements = self.bytes.len() / from_size;
        assert_eq!(self.bytes.len(), elements * from_size, "whole elements");
        assert_eq!(self.out.len(), elements * to_size, "one element for each");
        let mut values = [0.0; CAST_BLOCK];
        let blocks = self
            .bytes
            .chunks(CAST_BLOCK * from_size)
            .zip(self.out.chunks_mut(CAST_BLOCK * to_size));
        for (block, (bytes, out)) in blocks.enumerate() {
            let values = &mut values[..bytes.len() / from_size];
            widen_inline(self.from, bytes, values);
            if !all_fit_inline(self.to, values) {
                return Err(misfit(self.to, values, block * CAST_BLOCK));
            }
            narrow_inline(self.to, values, out);
        }
        Ok(())
    }
}

#[cold]
fn misfit(dtype: Dtype, values: &[f32], first: usize) -> CastError {
    let at = values.iter().position(|value| !all_fit_inline(dtype, &[*value]));
    let at = at.expect("the caller saw a value that does not fit");
    let (index, value) = (first + at, values[at]);
    if value.is_finite() {
        CastError::TooLarge { index, value, dtype }
    } else {
        CastError::NotFinite { index, value }
    }
}

/// Whether all are finite and stay so as `dtype`.
#[inline(always)]
pub(super) fn all_fit_inline(dtype: Dtype, values: &[f32]) -> bool {
    // The first magnitude that rounds to infinity, as its bits: these order like the numbers.
    let limit = match dtype {
        Dtype::F16 => 65520_f32.to_bits(),
        Dtype::BF16 => 0x7f7f_8000,
        _ => f32::INFINITY.to_bits(),
    };
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.to_bits() & 0x7fff_ffff);
    }
    largest < limit
}

#[inline(always)]
pub(super) fn widen_inline(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size_bytes(), "one element for each");
    match dtype {
        Dtype::BF16 => {
            for (out, bits) in out.iter_mut().zip(halves(bytes)) {
                *out = f32::from_bits(u32::from(bits.get()) << 16);
            }
        }
        Dtype::F16 => {
            for (out, bits) in out.iter_mut().zip(halves(bytes)) {
                *out = f16_to_f32(bits.get());
            }
        }
        Dtype::F32 => {
            let values = <[F32]>::ref_from_bytes(bytes).expect("the length was checked");
            for (out, value) in out.iter_mut().zip(values) {
                *out = value.get();
            }
        }
        other => panic!("{other} holds no floats"),
    }
}

#[inline(always)]
pub(super) fn narrow_inline(dtype: Dtype, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.size_bytes(), "one element for each");
    match dtype {
        Dtype::BF16 => {
            for (out, value) in halves_mut(out).iter_mut().zip(values) {
                *out = U16::new(f32_to_bf16(*value));
            }
        }
        Dtype::F16 => {
            for (out, value) in halves_mut(out).iter_mut().zip(values) {
                *out = U16::new(f32_to_f16(*value));
            }
        }
        Dtype::F32 => {
            let out = <[F32]>::mut_from_bytes(out).expect("the length was checked");
            for (out, value) in out.iter_mut().zip(values) {
                *out = F32::new(*value);
            }
        }
        other => panic!("{other} holds no floats"),
    }
}

#[inline(always)]
fn halves(bytes: &[u8]) -> &[U16] {
    <[U16]>::ref_from_bytes(bytes).expect("the caller checked the length")
}

#[inline(always)]
fn halves_mut(bytes: &mut [u8]) -> &mut [U16] {
    <[U16]>::mut_from_bytes(bytes).expect("the caller checked the length")
}

#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff) << 13;
    // The exponents' biases differ by 112; the product is exact for subnormals too.
    let value = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = magnitude | 0x7f80_0000;
    let value = if magnitude < 0x7c00 << 13 { value } else { special };
    f32::from_bits(value | u32::from(half & 0x8000) << 16)
}

#[inline(always)]
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff).wrapping_add(bits >> 16 & 1) >> 16;
    let nan = bits >> 16 | 0x40;
    (if value.is_nan() { nan } else { rounded }) as u16
}

#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = magnitude.wrapping_add(0xfff).wrapping_add(magnitude >> 13 & 1) >> 13;
    let normal = normal.wrapping_sub(112 << 10);
    // From one half to one f32 has the step of f16's subnormals.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let rounded = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let rounded = if magnitude < 65520_f32.to_bits() { rounded } else { 0x7c00 };
    let rounded = if magnitude <= 0x7f80_0000 { rounded } else { 0x7e00 };
    (rounded | bits >> 16 & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Every bit pattern of the upper half with lower halves around each tie.
    fn values() -> impl Iterator<Item = f32> {
        (0..=u16::MAX).flat_map(|upper| {
            [0, 1, 0xfff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff]
                .map(|lower| f32::from_bits(u32::from(upper) << 16 | lower))
        })
    }

    fn same_f32(ours: f32, theirs: f32) -> bool {
        ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan())
    }

    #[test]
    fn widening_is_exact_for_every_half() {
        for bits in 0..=u16::MAX {
            assert!(same_f32(f16_to_f32(bits), f16::from_bits(bits).to_f32()), "{bits:#x}");
        }
    }

    #[test]
    fn narrowing_rounds_as_the_half_crate_does() {
        for value in values() {
            let (ours, theirs) = (f16::from_bits(f32_to_f16(value)), f16::from_f32(value));
            assert!(same_f32(ours.to_f32(), theirs.to_f32()), "{value:e}: {ours:e}, {theirs:e}");
            let (ours, theirs) = (bf16::from_bits(f32_to_bf16(value)), bf16::from_f32(value));
            assert!(same_f32(ours.to_f32(), theirs.to_f32()), "{value:e}: {ours:e}, {theirs:e}");
        }
    }

    #[test]
    fn every_platform_converts_to_the_same_bits() {
        let values: Vec<f32> = values().take(300_007).collect();
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            let mut want = vec![0; values.len() * dtype.size_bytes()];
            narrow(Platform::Portable, dtype, &values, &mut want);
            let mut back = vec![0.0; values.len()];
            widen(Platform::Portable, dtype, &want, &mut back);
            for platform in Platform::available_for_quantizing() {
                let mut bytes = vec![0; want.len()];
                narrow(platform, dtype, &values, &mut bytes);
                assert!(bytes == want, "{platform} {dtype}");
                let mut wide = vec![0.0; values.len()];
                widen(platform, dtype, &bytes, &mut wide);
                assert!(
                    wide.iter().zip(&back).all(|(a, b)| same_f32(*a, *b)),
                    "{platform} {dtype}"
                );
            }
        }
    }

    fn check_cast(values: &[f32], to: Dtype, want: Result<(), &str>) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for platform in Platform::available_for_quantizing() {
            let mut out = vec![0; values.len() * to.size_bytes()];
            let got = cast(platform, (Dtype::F32, &bytes), (to, &mut out));
            assert_eq!(got.map_err(|error| error.to_string()), want.map_err(str::to_owned));
        }
    }

    #[test]
    fn casting_names_the_first_number_that_does_not_fit() {
        let mut values = vec![1.0; 3001];
        check_cast(&values, Dtype::F16, Ok(()));
        values[2999] = 65519.0;
        check_cast(&values, Dtype::F16, Ok(()));
        values[2998] = 65520.0;
        check_cast(&values, Dtype::F16, Err("element 2998 is 65520, which F16 cannot hold"));
        check_cast(&values, Dtype::BF16, Ok(()));
        values[2997] = f32::MAX;
        let text = format!("element 2997 is {}, which BF16 cannot hold", f32::MAX);
        check_cast(&values, Dtype::BF16, Err(&text));
        check_cast(&values, Dtype::F32, Ok(()));
        values[1500] = f32::NEG_INFINITY;
        check_cast(&values, Dtype::F32, Err("element 1500 is -inf"));
        values[7] = f32::NAN;
        check_cast(&values, Dtype::BF16, Err("element 7 is NaN"));
    }
}
