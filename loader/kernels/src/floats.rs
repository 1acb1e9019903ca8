//! Floats as packages store them, read as f32. Every conversion is exact.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

/// Stored floats; half-precision elements by their bits.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE f16.
    F16(&'a [u16]),
    /// bf16: the upper half of an f32.
    BF16(&'a [u16]),
}

impl<'a> Floats<'a> {
    /// Some of the elements.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Floats<'a> {
        match *self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::F16(bits) => Self::F16(&bits[range]),
            Self::BF16(bits) => Self::BF16(&bits[range]),
        }
    }
}

impl Floats<'_> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(bits) | Self::BF16(bits) => bits.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all elements.
    pub(crate) const fn size_bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(*values),
            Self::F16(bits) | Self::BF16(bits) => size_of_val(*bits),
        }
    }

    /// Where some of the elements lie.
    pub(crate) fn addresses(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
        match self {
            Self::F32(values) => addresses(&values[range]),
            Self::F16(bits) | Self::BF16(bits) => addresses(&bits[range]),
        }
    }

    /// Element `index`.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(values) => values[index],
            Self::F16(bits) => f16_to_f32(bits[index]),
            Self::BF16(bits) => bf16_to_f32(bits[index]),
        }
    }

    /// Reads `out.len()` elements from `start` on.
    #[inline(always)]
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(values) => out.copy_from_slice(&values[range]),
            Self::F16(bits) => convert(&bits[range], out, f16_to_f32),
            Self::BF16(bits) => convert(&bits[range], out, bf16_to_f32),
        }
    }

    /// All elements.
    #[must_use]
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.read(0, &mut out);
        out
    }
}

/// Where a slice lies.
pub(crate) fn addresses<T>(slice: &[T]) -> std::ops::Range<usize> {
    let range = slice.as_ptr_range();
    range.start.addr()..range.end.addr()
}

#[inline(always)]
fn convert(bits: &[u16], out: &mut [f32], f: impl Fn(u16) -> f32) {
    for (out, bits) in out.iter_mut().zip(bits) {
        *out = f(*bits);
    }
}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Without branches, so that loops over it vectorize: the exponent is corrected by a product,
/// which also normalises subnormals.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    /// 2^(127 - 15), the difference of the exponents' biases.
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * REBIAS;
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_precision_number_is_read_exactly() {
        for bits in 0..=u16::MAX {
            let (f16, bf16) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
            let agree = |ours: f32, theirs: f32| {
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan())
            };
            assert!(agree(f16_to_f32(bits), f16.to_f32()), "f16 {bits:#06x}");
            assert!(agree(bf16_to_f32(bits), bf16.to_f32()), "bf16 {bits:#06x}");
        }
    }
}
