//! Floats of 4 and 8 bits by table. Knows single numbers; groups and scales are others'.

/// Values of all E4M3 bytes: bias 7, no infinities, NaN for 0x7f and 0xff.
pub static E4M3: [f32; 256] = e4m3();

/// Values of all E2M1 nibbles.
pub const E2M1: [f32; 16] =
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
#[must_use]
pub const fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        exponent => f32::from_bits((exponent as u32) << 23),
    }
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
}
