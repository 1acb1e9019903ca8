//! Pipeline stages compute the same bits as the model without them.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use serde_json::Value;
use shardpack_collectives::{Group, GroupError};
use shardpack_converter::{ConvertOptions, Plan, Source, convert as convert_source};
use shardpack_engine::{
    backend::Cpu,
    engine::{Engine, EngineOptions, RankEngine, logits, memory_group},
    loading::Package,
    model::Model,
};
use shardpack_engine_api::{Event, GenerateRequest, RequestId, TokenId};
use shardpack_manifests::TensorShard;
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{all_models, join, open},
};

/// Writes a reference model for so many nodes in so many stages.
fn write(model: &str, output: &Path, bits: u32, [nodes, stages]: [u32; 2]) {
    let source = Source::open(&data("models").join(model)).unwrap();
    let options = ConvertOptions {
        bits,
        stages,
        rounding: "mlx-cpu".to_owned(),
        ..ConvertOptions::new(output.to_owned(), nodes)
    };
    let plan = Plan::new(&source, options).unwrap_or_else(|error| panic!("{model}: {error}"));
    convert_source(&source, &plan, &|_| ()).unwrap();
}

/// Bits of the logits after each of some tokens.
fn compute(packages: &[Package]) -> Vec<u32> {
    let vocabulary = packages[0].manifest().architecture.vocab_size;
    let tokens: Vec<TokenId> = (0..23).map(|index| TokenId(index * 7919 % vocabulary)).collect();
    let groups = memory_group(packages.len() as u32).unwrap();
    let values = logits(packages, &groups, &tokens, 1).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Every rank holds its own layers and no others, and what stands at the ends where it belongs.
fn check_places(packages: &[Package]) {
    let first = packages[0].manifest();
    let (layout, tied) = (&first.layout, first.architecture.tied_embeddings);
    let last = layout.stage_count() - 1;
    for package in packages {
        let manifest = package.manifest();
        let features = first.architecture.features();
        assert_eq!(manifest.requires, [&["stages"], &features[..]].concat());
        let stage = layout.stage_of(manifest.rank);
        let [start, end] = layout.stages[stage].layers;
        assert!(start < end);
        for tensor in &manifest.tensors {
            let of_layer = tensor.name.strip_prefix("model.layers.");
            let layer = of_layer.map(|rest| rest.split_once('.').unwrap().0.parse().unwrap());
            let here = match layer {
                Some(layer) => (start..end).contains(&layer),
                None if tensor.name.contains("embed_tokens") => {
                    stage == 0 || (stage == last && tied)
                }
                None => stage == last,
            };
            assert!(here, "{} on rank {}", tensor.name, manifest.rank);
            let leads = layout.stage_ranks(stage).start == manifest.rank;
            assert!(tensor.shard != TensorShard::Once || leads, "{} is added once", tensor.name);
        }
    }
}

/// A staged set computes the bits of the set without stages whose rank group is a stage's, and
/// put together it is the one-node package.
fn check_model(model: &str, bits: u32, [nodes, stages]: [u32; 2]) {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write(model, &at("plain"), bits, [nodes / stages, 1]);
    write(model, &at("staged"), bits, [nodes, stages]);
    let staged = open(&at("staged"), nodes);
    let what = || format!("{model} at {bits} bits, {nodes} nodes in {stages} stages");
    check_places(&staged);
    assert!(compute(&staged) == compute(&open(&at("plain"), nodes / stages)), "{}", what());
    let one = if nodes == stages { at("plain") } else { at("one") };
    if nodes != stages {
        write(model, &one, bits, [1, 1]);
    }
    assert!(join(&at("staged"), nodes) == join(&one, 1), "{}", what());
    let ids = |set: &Path| {
        let set: Value = serde_json::from_slice(&fs::read(set.join("set.json")).unwrap()).unwrap();
        set["ids"].clone()
    };
    let (ids, plain) = (ids(&at("staged")), ids(&at("plain")));
    assert_eq!([&ids["weights"], &ids["model"]], [&plain["weights"], &plain["model"]]);
    assert_ne!(ids["layout"], plain["layout"], "{}", what());
}

#[test]
fn every_family_computes_the_same_bits_in_two_stages() {
    // One model has one layer.
    for model in all_models().into_iter().filter(|model| model != "falcon_h1_norm") {
        check_model(&model, 16, [2, 2]);
    }
}

#[test]
fn stages_of_several_ranks_compute_the_bits_of_one_stage() {
    for model in ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next", "olmo2"] {
        check_model(model, 16, [4, 2]);
        check_model(model, 16, [3, 3]);
    }
    // Quantized weights and activations are rounded alike too.
    check_model("llama-tied", 4, [4, 2]);
    check_model("gpt_oss", 8, [6, 2]);
}

/// A rank's engine over its package.
fn engine(package: &Package) -> Engine<Cpu> {
    let backend = Cpu::new(1).unwrap();
    // No rank is too slow for another.
    let never = Duration::from_hours(1000);
    let options = EngineOptions {
        collective_timeout: never,
        heartbeat_timeout: never,
        ..EngineOptions::STANDARD
    };
    Engine::new(Model::load(package, &backend).unwrap(), backend, options)
}

#[test]
fn a_rank_lost_in_another_stage_ends_the_step_at_once() {
    let folder = tempdir().unwrap();
    for lost in [1, 2] {
        let set = folder.path().join(format!("set-{lost}"));
        write("llama", &set, 16, [3, 3]);
        let packages = open(&set, 3);
        let mut engines: Vec<Engine<Cpu>> = packages.iter().map(engine).collect();
        let mut groups: Vec<Option<Arc<dyn Group>>> =
            memory_group(3).unwrap().into_iter().map(Some).collect();
        thread::scope(|scope| {
            let mut leader = engines.remove(0);
            for (engine, rank) in engines.iter_mut().zip(1..) {
                let group = groups[rank].take().unwrap();
                // The one that is lost leaves after some steps, its links with it.
                let steps = if rank == lost { 4 } else { usize::MAX };
                scope.spawn(move || (0..steps).all(|_| engine.follow(group.as_ref()).is_ok()));
            }
            leader.submit(RequestId(1), GenerateRequest::greedy(vec![TokenId(5); 3], 100));
            let mut tokens = 0;
            let error = loop {
                let group = groups[0].as_deref().unwrap();
                let led = leader.lead(group, &mut |event| {
                    tokens += u32::from(matches!(event, Event::Token { .. }));
                });
                if let Err(error) = led {
                    break error;
                }
            };
            assert!(tokens >= 2, "{tokens} tokens before the loss");
            // By its end, and not by the deadline of a step.
            let GroupError::Lost { rank, .. } = error else { panic!("{error}") };
            assert_eq!(rank as usize, lost);
        });
    }
}
