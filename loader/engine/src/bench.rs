//! Benchmark of a package set: prefill and decode speed for prompts and answers of given lengths, at
//! several batch sizes, with random tokens.

mod all_reduce;
mod drafts;

pub use all_reduce::{AllReduceTimes, all_reduce_in_graph};
pub use drafts::{AnswerKind, DraftSpeed, bench_drafts};

use std::{
    collections::BTreeSet,
    hint::black_box,
    io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use memmap2::MmapMut;
use serde::Serialize;
use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_engine_api::{Event, GenerateRequest, RequestId, TokenId};
use shardpack_kernels::{
    Activations, Team, TeamOptions,
    memory::{self, Read},
};
use shardpack_quantize::Platform;

use crate::{
    backend::Cpu,
    engine::{CountedGroup, Counts, Engine, RankEngine, StepOutcome},
};

/// One measurement to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of each prompt.
    pub context: usize,
    /// Requests at a time.
    pub batch: usize,
    /// Tokens generated for each after the first.
    pub generate: usize,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens of each prompt.
    pub context: usize,
    /// Requests at a time.
    pub batch: usize,
    /// Prompt tokens per second, all requests together.
    pub prefill_tokens_per_second: f64,
    /// Until the first of the requests has its first token.
    pub first_token_seconds: f64,
    /// Generated tokens per second, all requests together.
    pub decode_tokens_per_second: f64,
    /// Median of a step in which all requests get a token.
    pub step_seconds: f64,
    /// All-reduces in such a step.
    pub sums_per_step: f64,
    /// All-gathers in such a step.
    pub gathers_per_step: f64,
    /// Hidden states that rank 0 sends to the next pipeline stage in such a step.
    pub passes_per_step: f64,
    /// Time in all of them and in the plan's broadcast, waiting for other ranks included.
    pub communication_seconds: f64,
}

/// A measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The ranks.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The engine would not or could not run the request.
    #[error("the engine failed: {0}")]
    Request(String),
    /// There was no step to measure.
    #[error(
        "the first of {} requests had ended before the last had its first token: generate more \
         than {} tokens", load.batch, load.generate
    )]
    Apart {
        /// What was to be measured.
        load: Workload,
    },
}

/// Runs each load in turn on the engines of one group, rank 0's first, and returns what `note`
/// has heard one by one.
pub fn bench(
    engines: &mut [Engine<Cpu>],
    groups: &[Arc<dyn Group>],
    loads: &[Workload],
    note: &mut dyn FnMut(&Speed),
) -> Result<Vec<Speed>, BenchError> {
    let (leader, followers) = engines.split_first_mut().expect("a group has at least one rank");
    thread::scope(|scope| {
        for (engine, group) in followers.iter_mut().zip(&groups[1..]) {
            // It ends with the group, whose error the leader sees too.
            scope.spawn(move || while engine.follow(group.as_ref()).is_ok() {});
        }
        let group = CountedGroup::new(groups[0].as_ref());
        let mut next_id = 0;
        let speeds = loads
            .iter()
            .map(|load| {
                let speed = run(leader, &group, *load, &mut next_id)?;
                note(&speed);
                Ok(speed)
            })
            .collect();
        group.abort("the measurement is over");
        speeds
    })
}

fn run(
    leader: &mut Engine<Cpu>,
    group: &CountedGroup<'_>,
    load: Workload,
    next_id: &mut u64,
) -> Result<Speed, BenchError> {
    let vocab = u64::from(leader.model().spec().vocab_size);
    for _ in 0..load.batch {
        *next_id += 1;
        let token = |index: usize| {
            let mixed = (*next_id << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            TokenId(((mixed >> 33) % vocab) as u32)
        };
        // Another prompt each time, so that none is found in the prefix cache.
        let prompt = (0..load.context).map(token).collect();
        let request = GenerateRequest::greedy(prompt, load.generate as u32 + 1);
        leader.submit(RequestId(*next_id), request);
    }
    let start = Instant::now();
    let (mut first, mut all) = (None, None);
    let mut answered = BTreeSet::new();
    let mut failure = None;
    let mut steps = Vec::new();
    let mut counts = Vec::new();
    loop {
        let (before, decoding) = (Instant::now(), all.is_some());
        let mut tokens = 0;
        group.observer().take();
        let outcome = leader.lead(group, &mut |event| match event {
            Event::Token { request, .. } => {
                tokens += 1;
                answered.insert(request);
            }
            Event::Finished { .. } | Event::PromptLogprobs { .. } | Event::Embedding { .. } => {}
            Event::Failed { message, .. } => failure = Some(message),
        })?;
        if let Some(message) = failure {
            return Err(BenchError::Request(message));
        }
        if outcome == StepOutcome::Idle {
            break;
        }
        if decoding && tokens == load.batch {
            steps.push(before.elapsed());
            counts.push(group.observer().take());
        }
        if !decoding {
            if tokens > 0 {
                first.get_or_insert_with(|| start.elapsed());
            }
            if answered.len() == load.batch {
                all = Some(start.elapsed());
            }
        }
    }
    if steps.is_empty() {
        return Err(BenchError::Apart { load });
    }
    let seconds = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64();
    let time: Duration = steps.iter().sum();
    let each = |sum: f64| sum / counts.len() as f64;
    let communication: Duration = counts.iter().map(Counts::time).sum();
    Ok(Speed {
        context: load.context,
        batch: load.batch,
        prefill_tokens_per_second: (load.context * load.batch) as f64 / seconds(all),
        first_token_seconds: seconds(first),
        decode_tokens_per_second: (steps.len() * load.batch) as f64 / time.as_secs_f64(),
        step_seconds: median(&mut steps).as_secs_f64(),
        sums_per_step: each(counts.iter().map(|it| it.all_reduces.count as f64).sum()),
        gathers_per_step: each(counts.iter().map(|it| it.all_gathers.count as f64).sum()),
        passes_per_step: each(counts.iter().map(|it| it.transfers.count as f64).sum()),
        communication_seconds: each(communication.as_secs_f64()),
    })
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Median latency of an all-reduce of `len` floats.
pub fn all_reduce_latency(groups: &[Arc<dyn Group>], len: usize) -> Result<Duration, GroupError> {
    /// Enough for a median that stays.
    const ROUNDS: usize = 2000;
    let sum = |group: &Arc<dyn Group>| {
        let mut values = vec![0.0; len];
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let start = Instant::now();
            group.all_reduce_sum(&mut values, Deadline::after(Duration::from_secs(20)))?;
            times.push(start.elapsed());
        }
        Ok(median(&mut times))
    };
    thread::scope(|scope| {
        let others: Vec<_> =
            groups[1..].iter().map(|group| scope.spawn(move || sum(group).map(drop))).collect();
        let mine = sum(&groups[0])?;
        for other in others {
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(mine)
    })
}

/// Bytes per second at which so many threads read memory: the best of some passes over more than
/// any cache holds, on large pages, as weights lie, and with each of the ways that kernels read.
pub fn read_bandwidth(threads: usize) -> io::Result<f64> {
    const BYTES: usize = 512 << 20;
    const PASSES: usize = 8;
    let mut bytes = MmapMut::map_anon(BYTES)?;
    #[cfg(target_os = "linux")]
    {
        // A system without them gives small pages.
        let _ = bytes.advise(memmap2::Advice::HugePage);
    }
    // Memory that was never written is one page of zeros, again and again.
    bytes.fill(1);
    let options =
        TeamOptions { threads, platform: Platform::detect(), activations: Activations::F32 };
    let pass = |number: usize| {
        let how = if number.is_multiple_of(2) { Read::Plain } else { Read::Fetched };
        let start = Instant::now();
        black_box(memory::read(&bytes, how));
        BYTES as f64 / start.elapsed().as_secs_f64()
    };
    Ok(Team::new(&options)?.run(|| (0..PASSES).map(pass).fold(0.0, f64::max)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{EngineOptions, memory_group},
        loading::Package,
        model::Model,
        testing::package::Recipe,
    };

    /// Two ranks with a small model.
    pub(super) fn engines() -> Vec<Engine<Cpu>> {
        let recipe = Recipe { embedding_sharded: false, ..Recipe::plain("llama", 2) };
        let engine = |package: &Package| {
            let backend = Cpu::new(1).unwrap();
            let model = Model::load(package, &backend).unwrap();
            Engine::new(model, backend, EngineOptions::STANDARD)
        };
        recipe.open().iter().map(engine).collect()
    }

    #[test]
    fn every_load_is_run_and_its_messages_are_counted() {
        let mut engines = engines();
        let layers = engines[0].model().spec().layers.len();
        let groups = memory_group(2).unwrap();
        let load = |context, batch| Workload { context, batch, generate: 3 };
        let mut heard = Vec::new();
        let mut note = |speed: &Speed| heard.push((speed.context, speed.batch));
        let speeds = bench(&mut engines, &groups, &[load(5, 1), load(9, 3)], &mut note).unwrap();
        assert_eq!(heard, [(5, 1), (9, 3)]);
        for speed in speeds {
            assert!(speed.prefill_tokens_per_second > 0.0 && speed.decode_tokens_per_second > 0.0);
            assert!(speed.first_token_seconds > 0.0 && speed.step_seconds > 0.0, "{speed:?}");
            assert!((speed.sums_per_step - (2 * layers) as f64).abs() < 1e-9, "{speed:?}");
            assert!((speed.gathers_per_step - 1.0).abs() < 1e-9, "{speed:?}");
        }
        let groups = memory_group(2).unwrap();
        assert!(all_reduce_latency(&groups, 64).unwrap() > Duration::ZERO);
    }
}
