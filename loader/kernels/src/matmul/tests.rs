//! Products against a plain reference and MLX.

use proptest::prelude::*;

use zerocopy::IntoBytes;

use super::*;
use crate::{Repack, Team, TeamOptions, floats::Floats};

mod golden;
mod int8;

/// Largest distance from a product in f64, relative to the sum of the products' sizes: f32 sums
/// of at most 512 terms in 16 lanes.
const RELATIVE_TOLERANCE: f64 = 4e-6;

/// Deterministic numbers in -1..1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A quantized matrix and its weights in f64.
struct Stored {
    shape: [usize; 2],
    form: [u32; 2],
    words: Vec<u32>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    weights: Vec<f64>,
}

impl Stored {
    fn new(shape: [usize; 2], form: [u32; 2], seed: u64) -> Self {
        let [rows, cols] = shape;
        let [bits, group] = form;
        let groups = rows * cols / group as usize;
        let (scales, biases) = (numbers(groups, seed + 1), numbers(groups, seed + 2));
        let levels: Vec<u32> = numbers(rows * cols, seed)
            .into_iter()
            .map(|x| ((x + 1.0) * 0.5 * 2_f32.powi(bits as i32)) as u32)
            .collect();
        // One bit at a time, unlike the kernel.
        let mut words = vec![0; rows * cols * bits as usize / 32];
        for (index, level) in levels.iter().enumerate() {
            for bit in 0..bits as usize {
                let at = index * bits as usize + bit;
                words[at / 32] |= (level >> bit & 1) << (at % 32);
            }
        }
        let weights = levels
            .iter()
            .enumerate()
            .map(|(index, level)| {
                let group = index / group as usize;
                f64::from(*level) * f64::from(scales[group]) + f64::from(biases[group])
            })
            .collect();
        Self { shape, form, words, scales, biases, weights }
    }

    /// The words as they stand in such a packing, if their matrix can be packed so.
    fn packed(&self, packing: Packing) -> Option<Vec<u32>> {
        if packing == Packing::Stored {
            return Some(self.words.clone());
        }
        let repack = Repack::new(self.shape, self.form.map(|number| number as usize), packing)?;
        let mut words = self.words.clone();
        repack.interleave(words.as_mut_bytes());
        Some(words)
    }

    fn matrix(&self) -> Matrix<'_> {
        let (scales, biases) = (Floats::F32(&self.scales), Floats::F32(&self.biases));
        Matrix::affine(self.shape, &self.words, scales, biases, self.form)
    }
}

fn product(x: &[f32], matrix: &Matrix<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / matrix.cols() * matrix.rows()];
    matmul(x, matrix, &mut out);
    out
}

/// Largest error relative to `Σ |x · w|`.
fn error(x: &[f32], weights: &[f64], [outputs, inputs]: [usize; 2], found: &[f32]) -> f64 {
    let mut worst: f64 = 0.0;
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        for (index, weights) in weights.chunks_exact(inputs).enumerate() {
            let products = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w);
            let (sum, size) = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
            worst = worst.max((f64::from(found[row * outputs + index]) - sum).abs() / size);
        }
    }
    worst
}

fn check_affine(bits: u32, group: u32, shape: [usize; 2]) {
    let stored = Stored::new(shape, [bits, group], 7);
    for rows in [1, 2, 5] {
        let x = numbers(rows * shape[1], 11);
        let error = error(&x, &stored.weights, shape, &product(&x, &stored.matrix()));
        assert!(error < RELATIVE_TOLERANCE, "{bits} bits, group {group}, {shape:?}: {error:e}");
    }
}

#[test]
fn affine_products_are_those_of_the_dequantized_weights() {
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            check_affine(bits, group, [1, 128]);
            check_affine(bits, group, [9, 256]);
        }
    }
    check_affine(4, 64, [17, 192]);
    check_affine(6, 32, [8, 96]);
}

#[test]
fn plain_products_have_any_width() {
    for inputs in [1, 15, 16, 17, 127, 128, 129, 300] {
        let weights = numbers(5 * inputs, 3);
        let reference: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
        let matrix = Matrix::plain(5, inputs, Floats::F32(&weights));
        let x = numbers(3 * inputs, 4);
        let error = error(&x, &reference, [5, inputs], &product(&x, &matrix));
        assert!(error < RELATIVE_TOLERANCE, "{inputs} inputs: {error:e}");
    }
}

#[test]
fn no_inputs_or_no_outputs_are_legal() {
    let mut out = [1.0; 3];
    matmul(&[], &Matrix::plain(3, 0, Floats::F32(&[])), &mut out);
    assert_eq!(out, [0.0; 3]);
    matmul(&[1.0, 2.0], &Matrix::plain(0, 2, Floats::F32(&[])), &mut []);
    matmul(&[], &Matrix::plain(1, 2, Floats::F32(&[1.0, 2.0])), &mut []);
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Products of all rows at once, on `threads` threads, against one row at a time on one.
fn check_same_bits(matrix: &Matrix<'_>, rows: usize, threads: usize) {
    let x = numbers(rows * matrix.cols(), 5);
    let alone: Vec<f32> = x.chunks_exact(matrix.cols()).flat_map(|x| product(x, matrix)).collect();
    for platform in Platform::available() {
        let options = TeamOptions { threads, platform, activations: Activations::F32 };
        let together = Team::new(&options).unwrap().run(|| product(&x, matrix));
        assert_eq!(
            bits_of(&together),
            bits_of(&alone),
            "{platform}: {rows} rows, {threads} threads"
        );
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_threads() {
    // Large enough that several threads get work.
    let affine = Stored::new([520, 512], [4, 64], 1);
    let plain = numbers(520 * 131, 2);
    for (rows, threads) in [(1, 4), (2, 1), (3, 4), (64, 2), (130, 3)] {
        check_same_bits(&affine.matrix(), rows, threads);
        check_same_bits(&Matrix::plain(520, 131, Floats::F32(&plain)), rows, threads);
    }
}

proptest! {
    #[test]
    fn any_shape_gives_the_same_bits_in_any_batch(
        rows in 1_usize..12, outputs in 1_usize..40, inputs in 1_usize..300, seed: u32,
    ) {
        let weights = numbers(outputs * inputs, u64::from(seed));
        check_same_bits(&Matrix::plain(outputs, inputs, Floats::F32(&weights)), rows, 3);
    }
}

#[test]
fn many_rows_have_the_bits_of_each() {
    // Lanes of several spans, more rows than pass at once, and what is left over of each.
    for (rows, [outputs, inputs]) in
        [(many::MOST_ROWS + 97, [35, 33]), (100, [70, 3200]), (96, [32, 16]), (97, [1, 7])]
    {
        let weights = numbers(outputs * inputs, 9);
        check_same_bits(&Matrix::plain(outputs, inputs, Floats::F32(&weights)), rows, 2);
    }
}

#[test]
fn threads_that_wait_begin_with_their_own_rows() {
    let platform = Platform::detect();
    let options = TeamOptions { threads: 2, platform, activations: Activations::F32 };
    let stored = [Stored::new([96, 64], [4, 32], 3), Stored::new([32, 64], [4, 32], 4)];
    let matrices = stored.each_ref().map(|stored| {
        let factors = [&stored.scales, &stored.biases].map(|values| Floats::F32(values));
        Matrix::affine(stored.shape, &stored.words, factors[0], factors[1], stored.form)
    });
    let beginning = Team::new(&options).unwrap().run(|| Beginning::new(&matrices));
    // Of 128 rows the second thread has those from the 64th on, with all that belongs to them.
    let words_per_row = 64 * 4 / 32;
    let first = &stored[0].words[64 * words_per_row..];
    let [runs] = &beginning.runs[..] else { panic!("one thread waits: {beginning:?}") };
    assert_eq!(runs.len(), 6);
    assert_eq!(runs[0].start, first.as_ptr().addr());
    assert_eq!(runs[0].len(), size_of_val(first));
    assert_eq!(runs[1].len(), 32 * 2 * 4, "scales");
    assert_eq!(runs[3].start, stored[1].words.as_ptr().addr());
    assert_eq!(runs[3].len(), size_of_val(&stored[1].words[..]));
}
