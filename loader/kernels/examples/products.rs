//! Products in f32 with bf16 weights, and second moments (half of each square), as calibration and models of 16 bits compute them:
//! `cargo run --release -p shardpack-kernels --example products -- [THREADS] [ROWS] [PLATFORM]`.
//! The best of some calls each; the limit is two vectors of fused operations a cycle on most processors.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, hint::black_box, time::Instant};

use shardpack_kernels::{
    Activations, Floats, Matrix, Team, TeamOptions, add_second_moments, matmul,
};
use shardpack_quantize::Platform;

/// A layer's matrices, `[outputs, inputs]`.
const SHAPES: [[usize; 2]; 4] = [[256, 2048], [2048, 2048], [5632, 2048], [2048, 5632]];

/// Seconds in which calls are repeated.
const SECONDS: f64 = 0.5;

/// Seconds of the shortest call.
fn shortest(mut work: impl FnMut()) -> f64 {
    let begun = Instant::now();
    let mut best = f64::INFINITY;
    while begun.elapsed().as_secs_f64() < SECONDS {
        let call = Instant::now();
        work();
        best = best.min(call.elapsed().as_secs_f64());
    }
    best
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, only): (usize, usize) = (number(0, 2)?, number(1, 0)?);
    let wanted = |platform: &Platform| match arguments.get(2) {
        Some(name) => platform.name() == name,
        None => *platform != Platform::Portable,
    };
    println!(
        "| platform | outputs | inputs | rows | GFLOP/s | GB/s of weights |\n|---|---|---|---|---|---|"
    );
    for platform in Platform::available().into_iter().filter(wanted) {
        let options = TeamOptions { threads, platform, activations: Activations::F32 };
        let team = Team::new(&options)?;
        for inputs in [2048, 5632].into_iter().filter(|_| only == 0 || only == 512) {
            let (x, mut sums) = (vec![0.37; 512 * inputs], vec![0.0; inputs * inputs]);
            let add = || shortest(|| add_second_moments(&x, inputs, inputs, black_box(&mut sums)));
            let speed = (512 * inputs * inputs) as f64 / team.run(add) / 1e9;
            println!("| {platform} | moments | {inputs} | 512 | {speed:.0} | |");
        }
        for [outputs, inputs] in SHAPES {
            let bits: Vec<u16> =
                (0..outputs * inputs).map(|i| 0x3c00 + (i * 31 % 97) as u16).collect();
            let matrix = Matrix::plain(outputs, inputs, Floats::BF16(&bits));
            for rows in [1, 4, 8, 16, 24, 32, 64, 96, 128, 512, 2048]
                .into_iter()
                .filter(|it| only == 0 || only == *it)
            {
                let (x, mut out) = (vec![0.37; rows * inputs], vec![0.0; rows * outputs]);
                let spent = team.run(|| shortest(|| matmul(&x, &matrix, black_box(&mut out))));
                let products = (rows * outputs * inputs) as f64;
                println!(
                    "| {platform} | {outputs} | {inputs} | {rows} | {:.0} | {:.1} |",
                    2.0 * products / spent / 1e9,
                    2.0 * products / rows as f64 / spent / 1e9
                );
            }
        }
    }
    Ok(())
}
