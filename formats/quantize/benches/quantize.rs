//! Nanoseconds a weight, on one thread, data in memory: everything `quantize` does (load, search,
//! rounding, packing, error sums). The floor is arithmetic: per trial and vector about 11
//! instructions with a fit and 8 without, two a cycle.
//!
//!   cargo bench -p shardpack-quantize --bench quantize -- [PLATFORM …] [only:TEXT]

#![expect(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::{hint::black_box, time::Instant};

use shardpack_quantize::{
    AffineFormat, Dtype, Platform, Rounding,
    affine::{QuantizeOptions, cast, error, narrow, quantize},
};

const WEIGHTS: usize = 1 << 21;
const COLUMNS: usize = 4096;
const ROUNDS: usize = 9;

/// Sums of twelve uniform numbers, close enough to Gaussian for timing.
fn weights() -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..WEIGHTS).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * 0.02).collect()
}

/// Whether lines with this text were asked for.
fn wanted(what: &str) -> bool {
    std::env::args().all(|name| name.strip_prefix("only:").is_none_or(|text| what.contains(text)))
}

fn report(platform: Platform, what: &str, bytes_per_weight: usize, mut work: impl FnMut()) {
    if !wanted(what) {
        return;
    }
    let rounds = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64() * 1e9 / WEIGHTS as f64
    });
    // The fastest: all that slows a round down comes from outside.
    let ns = rounds.fold(f64::INFINITY, f64::min);
    let rate = bytes_per_weight as f64 / ns;
    println!("| {platform} | {what} | {ns:.3} | {rate:.2} |");
}

fn conversions(platform: Platform, values: &[f32]) {
    for (from, to) in [
        (Dtype::BF16, Dtype::BF16),
        (Dtype::F16, Dtype::BF16),
        (Dtype::F32, Dtype::BF16),
        (Dtype::F32, Dtype::F16),
    ] {
        let mut source = vec![0; WEIGHTS * from.size_bytes()];
        narrow(platform, from, values, &mut source);
        let mut out = vec![0; WEIGHTS * to.size_bytes()];
        report(platform, &format!("cast {from} to {to}"), from.size_bytes(), || {
            cast(platform, (from, &source), (to, &mut out)).expect("the weights are finite");
            black_box(&out);
        });
    }
}

fn quantizers(platform: Platform, source: &[u8], dtype: Dtype, group_size: u32) {
    let importance: Vec<f32> = (0..COLUMNS).map(|column| 1.0 + (column % 7) as f32).collect();
    for bits in [2, 3, 4, 5, 6, 8] {
        let format = AffineFormat::new(bits, group_size).expect("a known format");
        let groups = WEIGHTS / group_size as usize;
        let mut packed = vec![0; groups * format.group_bytes()];
        let (mut scales, mut biases) = (vec![0; groups * 2], vec![0; groups * 2]);
        let mut run = |rounding, importance: Option<&[f32]>, what: &str| {
            let store = Dtype::BF16;
            let options = QuantizeOptions { format, rounding, store, importance, platform };
            let what = format!("{rounding}{what}, {bits} bits, group {group_size}, {dtype}");
            report(platform, &what, dtype.size_bytes(), || {
                let outputs = (&mut packed[..], &mut scales[..], &mut biases[..]);
                black_box(quantize(&options, (dtype, source), outputs))
                    .expect("the weights are finite");
            });
        };
        run(Rounding::MlxCpu, None, "");
        if bits == 4 {
            run(Rounding::MlxMetal, None, "");
        }
        run(Rounding::Refined, None, "");
        if bits == 4 {
            run(Rounding::Refined, Some(&importance), " with importance");
            let what = format!("error alone, {bits} bits, group {group_size}, {dtype}");
            report(platform, &what, dtype.size_bytes(), || {
                let parts = (&packed[..], &scales[..], &biases[..]);
                black_box(error(platform, format, (dtype, source), Dtype::BF16, parts));
            });
        }
    }
}

fn main() {
    let chosen: Vec<Platform> = std::env::args().filter_map(|name| name.parse().ok()).collect();
    let platforms = if chosen.is_empty() { Platform::available_for_quantizing() } else { chosen };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("one thread");
    let values = weights();
    println!("| platform | work | ns/weight | GB/s of source |\n|---|---|---|---|");
    pool.install(|| {
        for platform in platforms {
            conversions(platform, &values);
            let source = |dtype: Dtype| {
                let mut bytes = vec![0; WEIGHTS * dtype.size_bytes()];
                narrow(platform, dtype, &values, &mut bytes);
                bytes
            };
            for group_size in [64, 32, 128] {
                quantizers(platform, &source(Dtype::BF16), Dtype::BF16, group_size);
            }
            quantizers(platform, &source(Dtype::F32), Dtype::F32, 64);
        }
    });
}
