//! Products beside the machine's read limit, in one run and alternately:
//! `cargo run --release -p shardpack-kernels --example products -- [THREADS] [ROUNDS] [BITS] [PLATFORM]`.
//!
//! The limit of few rows: weights are read from memory once, so bytes per second stay below those
//! of a plain read loop. The limit of many rows: products of bytes per second; with AVX-512 64 a
//! cycle and unit. Each figure is the best of pieces that are short enough to fall between what
//! else the machine does, and read so seldom that no cache holds them.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, hint::black_box, time::Instant};

use memmap2::MmapMut;
use shardpack_kernels::{Activations, Floats, Matrix, Platform, Team, TeamOptions, matmul, memory};
use zerocopy::{FromBytes, IntoBytes};

/// A layer's matrices in turn, `[outputs, inputs]`.
const SHAPES: [[usize; 2]; 2] = [[8192, 2048], [2048, 8192]];

/// Weights of one round: far more than any cache.
const WEIGHTS: usize = 1 << 30;

/// Layers of a piece.
const LAYERS: usize = 4;

/// Rows of activations that are measured.
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 256];

/// Rows of activations from which on only some of the weights are taken.
const MANY: usize = 32;

/// Memory on large pages, as packages have it.
struct Words(MmapMut);

impl Words {
    fn new(words: impl ExactSizeIterator<Item = u32>) -> Result<Self, Box<dyn Error>> {
        let mut memory = MmapMut::map_anon(words.len() * 4)?;
        #[cfg(target_os = "linux")]
        memory.advise(memmap2::Advice::HugePage)?;
        for (place, word) in memory.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        Ok(Self(memory))
    }

    fn words(&self) -> &[u32] {
        <[u32]>::ref_from_bytes(&self.0).expect("pages begin on words")
    }
}

struct Layer {
    shape: [usize; 2],
    words: Words,
    scales: Vec<u16>,
    biases: Vec<u16>,
}

impl Layer {
    fn new(
        shape: [usize; 2],
        bits: usize,
        group: usize,
        seed: u32,
    ) -> Result<Self, Box<dyn Error>> {
        let count = shape[0] * shape[1];
        let words = (0..count * bits / 32).map(|i| (i as u32 ^ seed).wrapping_mul(0x9e37_79b9));
        // Small scales, whose products stay finite whatever the rest.
        let halves =
            |seed: usize| (0..count / group).map(move |i| 0x3c00 + ((i * 31 + seed) % 97) as u16);
        Ok(Self {
            shape,
            words: Words::new(words)?,
            scales: halves(1).collect(),
            biases: halves(2).collect(),
        })
    }

    fn matrix(&self, bits: u32, group: u32) -> Matrix<'_> {
        let (scales, biases) = (Floats::BF16(&self.scales), Floats::BF16(&self.biases));
        Matrix::affine(self.shape, self.words.words(), scales, biases, [bits, group])
    }

    fn bytes(&self) -> usize {
        self.words.0.len() + self.scales.len() * 4
    }
}

/// Seconds of one call.
fn seconds(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64()
}

/// Seconds for all weights at the best piece's pace, by plain reads.
fn read(team: &Team, layers: &[Layer]) -> f64 {
    let share = |layers: &[Layer]| {
        let bytes: usize = layers.iter().map(Layer::bytes).sum();
        bytes as f64 / layers.iter().map(|layer| layer.words.0.len()).sum::<usize>() as f64
    };
    let mut best = f64::INFINITY;
    for how in [memory::Read::Plain, memory::Read::Fetched] {
        for layers in layers.chunks(LAYERS) {
            let spent = team.run(|| {
                seconds(|| {
                    for layer in layers {
                        black_box(memory::read(layer.words.words().as_bytes(), how));
                    }
                })
            });
            best = best.min(spent * share(layers));
        }
    }
    best * layers.len() as f64 / LAYERS as f64
}

/// Seconds for all weights at the best piece's pace, by products with `rows` rows.
fn products(team: &Team, matrices: &[Matrix<'_>], rows: usize) -> f64 {
    let (x, mut out) = (vec![0.37; rows * 8192], vec![0.0; rows * 8192]);
    let held = if rows > MANY { 2 * LAYERS } else { matrices.len() };
    let mut best = f64::INFINITY;
    for matrices in matrices[..held].chunks(LAYERS) {
        let spent = team.run(|| {
            seconds(|| {
                for matrix in matrices {
                    let (x, out) = (&x[..rows * matrix.cols()], &mut out[..rows * matrix.rows()]);
                    matmul(x, matrix, black_box(out));
                }
            })
        });
        best = best.min(spent);
    }
    best * matrices.len() as f64 / LAYERS as f64
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, rounds, only): (usize, usize, usize) =
        (number(0, 2)?, number(1, 5)?, number(2, 0)?);
    let wanted = |platform: &Platform| match arguments.get(3) {
        Some(name) => platform.name() == name,
        None => *platform != Platform::Portable,
    };
    let platforms: Vec<_> = Platform::available().into_iter().filter(wanted).collect();
    println!(
        "| bits | platform | rows | GB/s | of the read limit | GMAC/s |\n|---|---|---|---|---|---|"
    );
    for bits in [4, 6, 8].into_iter().filter(|bits| only == 0 || only == *bits) {
        let layers = (0..WEIGHTS / (SHAPES[0][0] * SHAPES[0][1]))
            .map(|index| Layer::new(SHAPES[index % 2], bits, 64, index as u32))
            .collect::<Result<Vec<_>, _>>()?;
        let bytes: usize = layers.iter().map(Layer::bytes).sum();
        let matrices: Vec<_> = layers.iter().map(|layer| layer.matrix(bits as u32, 64)).collect();
        let mut limit = f64::INFINITY;
        let mut best = vec![[f64::INFINITY; ROWS.len()]; platforms.len()];
        for _ in 0..rounds {
            for (platform, best) in platforms.iter().zip(&mut best) {
                let activations = Activations::Int8;
                let team = Team::new(&TeamOptions { threads, platform: *platform, activations })?;
                limit = limit.min(read(&team, &layers));
                for (best, rows) in best.iter_mut().zip(ROWS) {
                    *best = best.min(products(&team, &matrices, rows));
                }
            }
        }
        println!("| {bits} | read loop | | {:.2} | 1 | |", bytes as f64 / 1e9 / limit);
        for (platform, best) in platforms.iter().zip(best) {
            for (seconds, rows) in best.into_iter().zip(ROWS) {
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
