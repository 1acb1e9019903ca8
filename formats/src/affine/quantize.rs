//! How a group's scale, bias and integers are chosen.

use std::str::FromStr;

use rayon::prelude::*;

use super::{AffineFormat, pack, store, widen};
use crate::dtype::Dtype;

/// A rule for scale, bias and integers. All rules write the same format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// What MLX's CPU backend computes, bit for bit: the larger end of the range is exact,
    /// integers are rounded (ties to even) against the scale before it is stored.
    MlxCpu,
}

impl Rounding {
    /// The name on the command line and in manifests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MlxCpu => "mlx-cpu",
        }
    }
}

impl FromStr for Rounding {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "mlx-cpu" => Ok(Self::MlxCpu),
            other => Err(format!("unknown rounding {other:?}; known: mlx-cpu")),
        }
    }
}

/// A weight that has no place in any group.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("element {index} is {value}")]
pub struct QuantizeError {
    /// Index of the first such element in the tensor's row-major order.
    pub index: usize,
    /// `NaN`, `inf` or `-inf`.
    pub value: String,
}

/// Groups that one task takes: large enough to hide the task's cost, small enough that two cores
/// end together on a small tensor.
const GROUPS_PER_TASK: usize = 256;

/// Quantizes a tensor whose last dimension is a multiple of the group size.
///
/// `source` holds its elements in row-major order as `dtype`; `packed`, `scales` and `biases`
/// receive what [`super`] describes, scales and biases as `store_dtype`. Runs on all threads of
/// the current pool; the bytes do not depend on their number.
///
/// # Panics
/// When lengths do not fit each other.
pub fn quantize(
    format: AffineFormat,
    rounding: Rounding,
    (dtype, source): (Dtype, &[u8]),
    store_dtype: Dtype,
    (packed, scales, biases): (&mut [u8], &mut [u8], &mut [u8]),
) -> Result<(), QuantizeError> {
    let group = format.group_size() as usize;
    let group_source = group * dtype.size_bytes();
    let groups = source.len() / group_source;
    assert_eq!(source.len(), groups * group_source, "whole groups");
    assert_eq!(packed.len(), groups * format.group_bytes(), "integers of every group");
    let width = store_dtype.size_bytes();
    assert_eq!(
        (scales.len(), biases.len()),
        (groups * width, groups * width),
        "a scale and a bias for every group"
    );

    source
        .par_chunks(GROUPS_PER_TASK * group_source)
        .zip(packed.par_chunks_mut(GROUPS_PER_TASK * format.group_bytes()))
        .zip(
            scales
                .par_chunks_mut(GROUPS_PER_TASK * width)
                .zip(biases.par_chunks_mut(GROUPS_PER_TASK * width)),
        )
        .enumerate()
        .map(|(task, ((source, packed), (scales, biases)))| {
            let mut values = [0.0; 128];
            let mut q = [0; 128];
            let (values, q) = (&mut values[..group], &mut q[..group]);
            let parts = source
                .chunks_exact(group_source)
                .zip(packed.chunks_exact_mut(format.group_bytes()))
                .zip(scales.chunks_exact_mut(width).zip(biases.chunks_exact_mut(width)));
            for (index, ((source, packed), (scale, bias))) in parts.enumerate() {
                widen(dtype, source, values);
                if let Some(bad) = values.iter().position(|value| !value.is_finite()) {
                    let index = (task * GROUPS_PER_TASK + index) * group + bad;
                    return Err(QuantizeError { index, value: values[bad].to_string() });
                }
                let (s, b) = match rounding {
                    Rounding::MlxCpu => mlx_cpu(format, values, q),
                };
                pack(format, q, packed);
                store(store_dtype, s, scale);
                store(store_dtype, b, bias);
            }
            Ok(())
        })
        // The first bad element in order, so that the message does not depend on timing.
        .collect::<Vec<_>>()
        .into_iter()
        .collect()
}

/// MLX's CPU rule (`mlx/backend/cpu/quantized.cpp`). Returns scale and bias before they are
/// stored.
fn mlx_cpu(format: AffineFormat, values: &[f32], q: &mut [u8]) -> (f32, f32) {
    const EPS: f32 = 1e-7;
    let bins = format.max_q() as f32;
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for value in values {
        low = low.min(*value);
        high = high.max(*value);
    }
    let mut scale = ((high - low) / bins).max(EPS);
    let low_side = low.abs() > high.abs();
    if !low_side {
        scale = -scale;
    }
    let edge = if low_side { low } else { high };
    let steps = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if steps != 0.0 {
        scale = edge / steps;
        bias = edge;
    }
    for (q, value) in q.iter_mut().zip(values) {
        let steps = ((value - bias) / scale).round_ties_even();
        *q = steps.clamp(0.0, bins) as u8;
    }
    (scale, bias)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_that_is_no_number_is_named() {
        let mut source = vec![0_u8; 64 * 600 * 4];
        source[64 * 300 * 4 + 8..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        source[64 * 500 * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        let format = AffineFormat::new(4, 64).unwrap();
        let (mut packed, mut scales, mut biases) =
            (vec![0; 600 * 32], vec![0; 1200], vec![0; 1200]);
        let error = quantize(
            format,
            Rounding::MlxCpu,
            (Dtype::F32, &source),
            Dtype::BF16,
            (&mut packed, &mut scales, &mut biases),
        );
        assert_eq!(error, Err(QuantizeError { index: 64 * 300 + 2, value: "NaN".to_owned() }));
    }

    #[test]
    fn an_all_zero_group_stays_zero() {
        let mut q = [1; 64];
        let (scale, bias) = mlx_cpu(AffineFormat::new(4, 64).unwrap(), &[0.0; 64], &mut q);
        assert_eq!((scale, bias, q), (-1e-7, 0.0, [0; 64]));
    }
}
