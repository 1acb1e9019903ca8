//! Float groups ([`shardpack_quantize::float_groups`]) as f32, in a form that compilers make vectors of.

use shardpack_quantize::FloatFormat;

/// Writes the weights of whole groups, as many as `out` holds, from the first of `packed` and
/// `scales` on.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
pub(crate) fn read(format: FloatFormat, packed: &[u8], scales: &[u8], out: &mut [f32]) {
    match format {
        FloatFormat::Mxfp4 => groups::<32, 16>(format, packed, scales, out, fp4),
        FloatFormat::Nvfp4 => groups::<16, 8>(format, packed, scales, out, fp4),
        FloatFormat::Mxfp8 => groups::<32, 32>(format, packed, scales, out, fp8),
    }
}

/// Groups of `N` weights in `BYTES` bytes.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn groups<const N: usize, const BYTES: usize>(
    format: FloatFormat,
    packed: &[u8],
    scales: &[u8],
    out: &mut [f32],
    values: impl Fn(&[u8; BYTES], f32, &mut [f32; N]),
) {
    let groups = packed.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<N>().0);
    for ((packed, out), scale) in groups.zip(scales) {
        values(packed, format.scale(*scale), out);
    }
}

#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn fp4<const N: usize, const BYTES: usize>(packed: &[u8; BYTES], scale: f32, out: &mut [f32; N]) {
    for (byte, pair) in packed.iter().zip(out.as_chunks_mut::<2>().0) {
        *pair = [scale * e2m1(u32::from(byte & 15)), scale * e2m1(u32::from(byte >> 4))];
    }
}

#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn fp8<const N: usize>(packed: &[u8; N], scale: f32, out: &mut [f32; N]) {
    for (byte, out) in packed.iter().zip(out) {
        *out = scale * e4m3(u32::from(*byte));
    }
}

/// The value of a nibble: normal numbers by their bits, both subnormal ones by their steps.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
const fn e2m1(nibble: u32) -> f32 {
    let magnitude = nibble & 7;
    let normal = (magnitude << 22) + (126 << 23);
    let subnormal = (0.5 * magnitude as i32 as f32).to_bits();
    let bits = if magnitude < 2 { subnormal } else { normal };
    f32::from_bits(bits | (nibble & 8) << 28)
}

/// The value of a byte.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
const fn e4m3(byte: u32) -> f32 {
    let magnitude = byte & 0x7f;
    let normal = (magnitude << 20) + (120 << 23);
    let subnormal = (f32::from_bits((127 - 9) << 23) * magnitude as i32 as f32).to_bits();
    let bits = if magnitude < 8 { subnormal } else { normal };
    f32::from_bits(bits | (byte & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use shardpack_quantize::float_groups::dequantize;

    use super::*;

    #[test]
    fn every_value_with_every_scale_is_what_formats_says() {
        for format in FloatFormat::ALL {
            let bytes = format.group_bytes();
            for scale in 0..=254_u8 {
                // All bytes, in as many groups; 0x7f and 0xff are no weights.
                let packed: Vec<u8> = (0..=255_u8)
                    .map(|byte| if format.bits() == 8 && byte & 0x7f == 0x7f { 0 } else { byte })
                    .collect();
                let scale = if format == FloatFormat::Nvfp4 { scale % 127 } else { scale };
                let scales = vec![scale; packed.len() / bytes];
                let count = scales.len() * format.group_size() as usize;
                let (mut found, mut wanted) = (vec![0.0; count], vec![0.0; count]);
                read(format, &packed, &scales, &mut found);
                dequantize(format, &packed, &scales, &mut wanted);
                let bits =
                    |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&wanted), "{format} with scale {scale}");
            }
        }
    }
}
