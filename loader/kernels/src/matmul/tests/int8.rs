//! Products of 8-bit activations: the same bits on all platforms and in any batch, and as close
//! to the exact product as 8 bits allow.

use super::*;
use crate::{Team, TeamOptions, team::Activations};

fn team(threads: usize, platform: Platform) -> Team {
    Team::new(&TeamOptions { threads, platform, activations: Activations::Int8 }).unwrap()
}

/// Every platform with words as they are stored, and as it likes them best.
fn forms() -> Vec<(Platform, Packing)> {
    let mut forms: Vec<_> = Platform::available()
        .into_iter()
        .flat_map(|platform| {
            [Packing::Stored, Packing::best(platform, Activations::Int8)].map(|it| (platform, it))
        })
        .collect();
    forms.dedup();
    forms
}

/// Scales and biases in 16 bits.
fn halves(values: &[f32], bf16: bool) -> Vec<u16> {
    let half = |value: &f32| {
        if bf16 {
            half::bf16::from_f32(*value).to_bits()
        } else {
            half::f16::from_f32(*value).to_bits()
        }
    };
    values.iter().map(half).collect()
}

/// What every platform makes of a matrix with each kind of scales, alone and together.
fn check_bits(form: [u32; 2], shape: [usize; 2], rows: &[usize]) {
    let stored = Stored::new(shape, form, 21);
    let [bf16, f16] =
        [true, false].map(|kind| [halves(&stored.scales, kind), halves(&stored.biases, kind)]);
    let kinds = [
        [Floats::F32(&stored.scales), Floats::F32(&stored.biases)],
        [Floats::BF16(&bf16[0]), Floats::BF16(&bf16[1])],
        [Floats::F16(&f16[0]), Floats::F16(&f16[1])],
    ];
    let most = rows.iter().copied().max().unwrap_or(0);
    let x = numbers(most * shape[1], 31);
    for [scales, biases] in kinds {
        let matrix = Matrix::affine(shape, &stored.words, scales, biases, form);
        let alone: Vec<f32> = team(1, Platform::Portable)
            .run(|| x.chunks_exact(shape[1]).flat_map(|x| product(x, &matrix)).collect());
        for (platform, packing) in forms() {
            let team = team(2, platform);
            let Some(words) = stored.packed(packing) else { continue };
            let matrix = Matrix::affine(shape, &words, scales, biases, form).packed_as(packing);
            for rows in rows {
                let found = team.run(|| product(&x[..rows * shape[1]], &matrix));
                let expected = &alone[..rows * shape[0]];
                assert!(
                    bits_of(&found) == bits_of(expected),
                    "{platform}, {packing:?}: {form:?}, {shape:?}, {rows} rows"
                );
            }
        }
    }
}

#[test]
fn all_platforms_give_the_same_bits_in_any_batch() {
    for bits in [4, 6, 8] {
        for group in [32, 64, 128] {
            check_bits([bits, group], [3, 128], &[1, 2, 5]);
            check_bits([bits, group], [37, 128 * 9], &[1, 3, 4, 7, 8, 9, 17]);
            check_bits([bits, group], [36, 128 * 9], &[1, 2, 3, 4, 5, 6, 35]);
        }
        // One group, an odd number of groups, a run that ends within a block.
        check_bits([bits, 32], [4, 32], &[1, 2, 11]);
        check_bits([bits, 32], [8, 32 * 21], &[1, 2, 11]);
        check_bits([bits, 64], [4, 64], &[1, 2, 11]);
        check_bits([bits, 64], [40, 64 * 33], &[1, 12]);
    }
    check_bits([4, 64], [72, 2048], &[1, 33]);
    // Rows enough for tiles, whole tiles and a rest.
    for bits in [4, 6, 8] {
        check_bits([bits, 32], [35, 32 * 19], &[34]);
        check_bits([bits, 64], [67, 64 * 18], &[33, 39]);
        check_bits([bits, 128], [32, 128 * 9], &[36]);
    }
}

/// Errors of rounded activations, relative to the root of the sum of the squared products: a
/// step of a 127th of the largest of 64 numbers between -1 and 1 errs by 1/440 in the mean, and
/// products against 8-bit weights' own size weigh alike. Ten thousand results stay within five
/// deviations.
const ROUNDING_TOLERANCE: f64 = 5.0 / 440.0 * 1.2;

#[test]
fn rounded_activations_are_as_close_as_eight_bits_allow() {
    for bits in [4, 6, 8] {
        for group in [32, 64, 128] {
            let shape = [40, 1024];
            let stored = Stored::new(shape, [bits, group], 5);
            let x = numbers(2 * shape[1], 9);
            let found = team(1, Platform::detect()).run(|| product(&x, &stored.matrix()));
            let mut worst: f64 = 0.0;
            for (row, x) in x.chunks_exact(shape[1]).enumerate() {
                for (index, weights) in stored.weights.chunks_exact(shape[1]).enumerate() {
                    let products = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w);
                    let exact: f64 = products.sum();
                    // The mean square of x is a third.
                    let size = weights.iter().map(|w| w * w / 3.0).sum::<f64>().sqrt();
                    let error = f64::from(found[row * shape[0] + index]) - exact;
                    worst = worst.max(error.abs() / size);
                }
            }
            assert!(worst < ROUNDING_TOLERANCE, "{bits} bits, groups of {group}: {worst:e}");
            assert!(worst > 1e-4, "{bits} bits: activations were not rounded: {worst:e}");
        }
    }
}

#[test]
fn two_planes_are_as_close_as_sixteen_bits_on_all_platforms_and_in_any_batch() {
    for (bits, group, rows) in [(4, 64, 5), (6, 32, 1), (8, 64, 35), (8, 128, 2)] {
        let shape = [72, 1024];
        let stored = Stored::new(shape, [bits, group], 5);
        let x = numbers(rows * shape[1], 9);
        let two = |x: &[f32], matrix: &Matrix<'_>| {
            let mut out = vec![0.0; x.len() / shape[1] * shape[0]];
            matmul_in_two_planes(x, matrix, &mut out, None);
            out
        };
        let alone: Vec<f32> = team(1, Platform::Portable)
            .run(|| x.chunks_exact(shape[1]).flat_map(|x| two(x, &stored.matrix())).collect());
        for (platform, packing) in forms() {
            let Some(words) = stored.packed(packing) else { continue };
            let [scales, biases] = [&stored.scales, &stored.biases].map(|it| Floats::F32(it));
            let matrix = Matrix::affine(shape, &words, scales, biases, [bits, group]);
            let found = team(2, platform).run(|| two(&x, &matrix.packed_as(packing)));
            assert!(bits_of(&found) == bits_of(&alone), "{platform}, {packing:?}: {bits} bits");
        }
        let mut worst: f64 = 0.0;
        for (row, x) in x.chunks_exact(shape[1]).enumerate() {
            for (index, weights) in stored.weights.chunks_exact(shape[1]).enumerate() {
                let exact: f64 = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum();
                let size = weights.iter().map(|w| w * w / 3.0).sum::<f64>().sqrt();
                let error = f64::from(alone[row * shape[0] + index]) - exact;
                worst = worst.max(error.abs() / size);
            }
        }
        // A step of the second plane is a 254th of one of the first.
        assert!(worst < ROUNDING_TOLERANCE / 200.0, "{bits} bits, groups of {group}: {worst:e}");
    }
}

#[test]
fn infinite_and_undefined_activations_are_not_hidden() {
    let stored = Stored::new([3, 128], [4, 64], 1);
    for platform in Platform::available() {
        for value in [f32::NAN, f32::INFINITY] {
            let mut x = numbers(128, 2);
            x[70] = value;
            let found = team(1, platform).run(|| product(&x, &stored.matrix()));
            assert!(found.iter().all(|y| y.is_nan()), "{platform}: {value}: {found:?}");
        }
        let zeros = team(1, platform).run(|| product(&[0.0; 128], &stored.matrix()));
        assert_eq!(zeros, [0.0; 3], "{platform}");
    }
}
