//! Rounding with error feedback: what it promises of the outputs' error, and the same bytes everywhere.

use super::{AffineFormat, Outputs, data, formats};
use crate::{
    affine::{
        ErrorSums, Hessian, OutputError, QuantizeOptions, Rounding, quantize_with_feedback, widen,
    },
    dtype::Dtype,
    simd::Platform,
};

const ROWS: usize = 37;
const INPUTS: usize = 256;
const DAMPING: f64 = 0.01;

/// Moments of vectors whose elements follow each other closely, some of them large.
fn moments(inputs: usize) -> Vec<f32> {
    let noise = data::sample(data::Kind::Gaussian, inputs * 3 * inputs, 31);
    let mut sums = vec![0.0_f64; inputs * inputs];
    for vector in noise.chunks_exact(inputs) {
        let mut before = 0.0;
        let smooth: Vec<f64> = vector
            .iter()
            .enumerate()
            .map(|(k, value)| {
                before = 0.9 * before + f64::from(*value);
                before * if k % 29 == 3 { 8.0 } else { 1.0 }
            })
            .collect();
        for (i, x) in smooth.iter().enumerate() {
            for (j, y) in smooth.iter().enumerate() {
                sums[i * inputs + j] += x * y;
            }
        }
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

fn run(
    options: &QuantizeOptions<'_>,
    block: usize,
    moments: &[f32],
    source: &[u8],
) -> (Outputs, ErrorSums, OutputError) {
    let group = options.format.group_size() as usize;
    let hessian = Hessian::new(options.platform, moments, [block, group], DAMPING).unwrap();
    let mut out = Outputs::new(options.format, options.store, source.len() / 2);
    let (sums, error) =
        quantize_with_feedback(options, &hessian, (Dtype::BF16, source), out.parts()).unwrap();
    (out, sums, error)
}

fn source() -> Vec<u8> {
    data::bytes(Dtype::BF16, &data::sample(data::Kind::Gaussian, ROWS * INPUTS, 12))
}

/// `Σ e H eᵀ` over rows, from the stored bytes alone, with the damped moments.
fn output_error(format: AffineFormat, out: &Outputs, source: &[u8], moments: &[f32]) -> f64 {
    let mut values = vec![0.0; source.len() / 2];
    widen(Platform::Portable, Dtype::BF16, source, &mut values);
    let group = format.group_size() as usize;
    for (index, (q, scale, bias)) in out.groups(format, Dtype::BF16).iter().enumerate() {
        for (k, q) in q.iter().enumerate() {
            values[index * group + k] -= scale * f32::from(*q) + bias;
        }
    }
    let mean =
        (0..INPUTS).map(|k| f64::from(moments[k * (INPUTS + 1)])).sum::<f64>() / INPUTS as f64;
    let mut sum = 0.0;
    for errors in values.chunks_exact(INPUTS) {
        for (i, x) in errors.iter().enumerate() {
            for (j, y) in errors.iter().enumerate() {
                let damping = if i == j { DAMPING * mean } else { 0.0 };
                let moment = f64::from(moments[i * INPUTS + j]) + damping;
                sum += f64::from(*x) * f64::from(*y) * moment;
            }
        }
    }
    sum
}

#[test]
fn the_error_of_the_outputs_is_what_it_says_and_well_below_refined_s() {
    let (moments, source) = (moments(INPUTS), source());
    for format in formats().filter(|format| format.bits() > 2) {
        let options = QuantizeOptions::new(format, Rounding::Gptq, Dtype::BF16);
        let (out, _, error) = run(&options, INPUTS, &moments, &source);
        let found = output_error(format, &out, &source, &moments);
        // Products of f32 sums over 256 inputs.
        assert!((found / error.stored - 1.0).abs() < 1e-3, "{format:?}: {found} {error:?}");
        assert!(error.stored < 0.6 * error.refined, "{format:?}: {error:?}");
        let mut refined = Outputs::new(format, Dtype::BF16, source.len() / 2);
        super::quantize(&options, (Dtype::BF16, &source), refined.parts()).unwrap();
        let plain = output_error(format, &refined, &source, &moments);
        assert!(found < 0.6 * plain, "{format:?}: {found} {plain}");
    }
}

#[test]
fn neither_threads_nor_platforms_change_a_byte() {
    let (moments, source) = (moments(INPUTS), source());
    for format in [(4, 64), (6, 32), (3, 128)] {
        let format = AffineFormat::new(format.0, format.1).unwrap();
        for block in [INPUTS, 128] {
            let blocks: Vec<f32> = (0..INPUTS / block)
                .flat_map(|at| {
                    let rows = at * block..(at + 1) * block;
                    let moments = &moments;
                    rows.flat_map(move |i| moments[i * INPUTS + at * block..][..block].to_vec())
                })
                .collect();
            let on = |platform: Platform, threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let options = QuantizeOptions::new(format, Rounding::Gptq, Dtype::BF16);
                let options = QuantizeOptions { platform, ..options };
                pool.install(|| run(&options, block, &blocks, &source))
            };
            let one = on(Platform::Portable, 1);
            for platform in Platform::available_for_quantizing() {
                for threads in [1, 3] {
                    let (out, sums, error) = on(platform, threads);
                    assert!(out == one.0, "{format:?} {block} {platform} {threads}");
                    assert_eq!((sums, error), (one.1, one.2), "{format:?} {platform} {threads}");
                }
            }
        }
    }
}

#[test]
fn moments_that_are_none_give_no_factor() {
    let factor = |moments: &[f32]| Hessian::new(Platform::Portable, moments, [32, 32], DAMPING);
    assert!(factor(&[0.0; 32 * 32]).is_none());
    assert!(factor(&[f32::NAN; 32 * 32]).is_none());
    assert!(factor(&[-1.0; 32 * 32]).is_none());
    // One vector alone: of rank 1.
    assert!(factor(&[1.0; 32 * 32]).is_some());
}
