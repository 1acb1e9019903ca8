//! Both of MLX's rules against plain transcriptions of its sources.

use super::*;
use crate::affine::Rounding;

/// One group by MLX's source: scale and bias before they are stored, and integers.
fn transcription(rounding: Rounding, bits: u32, values: &[f32]) -> (f32, f32, Vec<u8>) {
    let metal = rounding == Rounding::MlxMetal;
    let round = |x: f32| if metal { x.round() } else { x.round_ties_even() };
    let bins = ((1 << bits) - 1) as f32;
    let (mut low, mut high) =
        if metal { (f32::MAX, 0.0) } else { (f32::INFINITY, f32::NEG_INFINITY) };
    for value in values {
        low = f32::min(low, *value);
        high = f32::max(high, *value);
    }
    let mut scale = f32::max((high - low) / bins, 1e-7);
    let side = low.abs() > high.abs();
    scale = if side { scale } else { -scale };
    let edge = if side { low } else { high };
    let steps = round(edge / scale);
    let mut bias = 0.0;
    if steps != 0.0 {
        scale = edge / steps;
        bias = edge;
    }
    let integer = |value: &f32| {
        let steps = round((value - bias) / scale).min(bins);
        // Metal converts as it is; what is negative becomes zero.
        if metal { steps as u8 } else { steps.max(0.0) as u8 }
    };
    (scale, bias, values.iter().map(integer).collect())
}

fn check(rounding: Rounding, format: AffineFormat, dtype: Dtype, values: &[f32]) {
    let source = data::bytes(dtype, values);
    let mut exact = vec![0.0; values.len()];
    widen(Platform::Portable, dtype, &source, &mut exact);
    let options = QuantizeOptions::new(format, rounding, Dtype::F32);
    let (out, _) = run(&options, (dtype, &source)).unwrap();
    let groups = out.groups(format, Dtype::F32);
    let values = exact.chunks_exact(format.group_size() as usize);
    for (index, ((q, scale, bias), values)) in groups.into_iter().zip(values).enumerate() {
        let (want_scale, want_bias, want_q) = transcription(rounding, format.bits(), values);
        let what = format!("{rounding}, {format:?}, {dtype}, group {index}");
        assert_eq!((scale, bias), (want_scale, want_bias), "{what}");
        assert_eq!(q, want_q, "{what}");
    }
}

#[test]
fn both_rules_compute_what_the_sources_say() {
    for rounding in [Rounding::MlxCpu, Rounding::MlxMetal] {
        for format in formats() {
            let group = format.group_size() as usize;
            for dtype in FLOATS {
                check(rounding, format, dtype, &data::awkward(72, group, dtype, 1));
                let values = data::sample(data::Kind::Gaussian, 200 * group, 2);
                check(rounding, format, dtype, &values);
            }
        }
    }
}

/// Integers, scale and bias of one group of 32 whose first numbers are given and whose others
/// repeat the last of them, at 4 bits.
fn group(rounding: Rounding, first: &[f32]) -> (Vec<u8>, f32, f32) {
    let mut values = first.to_vec();
    values.resize(32, *first.last().unwrap());
    let source = data::bytes(Dtype::F32, &values);
    let format = AffineFormat::new(4, 32).unwrap();
    let options = QuantizeOptions::new(format, rounding, Dtype::F32);
    let (out, _) = run(&options, (Dtype::F32, &source)).unwrap();
    let (mut q, scale, bias) = out.groups(format, Dtype::F32).remove(0);
    q.truncate(first.len());
    (q, scale, bias)
}

#[test]
fn metal_rounds_ties_away_from_zero_and_the_cpu_to_even() {
    let values = [15.0, 0.0, 12.5, 11.5, 10.5, 0.5];
    assert_eq!(group(Rounding::MlxCpu, &values), (vec![0, 15, 2, 4, 4, 14], -1.0, 15.0));
    assert_eq!(group(Rounding::MlxMetal, &values), (vec![0, 15, 3, 4, 5, 15], -1.0, 15.0));
}

#[test]
fn metal_takes_negative_groups_up_to_zero() {
    let values = [-15.0, -7.5, -8.0];
    assert_eq!(group(Rounding::MlxCpu, &values), (vec![0, 15, 14], 0.5, -15.0));
    assert_eq!(group(Rounding::MlxMetal, &values), (vec![0, 8, 7], 1.0, -15.0));
    // Positive groups are the same: both take the true minimum.
    let values = [15.0, 7.5, 8.0];
    assert_eq!(group(Rounding::MlxCpu, &values), (vec![0, 15, 14], -0.5, 15.0));
    assert_eq!(group(Rounding::MlxMetal, &values), (vec![0, 15, 14], -0.5, 15.0));
}

#[test]
fn zeros_and_constants_are_exact() {
    for rounding in [Rounding::MlxCpu, Rounding::MlxMetal] {
        assert_eq!(group(rounding, &[0.0]), (vec![0], -1e-7, 0.0));
        assert_eq!(group(rounding, &[-0.0, 0.0]), (vec![0, 0], -1e-7, 0.0));
        let (q, _, bias) = group(rounding, &[2.5]);
        assert_eq!((q, bias), (vec![0], 2.5));
        let (q, _, bias) = group(rounding, &[-2.5]);
        assert_eq!((q, bias), (vec![0], -2.5));
    }
}
