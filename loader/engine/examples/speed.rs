//! Tokens per second of a package set on the `cpu` backend, and the machine's read limit beside
//! it: `cargo run --release -p shardpack-engine --example speed -- SET [THREADS]`.
//!
//! The limit of decoding: every weight is read from memory once a token, so tokens per second
//! times the weights' bytes stays below what the threads can read. Both are taken in turns, some
//! steps and a plain read of the same bytes, since the speed of memory drifts with what else the
//! machine does; both are averages.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    env,
    error::Error,
    path::Path,
    time::{Duration, Instant},
};

use shardpack_engine::{
    engine::{LocalModel, memory_group},
    loading::{OpenOptions, Package},
};
use shardpack_engine_api::TokenId;
use shardpack_kernels::{Activations, Team, TeamOptions, memory};
use shardpack_quantize::Platform;

const PROMPT: usize = 256;
const STEPS: usize = 32;
/// Steps between two plain reads of all weights.
const STEPS_AT_ONCE: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let set = arguments.first().ok_or("expected a package set")?;
    let threads = arguments.get(1).map_or(Ok(2), |text| text.parse())?;
    let folder = Path::new(set).join("node-0");
    let package = Package::open(&folder, &OpenOptions::fast(threads), &|_| {})?;
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
        .map(shardpack_engine::loading::PackageTensor::bytes)
        .collect();
    let tokens = |first: usize, count: usize| -> Vec<TokenId> {
        (first..first + count).map(|index| TokenId(((index * 7919 + 5) % 500) as u32)).collect()
    };
    let mut sequence = model.sequence(PROMPT);
    let begun = Instant::now();
    model.extend(&mut sequence, &tokens(0, PROMPT), PROMPT - 1)?;
    let prefill = PROMPT as f64 / begun.elapsed().as_secs_f64();
    let options =
        TeamOptions { threads, platform: Platform::detect(), activations: Activations::Int8 };
    let readers = Team::new(&options)?;
    let mut sequence = model.sequence(8 + 2 * STEPS);
    model.extend(&mut sequence, &tokens(0, 8), 7)?;
    let mut decoding = Duration::ZERO;
    let mut reading = [Duration::ZERO; 2];
    let mut next = 8;
    let mut step = |sequence: &mut _| {
        next += 1;
        model.extend(sequence, &tokens(next - 1, 1), 0).map(drop)
    };
    for _ in (0..STEPS).step_by(STEPS_AT_ONCE) {
        // Not counted: its threads wake, while those that have read fall asleep.
        step(&mut sequence)?;
        let begun = Instant::now();
        for _ in 0..STEPS_AT_ONCE {
            step(&mut sequence)?;
        }
        decoding += begun.elapsed();
        for (how, spent) in [memory::Read::Plain, memory::Read::Fetched].iter().zip(&mut reading) {
            *spent += read(&readers, &held, *how);
        }
    }
    let steps = STEPS as f64 / decoding.as_secs_f64();
    let passes = (STEPS / STEPS_AT_ONCE) as f64;
    let limit = passes * bytes as f64 / 1e9 / reading[0].min(reading[1]).as_secs_f64();
    println!(
        "{{\"prefill\": {prefill:.2}, \"decode\": {steps:.3}, \"read_gb_s\": {:.3}, \
         \"read_limit_gb_s\": {limit:.3}, \"open_gb_s\": {opened:.3}}}",
        steps * bytes as f64 / 1e9,
    );
    Ok(())
}

/// Time of a plain read of the weights.
fn read(readers: &Team, held: &[&[u8]], how: memory::Read) -> Duration {
    readers.run(|| {
        let begun = Instant::now();
        std::hint::black_box(memory::read_all(held, how));
        begun.elapsed()
    })
}
