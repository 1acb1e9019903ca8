//! How the trial lists were found: greedily, the next trial is the one that lowers the sum of the
//! logarithms of the error's ratio to MLX's most, over Gaussian, Laplace and Student-t(4) weights
//! of one seed. Takes a minute:
//!
//!   cargo test --release -p shardpack-quantize tune -- --ignored --nocapture

use std::fmt::Write as _;

use super::{Outputs, data};
use crate::{
    affine::{
        AffineFormat, ErrorSums, QuantizeOptions, Rounding,
        mlx::Backend,
        quantize::{Rule, quantize_by},
        trials::Schedule,
    },
    dtype::Dtype,
};

fn errors(rule: Rule, format: AffineFormat, sets: &[Vec<u8>]) -> Vec<f64> {
    let options = QuantizeOptions::new(format, Rounding::Refined, Dtype::BF16);
    let error = |source: &Vec<u8>| {
        let mut out = Outputs::new(format, Dtype::BF16, source.len() / 2);
        quantize_by(rule, ErrorSums::default(), &options, (Dtype::BF16, source), out.parts())
            .unwrap()
            .errors
    };
    sets.iter().map(error).collect()
}

fn sets(count: usize, seed: u64) -> Vec<Vec<u8>> {
    data::Kind::DENSE
        .map(|kind| data::bytes(Dtype::BF16, &data::sample(kind, count, seed)))
        .to_vec()
}

fn tune(format: AffineFormat, polish: u32, count: usize, widths: &[f32]) -> String {
    let shifts = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0];
    let (train, test) = (sets(1 << 17, 11), sets(1 << 18, 7));
    let plain = errors(Rule::Mlx(Backend::Cpu), format, &train);
    let mut trials: Vec<(f32, f32)> = Vec::new();
    let (mut text, mut held_out) = (String::new(), Vec::new());
    while trials.len() < count {
        let mut best = (f64::INFINITY, (0.0, 0.0));
        for trial in widths.iter().flat_map(|width| shifts.map(|shift| (*width, shift))) {
            trials.push(trial);
            let rule = Rule::Refined(Schedule { trials: &trials, polish });
            let ours = errors(rule, format, &train);
            let score: f64 = ours.iter().zip(&plain).map(|(a, b)| (a / b).ln()).sum();
            if score < best.0 {
                best = (score, trial);
            }
            trials.pop();
        }
        trials.push(best.1);
        let rule = Rule::Refined(Schedule { trials: &trials, polish });
        let ours = errors(rule, format, &test);
        let plain = errors(Rule::Mlx(Backend::Cpu), format, &test);
        held_out = ours.iter().zip(&plain).map(|(a, b)| (a / b).sqrt()).collect();
        let ratios: Vec<String> = held_out.iter().map(|ratio| format!("{ratio:.4}")).collect();
        writeln!(
            text,
            "{} bits, group {}, polish {polish}, {:2} trials: {} after {:?}",
            format.bits(),
            format.group_size(),
            trials.len(),
            ratios.join(" "),
            best.1
        )
        .expect("a string takes all");
    }
    assert!(held_out.iter().all(|ratio| *ratio < 1.0), "no better than MLX: {text}");
    text
}

#[test]
#[ignore = "takes minutes; it is run for the lists that it prints"]
#[expect(clippy::print_stdout, reason = "it is run for what it prints")]
fn tuned_trial_lists_have_lower_errors_than_mlx_on_weights_of_another_seed() {
    let steps = |first: f32, step: f32, count: usize| -> Vec<f32> {
        (0..count).map(|i| first + step * i as f32).collect()
    };
    for group_size in [32, 64, 128] {
        for bits in [2, 3, 4, 5, 6, 8] {
            let format = AffineFormat::new(bits, group_size).unwrap();
            let (widths, polishes): (_, &[u32]) = match bits {
                2 => (steps(0.5, 0.05, 13), &[1, 2, 3]),
                3 => (steps(0.64, 0.03, 16), &[1, 2]),
                4 => (steps(0.74, 0.02, 17), &[1, 2, 3]),
                5 => (steps(0.84, 0.015, 15), &[1, 2]),
                6 => (steps(0.91, 0.0125, 12), &[0, 1, 2]),
                _ => (steps(0.973, 0.006, 11), &[0, 1]),
            };
            for polish in polishes {
                println!("{}", tune(format, *polish, 8, &widths));
            }
        }
    }
}
