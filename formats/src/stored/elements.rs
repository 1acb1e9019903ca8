//! Single stored numbers: small floats by table, words, halves.

use zerocopy::{
    FromBytes,
    little_endian::{U16, U32},
};

use crate::dtype::Dtype;

/// Values of all E4M3 bytes: bias 7, no infinities, NaN for 0x7f and 0xff.
pub(super) static E4M3: [f32; 256] = e4m3();

/// Values of all E2M1 nibbles.
pub(super) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const fn e4m3() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0_usize;
    while byte < 256 {
        let (exponent, mantissa) = ((byte >> 3 & 15) as u32, (byte & 7) as u32);
        let magnitude = if byte & 0x7f == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            // Steps of 2^-9.
            mantissa as f32 * f32::from_bits((127 - 9) << 23)
        } else {
            (8 + mantissa) as f32 * f32::from_bits((exponent + 127 - 10) << 23)
        };
        table[byte] = if byte & 0x80 == 0 { magnitude } else { -magnitude };
        byte += 1;
    }
    table
}

/// The power of two that an E8M0 byte is; 255 is NaN.
pub(super) const fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        exponent => f32::from_bits((exponent as u32) << 23),
    }
}

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
    fn small_floats_have_their_standards_values() {
        let e4m3 = |byte: u8| E4M3[usize::from(byte)];
        assert_eq!(e4m3(0x7e), 448.0);
        assert_eq!(e4m3(0x01), 2.0_f32.powi(-9));
        assert_eq!(e4m3(0x08), 2.0_f32.powi(-6));
        assert_eq!(e4m3(0xb8), -1.0);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert!(e4m3(0x80).is_sign_negative() && e4m3(0x80) == 0.0);
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2.0_f32.powi(-127));
        assert_eq!(e8m0(254), 2.0_f32.powi(127));
        assert!(e8m0(255).is_nan());
    }

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
