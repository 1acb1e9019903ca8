//! Tokens per second of a package set on the `cpu` backend, and the machine's read limit beside
//! it: `cargo run --release -p shardpack-loader --example speed -- SET [THREADS]`.
//!
//! The limit of decoding: every weight is read from memory once a token, so tokens per second
//! times the weights' bytes stays below what the threads can read.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, path::Path, time::Instant};

use shardpack_kernels::{Activations, Platform, Team, TeamOptions, memory};
use shardpack_loader::{
    engine::{LocalModel, TokenId, memory_group},
    open::{OpenOptions, Package},
};

const PROMPT: usize = 256;
const STEPS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let set = arguments.first().ok_or("expected a package set")?;
    let threads = arguments.get(1).map_or(Ok(2), |text| text.parse())?;
    let folder = Path::new(set).join("node-0");
    let package = Package::open(&folder, &OpenOptions { threads }, &|_| {})?;
    let opened = package.report().gigabytes_per_second();
    let packages = [package];
    let model = LocalModel::load(&packages, &memory_group(1)?, threads)?;
    let [package] = &packages;
    // Of the embedding one row is read a token, unless it is the head too.
    let skipped =
        |name: &str| name.starts_with("model.embed_tokens") && !model.spec().tied_embeddings;
    let manifest = package.manifest();
    let weights = manifest.tensors.iter().filter(|tensor| !skipped(&tensor.name));
    let bytes: u64 = weights.clone().map(|tensor| tensor.size).sum();
    let held: Vec<&[u8]> = weights
        .filter_map(|tensor| package.tensor(&tensor.name))
        .map(shardpack_loader::open::PackageTensor::bytes)
        .collect();
    let tokens = |first: usize, count: usize| -> Vec<TokenId> {
        (first..first + count).map(|index| TokenId(((index * 7919 + 5) % 500) as u32)).collect()
    };
    let limit = read_limit(threads, &held, bytes);
    let mut sequence = model.sequence(PROMPT);
    let begun = Instant::now();
    model.extend(&mut sequence, &tokens(0, PROMPT), PROMPT - 1)?;
    let prefill = PROMPT as f64 / begun.elapsed().as_secs_f64();
    let mut sequence = model.sequence(8 + STEPS);
    model.extend(&mut sequence, &tokens(0, 8), 7)?;
    let begun = Instant::now();
    for step in 0..STEPS {
        model.extend(&mut sequence, &tokens(8 + step, 1), 0)?;
    }
    let steps = STEPS as f64 / begun.elapsed().as_secs_f64();
    let limit = limit.max(read_limit(threads, &held, bytes));
    println!(
        "{{\"prefill\": {prefill:.2}, \"decode\": {steps:.3}, \"read_gb_s\": {:.3}, \
         \"read_limit_gb_s\": {limit:.3}, \"open_gb_s\": {opened:.3}}}",
        steps * bytes as f64 / 1e9,
    );
    Ok(())
}

/// 10⁹ bytes per second of the fastest plain read of the weights.
fn read_limit(threads: usize, held: &[&[u8]], bytes: u64) -> f64 {
    let options =
        TeamOptions { threads, platform: Platform::detect(), activations: Activations::Int8 };
    let Ok(team) = Team::new(&options) else { return 0.0 };
    team.run(|| {
        (0..6)
            .map(|round| {
                let how = if round % 2 == 0 { memory::Read::Plain } else { memory::Read::Fetched };
                let begun = Instant::now();
                for part in held {
                    std::hint::black_box(memory::read(part, how));
                }
                bytes as f64 / 1e9 / begun.elapsed().as_secs_f64()
            })
            .fold(0.0, f64::max)
    })
}
