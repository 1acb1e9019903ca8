//! The refined rounding against MLX's.

use std::{fs, path::Path};

use safetensors::SafeTensors;

use super::*;
use crate::affine::Rounding;

fn options(format: AffineFormat, rounding: Rounding, store: Dtype) -> QuantizeOptions<'static> {
    QuantizeOptions::new(format, rounding, store)
}

/// Relative RMSE of refined over that of mlx-cpu must not exceed the limit.
fn check_ratio(bits: u32, limit: f64, tensors: &[Vec<u8>], what: &str) {
    let format = AffineFormat::new(bits, 64).unwrap();
    let [refined, mlx] = [Rounding::Refined, Rounding::MlxCpu].map(|rounding| {
        let options = options(format, rounding, Dtype::BF16);
        let sums = tensors.iter().map(|source| run(&options, (Dtype::BF16, source)).unwrap().1);
        sums.fold(ErrorSums::default(), ErrorSums::plus).relative_rmse()
    });
    let ratio = refined / mlx;
    assert!(ratio <= limit, "{bits} bits, {what}: {ratio:.4}, limit {limit}");
}

const LIMITS: [(u32, f64); 3] = [(4, 0.91), (6, 0.91), (8, 0.74)];

#[test]
fn refined_is_a_tenth_or_more_better_on_seeded_weights() {
    for kind in data::Kind::DENSE {
        let source = data::bytes(Dtype::BF16, &data::sample(kind, 1 << 18, 7));
        for (bits, limit) in LIMITS {
            check_ratio(bits, limit, std::slice::from_ref(&source), &format!("{kind:?}"));
        }
    }
}

/// Two-dimensional tensors of the small trained model.
fn trained() -> Vec<Vec<u8>> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/kjv-4m/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let matrices = tensors.iter().map(|(_, tensor)| tensor);
    let matrices: Vec<Vec<u8>> = matrices
        .filter(|tensor| tensor.shape().len() == 2)
        .inspect(|tensor| assert_eq!(tensor.dtype(), safetensors::Dtype::BF16))
        .map(|tensor| tensor.data().to_vec())
        .collect();
    assert!(matrices.len() > 20);
    matrices
}

#[test]
fn refined_is_a_tenth_or_more_better_on_trained_weights() {
    let tensors = trained();
    for (bits, limit) in LIMITS {
        check_ratio(bits, limit, &tensors, "kjv-4m");
    }
}

/// What f32 arithmetic may hide of a single weight's error, relative to the group's largest
/// weight. Matters only where MLX is exact to the last bits.
const HIDDEN: f64 = 1e-6;

/// No group of refined has a larger squared error, in f64, than mlx-cpu's stored group.
fn check_never_worse(options: &QuantizeOptions<'_>, source: (Dtype, &[u8]), hidden: f64) {
    let errors = |rounding| {
        let options = QuantizeOptions { rounding, ..*options };
        run(&options, source).unwrap().0.errors(&options, source)
    };
    let mut values = vec![0.0; source.1.len() / source.0.size_bytes()];
    widen(Platform::Portable, source.0, source.1, &mut values);
    let groups = values.chunks_exact(options.format.group_size() as usize);
    let pairs = errors(Rounding::Refined).into_iter().zip(errors(Rounding::MlxCpu));
    for (index, ((refined, mlx), group)) in pairs.zip(groups).enumerate() {
        let largest = group.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
        let slack = f64::from(largest) * hidden;
        let what = format!("{:?}, store {}", options.format, options.store);
        assert!(refined <= mlx + slack * slack, "group {index}, {what}: {refined:e} > {mlx:e}");
    }
}

#[test]
fn refined_is_never_worse_on_any_group() {
    for format in formats() {
        let group = format.group_size() as usize;
        let columns = data::importance(group * 9, 4);
        for kind in [data::Kind::Gaussian, data::Kind::StudentT4, data::Kind::Sparse] {
            let source = data::bytes(Dtype::BF16, &data::sample(kind, group * 9 * 60, 10));
            for importance in [None, Some(&columns[..])] {
                let options = options(format, Rounding::Refined, Dtype::BF16);
                let options = QuantizeOptions { importance, ..options };
                check_never_worse(&options, (Dtype::BF16, &source), 0.0);
            }
        }
        for dtype in FLOATS {
            let source = data::bytes(dtype, &data::awkward(360, group, dtype, 6));
            let options = options(format, Rounding::Refined, dtype);
            check_never_worse(&options, (dtype, &source), HIDDEN);
        }
    }
}

#[test]
fn refined_is_never_worse_on_any_group_of_trained_weights() {
    for source in trained() {
        for bits in [4, 6, 8] {
            let format = AffineFormat::new(bits, 64).unwrap();
            let options = options(format, Rounding::Refined, Dtype::BF16);
            check_never_worse(&options, (Dtype::BF16, &source), 0.0);
        }
    }
}

#[test]
fn importance_lowers_the_weighted_error() {
    let columns = data::importance(1024, 9);
    let source = data::bytes(Dtype::BF16, &data::sample(data::Kind::Gaussian, 1 << 17, 12));
    for format in formats() {
        let plain = options(format, Rounding::Refined, Dtype::BF16);
        let weighted = QuantizeOptions { importance: Some(&columns), ..plain };
        let total = |with: &QuantizeOptions<'_>| {
            let (out, _) = run(with, (Dtype::BF16, &source)).unwrap();
            out.errors(&weighted, (Dtype::BF16, &source)).into_iter().sum::<f64>()
        };
        assert!(total(&weighted) < total(&plain), "{format:?}");
    }
}
