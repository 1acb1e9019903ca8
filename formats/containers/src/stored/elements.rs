//! Single stored numbers: scales, words, halves.

use zerocopy::{
    FromBytes,
    little_endian::{U16, U32},
};

use shardpack_quantize::dtype::Dtype;
pub(super) use shardpack_quantize::small_floats::{E2M1, E4M3, e8m0};

/// A BF16 number.
pub(super) const fn bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// An F16 number.
pub(super) const fn f16(half: u16) -> f32 {
    let magnitude = (half as u32 & 0x7fff) << 13;
    // The exponents' biases differ by 112; the product is exact for subnormals too.
    let value = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let bits = if magnitude < 0x7c00 << 13 { value.to_bits() } else { magnitude | 0x7f80_0000 };
    f32::from_bits(bits | (half as u32 & 0x8000) << 16)
}

/// Number `index` of a slice of little-endian numbers of a type that scales have.
///
/// # Panics
/// When it lies beyond the end, or `dtype` is no type of a scale.
pub(super) fn number(dtype: Dtype, bytes: &[u8], index: usize) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_bits(word(bytes, index)),
        Dtype::BF16 => bf16(half(bytes, index)),
        Dtype::F16 => f16(half(bytes, index)),
        Dtype::F8E4M3 => E4M3[usize::from(bytes[index])],
        Dtype::F8E8M0 => e8m0(bytes[index]),
        Dtype::I8 => f32::from(bytes[index] as i8),
        other => unreachable!("scales of type {other} are refused"),
    }
}

/// Whether [`number`] reads this type.
pub(super) const fn is_scale(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8E4M3 | Dtype::F8E8M0)
}

/// Little-endian word `index`.
pub(super) fn word(bytes: &[u8], index: usize) -> u32 {
    let word = U32::read_from_bytes(&bytes[4 * index..4 * index + 4]);
    word.expect("four bytes are a word").get()
}

/// Little-endian half word `index`.
pub(super) fn half(bytes: &[u8], index: usize) -> u16 {
    let half = U16::read_from_bytes(&bytes[2 * index..2 * index + 2]);
    half.expect("two bytes are half a word").get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
            let (ours, theirs) = (bf16(bits), half::bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
        }
    }
}
