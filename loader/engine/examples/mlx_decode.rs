//! Decode speed of one package on MLX, as the engine steps it:
//! `cargo run --release -p shardpack-engine --example mlx_decode -- RUNTIME PACKAGE [TOKENS] [SEQUENCES]`.
//!
//! Prompts of eight tokens, then so many steps; the first two are left out of the figure.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, path::Path, time::Instant};

use shardpack_engine::{
    backend::{Collectives, Mlx},
    engine::{Engine, EngineOptions, RankEngine, StepOutcome, memory_group},
    loading::{OpenOptions, Package},
    model::Model,
};
use shardpack_engine_api::{GenerateRequest, RequestId, TokenId};
use shardpack_kernels::Packing;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [runtime, package, numbers @ ..] = arguments.as_slice() else {
        return Err("expected RUNTIME PACKAGE [TOKENS] [SEQUENCES]".into());
    };
    let number =
        |place: usize, default: u32| numbers.get(place).map_or(Ok(default), |it| it.parse());
    let (tokens, sequences) = (number(0, 16)?, number(1, 1)?);
    let options = OpenOptions { threads: 2, packing: Packing::Stored };
    let package = Package::open(Path::new(package), &options, &|_| {})?;
    let backend = Mlx::open(Path::new(runtime), None, Collectives::Own, [0, 1])?;
    let model = Model::load(&package, &backend)?;
    let mut engine = Engine::new(model, backend, EngineOptions::STANDARD);
    let group = memory_group(1)?.remove(0);
    for id in 0..sequences {
        let prompt = (1..9).map(|place| TokenId(place + id)).collect();
        engine.submit(RequestId(u64::from(id)), GenerateRequest::greedy(prompt, tokens + 3));
    }
    let mut ends = Vec::new();
    while engine.lead(group.as_ref(), &mut |_| {})? != StepOutcome::Idle {
        ends.push(Instant::now());
    }
    let steps = &ends[2..];
    let seconds = (steps[steps.len() - 1] - steps[0]).as_secs_f64();
    let each = (steps.len() - 1) as f64;
    println!(
        "{:.3} steps/s, {:.3} tokens/s",
        each / seconds,
        each * f64::from(sequences) / seconds
    );
    Ok(())
}
