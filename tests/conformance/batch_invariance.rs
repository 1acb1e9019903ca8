//! Batch invariance: the tokens of a sequence do not depend on the other sequences of its batch, on
//! the chunks of its prompt, on a hit in the prefix cache, or on the number of threads.

use std::{sync::Arc, thread};

use serde_json::json;
use shardpack_collectives::Group;
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::{Arithmetic, Cpu, CpuOptions},
    engine::{Engine, EngineOptions, LocalModel, RankEngine, StepOutcome, memory_group},
    loading::Package,
    model::Model,
};
use shardpack_engine_api::{Event, GenerateRequest, RequestId, TokenId};
use shardpack_formats::memory::KvType;
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{changed, expected, open, write},
};

/// A reference model gives the same bits in chunks of any length, on any number of threads, with every
/// type of KV cache.
pub(crate) fn check_chunking_invariance(model: &str) {
    let folder = tempdir().unwrap();
    let tokens = expected(model, "tokens_b");
    for (bits, nodes) in [(16, 1), (4, 2)] {
        let set = folder.path().join(format!("{bits}"));
        write(&data("models").join(model), &set, bits, nodes, ExpertSharding::Inside);
        let packages = open(&set, nodes);
        for kv in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8] {
            let whole = in_steps(&packages, &tokens, &[tokens.len()], (1, kv));
            for (steps, threads) in [(&[1][..], 1), (&[5], 2), (&[17], 1), (&[30, 1], 1)] {
                let found = in_steps(&packages, &tokens, steps, (threads, kv));
                assert!(found == whole, "{model}, {bits} bits, {kv:?}, steps of {steps:?}");
            }
        }
    }
}

pub(crate) fn backends(ranks: u32, threads: usize, kv: KvType) -> Vec<Cpu> {
    let options = CpuOptions { threads, platform: None, arithmetic: Arithmetic::Fast };
    (0..ranks).map(|_| Cpu::with_options(&options).unwrap().with_kv(kv)).collect()
}

/// Bits of all logits of a sequence that is computed in steps of these lengths, the last one again
/// and again.
pub(crate) fn in_steps(
    packages: &[Package],
    tokens: &[TokenId],
    steps: &[usize],
    (threads, kv): (usize, KvType),
) -> Vec<u32> {
    let ranks = packages.len() as u32;
    let groups = memory_group(ranks).unwrap();
    let model = LocalModel::over(packages, &groups, backends(ranks, threads, kv)).unwrap();
    let mut sequence = model.sequence(tokens.len());
    let (mut logits, mut rest) = (Vec::new(), tokens);
    let last = *steps.last().unwrap();
    for step in steps.iter().copied().chain(std::iter::repeat(last)) {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at(step.min(rest.len()));
        logits.extend(model.extend(&mut sequence, now, 0).unwrap());
        rest = later;
    }
    logits.into_iter().map(f32::to_bits).collect()
}

/// Answers to requests that are run together, one engine for each package.
fn answers(
    packages: &[Package],
    rounds: &[&[Vec<TokenId>]],
    options: EngineOptions,
) -> Vec<Vec<(Vec<u32>, u32)>> {
    let mut engines: Vec<Engine<Cpu>> = packages
        .iter()
        .map(|package| {
            let backend = Cpu::new(1).unwrap();
            Engine::new(Model::load(package, &backend).unwrap(), backend, options)
        })
        .collect();
    let mut groups: Vec<Arc<dyn Group>> = memory_group(packages.len() as u32).unwrap();
    thread::scope(|scope| {
        let (mut leader, group) = (engines.remove(0), groups.remove(0));
        for (engine, group) in engines.iter_mut().zip(groups) {
            scope.spawn(move || while engine.follow(group.as_ref()).is_ok() {});
        }
        let mut next = 0;
        let all = rounds.iter().map(|prompts| {
            let first = next;
            for prompt in *prompts {
                leader.submit(RequestId(next), GenerateRequest::greedy(prompt.clone(), 12));
                next += 1;
            }
            let mut found = vec![(Vec::new(), 0); prompts.len()];
            loop {
                let led = leader.lead(group.as_ref(), &mut |event| {
                    let place = &mut found[(event.request().0 - first) as usize];
                    match event {
                        Event::Token { token, .. } => place.0.push(token.0),
                        Event::Finished { usage, .. } => place.1 = usage.cached_tokens,
                        other => panic!("{other:?}"),
                    }
                });
                if led.unwrap() == StepOutcome::Idle {
                    break found;
                }
            }
        });
        let all = all.collect();
        group.abort("done");
        all
    })
}

/// Eight prompts alone, in one batch and after one another, on one, two and five ranks. `cached` are
/// the tokens that a long prompt finds in the prefix cache: at first, again, and after another one
/// with the same beginning.
pub(crate) fn check_batch_invariance(model: &str, cached: [u32; 3]) {
    let folder = tempdir().unwrap();
    let source = folder.path().join(model);
    changed(model, &source, &json!({"max_position_embeddings": 1024}), "?");
    let prompt = |seed: u32, length: u32| -> Vec<TokenId> {
        (0..length).map(|at| TokenId(3 + (at * at + seed * 7 + at / 3) % 61)).collect()
    };
    let long = prompt(0, 530);
    let begins_alike = [&long[..400], &prompt(9, 60)[..]].concat();
    let mut eight: Vec<_> = (1..7).map(|it| prompt(it, it * 11)).collect();
    eight.extend([long, begins_alike]);
    let chunks = |prefill_tokens| EngineOptions {
        prefill_tokens,
        chunked_prefill_tokens: prefill_tokens.min(64),
        ..EngineOptions::STANDARD
    };
    // On five ranks one at least has no heads.
    for nodes in [1, 2, 5] {
        let set = folder.path().join(format!("{model}-{nodes}"));
        write(&source, &set, 16, nodes, ExpertSharding::Inside);
        let packages = open(&set, nodes);
        let alone = |prompt| {
            let prompt = std::slice::from_ref(prompt);
            answers(&packages, &[prompt], chunks(512)).remove(0).remove(0).0
        };
        let cold: Vec<_> = eight.iter().map(alone).collect();
        assert!(cold.iter().all(|tokens| tokens.len() == 12), "{model}: {cold:?}");
        let together = answers(&packages, &[&eight], chunks(100)).remove(0);
        let tokens: Vec<_> = together.into_iter().map(|(tokens, _)| tokens).collect();
        assert_eq!(tokens, cold, "{model}, {nodes} nodes: eight together");
        let rounds = [&eight[6..7], &eight[6..7], &eight[7..]];
        let again = answers(&packages, &rounds, chunks(512));
        let found: Vec<u32> = again.iter().map(|round| round[0].1).collect();
        assert_eq!(found, cached, "{model}, {nodes} nodes");
        assert_eq!(again[1][0].0, cold[6], "{model}, {nodes} nodes: with pages of the first");
        assert_eq!(again[2][0].0, cold[7], "{model}, {nodes} nodes: with pages of another");
    }
}

#[test]
fn batch_chunking_and_prefix_cache_change_no_token() {
    for model in ["gemma4_text", "gemma4_moe", "llama4_text", "mimo_v2_flash", "phimoe", "laguna"] {
        check_batch_invariance(model, [0, 512, 256]);
    }
    // States are sums over all tokens, of which pages hold nothing.
    check_batch_invariance("nemotron_h", [0, 0, 0]);
}

#[test]
fn chunking_and_threads_change_no_logit_bit() {
    let folder = tempdir().unwrap();
    let tokens: Vec<_> = (0..90).map(|at| TokenId(3 + (at * at + at / 3) % 61)).collect();
    for model in ["gemma4_text", "gemma4_moe", "llama4_text", "nemotron_h", "apertus", "nanochat"] {
        for (bits, nodes) in [(16, 1), (4, 2)] {
            let set = folder.path().join(format!("{model}-{bits}"));
            write(&data("models").join(model), &set, bits, nodes, ExpertSharding::Inside);
            let packages = open(&set, nodes);
            for kv in [KvType::F32, KvType::Q8] {
                let whole = in_steps(&packages, &tokens, &[tokens.len()], (1, kv));
                for (steps, threads) in [(&[1][..], 1), (&[5], 2), (&[30, 1], 1)] {
                    let found = in_steps(&packages, &tokens, steps, (threads, kv));
                    assert!(found == whole, "{model}, {bits} bits, {kv:?}, steps of {steps:?}");
                }
            }
        }
    }
}
