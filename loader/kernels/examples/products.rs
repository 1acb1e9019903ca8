//! Products beside the machine's read limit, in one run and alternately:
//! `cargo run --release -p shardpack-kernels --example products -- [THREADS] [ROUNDS]`.
//!
//! The limit of few rows: weights are read from memory once, so bytes per second stay below those
//! of a plain read loop. The limit of many rows: products of bytes per second; with AVX-512 64 a
//! cycle and unit.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, hint::black_box, time::Instant};

use shardpack_kernels::{Activations, Floats, Matrix, Platform, Team, TeamOptions, matmul, memory};

/// A layer's matrices in turn, `[outputs, inputs]`.
const SHAPES: [[usize; 2]; 2] = [[8192, 2048], [2048, 8192]];

/// Weights of one round: far more than any cache.
const WEIGHTS: usize = 1 << 30;

/// Prefill of this many rows on some of the weights.
const ROWS: usize = 256;

struct Layer {
    shape: [usize; 2],
    words: Vec<u32>,
    scales: Vec<u16>,
    biases: Vec<u16>,
}

impl Layer {
    fn new(shape: [usize; 2], bits: usize, group: usize, seed: u32) -> Self {
        let count = shape[0] * shape[1];
        let words = (0..count * bits / 32).map(|i| (i as u32 ^ seed).wrapping_mul(0x9e37_79b9));
        // Small scales, whose products stay finite whatever the rest.
        let halves =
            |seed: usize| (0..count / group).map(move |i| 0x3c00 + ((i * 31 + seed) % 97) as u16);
        Self {
            shape,
            words: words.collect(),
            scales: halves(1).collect(),
            biases: halves(2).collect(),
        }
    }

    fn matrix(&self, bits: u32, group: u32) -> Matrix<'_> {
        let (scales, biases) = (Floats::BF16(&self.scales), Floats::BF16(&self.biases));
        Matrix::affine(self.shape, &self.words, scales, biases, [bits, group])
    }

    fn bytes(&self) -> usize {
        self.words.len() * 4 + self.scales.len() * 4
    }
}

/// Seconds of one call.
fn seconds(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse());
    let (threads, rounds): (usize, usize) = (number(2)?, number(5)?);
    let platforms: Vec<_> =
        Platform::available().into_iter().filter(|p| *p != Platform::Portable).collect();
    println!(
        "| bits | platform | rows | GB/s | of the read limit | GMAC/s |\n|---|---|---|---|---|---|"
    );
    for bits in [4, 6, 8] {
        let layers: Vec<_> = (0..WEIGHTS / (SHAPES[0][0] * SHAPES[0][1]))
            .map(|index| Layer::new(SHAPES[index % 2], bits, 64, index as u32))
            .collect();
        let bytes: usize = layers.iter().map(Layer::bytes).sum();
        let matrices: Vec<_> = layers.iter().map(|layer| layer.matrix(bits as u32, 64)).collect();
        let mut limit = f64::INFINITY;
        let mut best = vec![[f64::INFINITY; 4]; platforms.len()];
        for _ in 0..rounds {
            for (platform, best) in platforms.iter().zip(&mut best) {
                let activations = Activations::Int8;
                let team = Team::new(&TeamOptions { threads, platform: *platform, activations })?;
                for how in [memory::Read::Plain, memory::Read::Fetched] {
                    let read = || {
                        team.run(|| {
                            for layer in &layers {
                                black_box(memory::read(
                                    zerocopy::IntoBytes::as_bytes(&layer.words[..]),
                                    how,
                                ));
                            }
                        });
                    };
                    let share = bytes as f64
                        / layers.iter().map(|l| l.words.len() * 4).sum::<usize>() as f64;
                    limit = limit.min(seconds(read) * share);
                }
                for (best, rows) in best.iter_mut().zip([1, 4, 8, ROWS]) {
                    let few = if rows == ROWS { &matrices[..4] } else { &matrices[..] };
                    let x = vec![0.37; rows * 8192];
                    let mut out = vec![0.0; rows * 8192];
                    let spent = seconds(|| {
                        team.run(|| {
                            for matrix in few {
                                let (x, out) =
                                    (&x[..rows * matrix.cols()], &mut out[..rows * matrix.rows()]);
                                matmul(x, matrix, black_box(out));
                            }
                        });
                    });
                    *best = best.min(spent * matrices.len() as f64 / few.len() as f64);
                }
            }
        }
        println!("| {bits} | read loop | | {:.2} | 1 | |", bytes as f64 / 1e9 / limit);
        for (platform, best) in platforms.iter().zip(best) {
            for (seconds, rows) in best.into_iter().zip([1, 4, 8, ROWS]) {
                let (gb, macs) =
                    (bytes as f64 / 1e9 / seconds, (WEIGHTS * rows) as f64 / 1e9 / seconds);
                println!(
                    "| {bits} | {platform} | {rows} | {gb:.2} | {:.2} | {macs:.0} |",
                    limit / seconds
                );
            }
        }
    }
    Ok(())
}
