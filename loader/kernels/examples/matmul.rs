//! GEMV and GEMM next to the machine's read limit, in one run and alternately:
//! `cargo run --release -p shardpack-kernels --example matmul -- [THREADS] [ROUNDS] [BITS] [PLATFORM]
//! [ROWS] [OUTPUTS INPUTS] [stored]`; `stored` leaves weights as packages have them.
//!
//! The limit of few rows: weights are read from memory once, so bytes per second stay below those
//! of a plain read loop. The limit of many rows: products of bytes per second; with AVX-512 64 a
//! cycle and unit. Each figure is the best of pieces that are short enough to fall between what
//! else the machine does, and read so seldom that no cache holds them.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, hint::black_box, time::Instant};

use memmap2::MmapMut;
use shardpack_kernels::{
    Activations, Floats, Matrix, Packing, Repack, Team, TeamOptions, matmul, memory,
};
use shardpack_quantize::Platform;
use zerocopy::{FromBytes, IntoBytes};

/// A layer's matrices in turn, `[outputs, inputs]`.
const SHAPES: [[usize; 2]; 2] = [[5632, 2048], [2048, 5632]];

/// Pieces of a round.
const PIECES: usize = 24;

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
    packing: Packing,
    scales: Vec<u16>,
    biases: Vec<u16>,
}

impl Layer {
    fn new(
        shape: [usize; 2],
        [bits, group]: [usize; 2],
        packing: Packing,
        seed: u32,
    ) -> Result<Self, Box<dyn Error>> {
        let count = shape[0] * shape[1];
        let words = (0..count * bits / 32).map(|i| (i as u32 ^ seed).wrapping_mul(0x9e37_79b9));
        // Small scales, whose products stay finite whatever the rest.
        let halves =
            |seed: usize| (0..count / group).map(move |i| 0x3c00 + ((i * 31 + seed) % 97) as u16);
        let mut words = Words::new(words)?;
        if let Some(repack) = Repack::new(shape, [bits, group], packing) {
            repack.interleave(&mut words.0);
        }
        Ok(Self { shape, words, packing, scales: halves(1).collect(), biases: halves(2).collect() })
    }

    fn matrix(&self, bits: u32, group: u32) -> Matrix<'_> {
        let (scales, biases) = (Floats::BF16(&self.scales), Floats::BF16(&self.biases));
        Matrix::affine(self.shape, self.words.words(), scales, biases, [bits, group])
            .packed_as(self.packing)
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

/// Seconds in which the weights of some layers are read.
fn read(team: &Team, layers: &[Layer], how: memory::Read) -> f64 {
    let spent = team.run(|| {
        seconds(|| {
            for layer in layers {
                black_box(memory::read(layer.words.words().as_bytes(), how));
            }
        })
    });
    let words: usize = layers.iter().map(|layer| layer.words.0.len()).sum();
    let all: usize = layers.iter().map(Layer::bytes).sum();
    spent * all as f64 / words as f64
}

/// Seconds of products of some layers with `rows` rows.
fn products(team: &Team, layers: &[Layer], form: [u32; 2], rows: usize) -> f64 {
    let most = layers.iter().flat_map(|layer| layer.shape).max().unwrap_or_default();
    let (x, mut out) = (vec![0.37; rows * most], vec![0.0; rows * most]);
    team.run(|| {
        seconds(|| {
            for layer in layers {
                let matrix = layer.matrix(form[0], form[1]);
                let (x, out) = (&x[..rows * matrix.cols()], &mut out[..rows * matrix.rows()]);
                matmul(x, &matrix, black_box(out));
            }
        })
    })
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, rounds, only): (usize, usize, usize) =
        (number(0, 2)?, number(1, 5)?, number(2, 0)?);
    let only_rows: Option<usize> = arguments.get(4).map(|text| text.parse()).transpose()?;
    let shapes: [[usize; 2]; 2] = match (arguments.get(5), arguments.get(6)) {
        (Some(outputs), Some(inputs)) => [[outputs.parse()?, inputs.parse()?]; 2],
        _ => SHAPES,
    };
    let wanted = |platform: &Platform| match arguments.get(3) {
        Some(name) => platform.name() == name,
        None => *platform != Platform::Portable,
    };
    let platforms: Vec<_> = Platform::available().into_iter().filter(wanted).collect();
    println!(
        "| bits | platform | rows | read GB/s | GB/s | share | GMAC/s |\n|---|---|---|---|---|---|---|"
    );
    let activations = Activations::Int8;
    for bits in [4, 6, 8].into_iter().filter(|bits| only == 0 || only == *bits) {
        for platform in &platforms {
            let packing = match arguments.get(7).map(String::as_str) {
                Some("stored") => Packing::Stored,
                _ => Packing::best(*platform, activations),
            };
            let layers = (0..LAYERS * PIECES)
                .map(|index| Layer::new(shapes[index % 2], [bits, 64], packing, index as u32))
                .collect::<Result<Vec<_>, _>>()?;
            let team = Team::new(&TeamOptions { threads, platform: *platform, activations })?;
            let bytes = layers[..LAYERS].iter().map(Layer::bytes).sum::<usize>() as f64 / 1e9;
            let pieces: Vec<_> = layers.chunks_exact(LAYERS).collect();
            for rows in ROWS.into_iter().filter(|rows| only_rows.is_none_or(|only| only == *rows)) {
                let held = if rows > MANY { 2 } else { PIECES };
                let (mut limits, mut speeds, mut shares) = (Vec::new(), Vec::new(), Vec::new());
                for index in 0..rounds * held {
                    // Of weights that no cache has any more.
                    let limit = [(memory::Read::Plain, 8), (memory::Read::Fetched, 16)]
                        .map(|(how, away)| read(&team, pieces[(index + away) % PIECES], how));
                    let limit = limit[0].min(limit[1]);
                    let spent = products(&team, pieces[index % held], [bits as u32, 64], rows);
                    limits.push(bytes / limit);
                    speeds.push(bytes / spent);
                    shares.push(limit / spent);
                }
                let (limit, speed, share) = (median(limits), median(speeds), median(shares));
                let weights = (LAYERS * shapes[0][0] * shapes[0][1] * rows) as f64 / 1e9;
                println!(
                    "| {bits} | {platform} | {rows} | {limit:.1} | {speed:.1} | {share:.2} | {:.0} |",
                    weights * speed / bytes
                );
            }
        }
    }
    Ok(())
}
