//! Rows of a stored matrix as floats.

use crate::{
    AffineFormat, Dtype, FloatFormat, Platform,
    affine::{cast, unpack, widen},
    float_groups::dequantize,
};

/// Stored rows of an affine matrix.
pub struct Quantized<'a> {
    /// Bits and group size.
    pub format: AffineFormat,
    /// Type of scales and biases.
    pub dtype: Dtype,
    /// Packed integers, scales, biases.
    pub parts: [&'a [u8]; 3],
}

/// Buffers that are kept from block to block.
#[derive(Default)]
pub struct Floats {
    q: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    wide: Vec<u8>,
}

impl Quantized<'_> {
    /// `scale · q + bias` in f32 (product and sum rounded), then rounded once to `to`. Says which
    /// element does not fit.
    pub fn dequantize(
        &self,
        to: Dtype,
        out: &mut Vec<u8>,
        floats: &mut Floats,
    ) -> Result<(), String> {
        let platform = Platform::detect_for_quantizing();
        let [packed, scales, biases] = self.parts;
        let groups = scales.len() / self.dtype.size_bytes();
        let group = self.format.group_size() as usize;
        floats.q.resize(group, 0);
        floats.scales.resize(groups, 0.0);
        floats.biases.resize(groups, 0.0);
        floats.wide.resize(groups * group * 4, 0);
        widen(platform, self.dtype, scales, &mut floats.scales);
        widen(platform, self.dtype, biases, &mut floats.biases);
        let stored = packed.chunks_exact(self.format.group_bytes());
        let values = floats.wide.chunks_exact_mut(group * 4);
        let lines = floats.scales.iter().zip(&floats.biases);
        for ((packed, values), (scale, bias)) in stored.zip(values).zip(lines) {
            unpack(self.format, packed, &mut floats.q);
            for (q, value) in floats.q.iter().zip(values.chunks_exact_mut(4)) {
                value.copy_from_slice(&(scale * f32::from(*q) + bias).to_le_bytes());
            }
        }
        plain(Dtype::F32, &floats.wide, to, out)
    }
}

/// Stored rows in float groups, rounded once to `to`. Says which element does not fit.
pub fn float_groups(
    format: FloatFormat,
    [packed, scales]: [&[u8]; 2],
    to: Dtype,
    out: &mut Vec<u8>,
    floats: &mut Floats,
) -> Result<(), String> {
    let values = &mut floats.scales;
    values.resize(scales.len() * format.group_size() as usize, 0.0);
    dequantize(format, packed, scales, values);
    floats.wide.clear();
    floats.wide.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    plain(Dtype::F32, &floats.wide, to, out)
}

/// Floats of one type as another, rounded once; whole numbers in F32 as integers.
pub fn plain(from: Dtype, bytes: &[u8], to: Dtype, out: &mut Vec<u8>) -> Result<(), String> {
    if (from, to) == (Dtype::F32, Dtype::I64) {
        let (numbers, _) = bytes.as_chunks::<4>();
        out.clear();
        for (index, number) in numbers.iter().enumerate() {
            let number = f32::from_le_bytes(*number);
            if number.fract() != 0.0 {
                return Err(format!("element {index} is {number}, expected a whole number"));
            }
            out.extend((number as i64).to_le_bytes());
        }
        return Ok(());
    }
    out.resize(bytes.len() / from.size_bytes() * to.size_bytes(), 0);
    cast(Platform::detect_for_quantizing(), (from, bytes), (to, out))
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use crate::affine::pack;

    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn product_and_sum_are_rounded_and_so_is_the_result_once() {
        let format = AffineFormat::new(4, 32).unwrap();
        let q: Vec<u8> = (0..32).map(|index| index % 16).collect();
        let mut packed = vec![0; format.group_bytes()];
        pack(format, &q, &mut packed);
        // Their product needs more than 24 bits, and the sum cancels most of them.
        let (scale, bias) = (0.1_f32, -1.3_f32);
        let (scales, biases) = (bytes(&[scale]), bytes(&[bias]));
        let stored = Quantized { format, dtype: Dtype::F32, parts: [&packed, &scales, &biases] };
        let (mut out, mut floats) = (Vec::new(), Floats::default());
        stored.dequantize(Dtype::F32, &mut out, &mut floats).unwrap();
        let expected: Vec<f32> = q
            .iter()
            .map(|q| {
                let product = scale * f32::from(*q);
                product + bias
            })
            .collect();
        assert_eq!(out, bytes(&expected));
        let fused = scale.mul_add(13.0, bias);
        assert_ne!(expected[13], fused, "the case tells one rounding from two");
        stored.dequantize(Dtype::BF16, &mut out, &mut floats).unwrap();
        let mut rounded = Vec::new();
        plain(Dtype::F32, &bytes(&expected), Dtype::BF16, &mut rounded).unwrap();
        assert_eq!(out, rounded);
    }

    #[test]
    fn what_the_type_cannot_hold_is_named() {
        let problem = plain(Dtype::F32, &bytes(&[0.0, 1e6]), Dtype::F16, &mut Vec::new());
        assert_eq!(problem.unwrap_err(), "element 1 is 1000000, which F16 cannot hold");
    }
}
