//! Embedding models: the vectors of sentence-transformers on any number of nodes and in any chunks, and
//! what `convert` says of forms that are not read.

use std::{fs, path::Path, sync::Arc, thread};

use safetensors::SafeTensors;
use serde_json::json;
use shardpack_collectives::Group;
use shardpack_converter::{ConvertOptions, Plan, Source, plan::ExpertSharding};
use shardpack_engine::{
    backend::Cpu,
    engine::{Engine, EngineOptions, RankEngine, StepOutcome, memory_group},
    model::Model,
};
use shardpack_engine_api::{Event, GenerateRequest, PromptOutput, RequestId, TokenId};
use shardpack_formats::spec::Pooling;
use tempfile::tempdir;

use crate::{
    harness::{causes, copy_folder, data},
    reference_models::{open, write},
};

/// Largest difference of an element of a vector of length one; that of logits is 5e-4.
const TOLERANCE: f32 = 5e-5;

const MODELS: [(&str, Pooling, usize); 3] = [
    ("qwen3_embedding", Pooling::Last, 0),
    ("e5_mistral", Pooling::Last, 0),
    ("embedding_gemma", Pooling::Mean, 2),
];

fn model(name: &str) -> std::path::PathBuf {
    data("embeddings").join(name)
}

/// Both sequences of a model, and their embeddings.
fn expected(name: &str) -> [(Vec<TokenId>, Vec<f32>); 2] {
    let file = fs::read(model(name).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let words = |name: &str| -> Vec<u32> {
        let bytes = tensors.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    ["a", "b"].map(|label| {
        let tokens = words(&format!("tokens_{label}")).into_iter().map(TokenId).collect();
        let vector = words(&format!("embedding_{label}")).into_iter().map(f32::from_bits).collect();
        (tokens, vector)
    })
}

/// Embeddings of prompts by the engines of a set, all together.
fn embeddings(
    set: &Path,
    nodes: u32,
    prefill_tokens: usize,
    prompts: &[Vec<TokenId>],
) -> Vec<Vec<f32>> {
    let options = EngineOptions { prefill_tokens, ..EngineOptions::STANDARD };
    let engine = |package| {
        let backend = Cpu::new(1).unwrap();
        Engine::new(Model::load(package, &backend).unwrap(), backend, options)
    };
    let packages = open(set, nodes);
    let mut engines: Vec<Engine<Cpu>> = packages.iter().map(engine).collect();
    let mut groups = memory_group(nodes).unwrap();
    let (mut leader, group): (_, Arc<dyn Group>) = (engines.remove(0), groups.remove(0));
    thread::scope(|scope| {
        for (mut engine, group) in engines.into_iter().zip(groups) {
            scope.spawn(move || while engine.follow(group.as_ref()).is_ok() {});
        }
        for (id, prompt) in prompts.iter().enumerate() {
            let request = GenerateRequest {
                prompt_output: PromptOutput::Embedding,
                ..GenerateRequest::greedy(prompt.clone(), 0)
            };
            leader.submit(RequestId(id as u64), request);
        }
        let mut found = vec![Vec::new(); prompts.len()];
        let mut take = |event| match event {
            Event::Embedding { request, values } => found[request.0 as usize] = values,
            Event::Finished { usage, .. } => assert_eq!(usage.completion_tokens, 0),
            other => panic!("{other:?}"),
        };
        while leader.lead(group.as_ref(), &mut take).unwrap() == StepOutcome::Worked {}
        group.abort("done");
        found
    })
}

fn unit(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    vector.iter().map(|value| value / length).collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn embeddings_match_sentence_transformers() {
    for (name, pooling, dense) in MODELS {
        let folder = tempdir().unwrap();
        let expected = expected(name);
        let prompts = expected.each_ref().map(|(tokens, _)| tokens.clone());
        for nodes in 1..=3 {
            let set = folder.path().join(format!("{nodes}"));
            write(&model(name), &set, 16, nodes, ExpertSharding::Inside);
            let manifest = open(&set, nodes).remove(0).manifest().clone();
            let form = manifest.architecture.embedding.unwrap();
            assert!(
                form.pooling == pooling && form.dense.len() == dense && form.normalize,
                "{name}"
            );
            assert!(manifest.requires.iter().any(|it| it == "embedding"), "{name}");
            for prefill_tokens in [512, 7] {
                let found = embeddings(&set, nodes, prefill_tokens, &prompts);
                for (found, (_, expected)) in found.iter().zip(&expected) {
                    let worst = difference(&unit(found), expected);
                    assert!(worst < TOLERANCE, "{name}, {nodes} nodes, {prefill_tokens}: {worst}");
                }
            }
        }
    }
}

#[test]
fn stages_give_the_same_embeddings() {
    let folder = tempdir().unwrap();
    let expected = expected("embedding_gemma");
    let prompts = expected.each_ref().map(|(tokens, _)| tokens.clone());
    let set = folder.path().join("set");
    let source = Source::open(&model("embedding_gemma")).unwrap();
    let options = ConvertOptions { bits: 16, stages: 2, ..ConvertOptions::new(set.clone(), 2) };
    let plan = Plan::new(&source, options).unwrap();
    shardpack_converter::convert(&source, &plan, &|_| ()).unwrap();
    let found = embeddings(&set, 2, 512, &prompts);
    for (found, (_, expected)) in found.iter().zip(&expected) {
        assert!(difference(&unit(found), expected) < TOLERANCE);
    }
}

/// What `convert` says of a model with a changed file.
#[track_caller]
fn check_refused(name: &str, file: &str, change: impl Fn(&mut serde_json::Value), reason: &str) {
    let folder = tempdir().unwrap();
    let copy = folder.path().join(name);
    copy_folder(&model(name), &copy);
    let path = copy.join(file);
    let mut document = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut document);
    fs::write(&path, document.to_string()).unwrap();
    let error = match Source::open(&copy) {
        Err(error) => causes(&error),
        Ok(source) => {
            let options = ConvertOptions::new(folder.path().join("set"), 1);
            causes(&Plan::new(&source, options).err().expect("the plan is refused"))
        }
    };
    assert!(error.contains(reason), "expected {reason:?} in {error:?}");
}

#[test]
fn forms_that_are_not_read_are_named() {
    let name = "embedding_gemma";
    check_refused(
        name,
        "modules.json",
        |it| it[2]["type"] = json!("sentence_transformers.models.LSTM"),
        "[2].type \"sentence_transformers.models.LSTM\" is not read",
    );
    check_refused(
        name,
        "1_Pooling/config.json",
        |it| it["pooling_mode_max_tokens"] = true.into(),
        "pooling by [\"max_tokens\", \"mean_tokens\"] is not read",
    );
    check_refused(name, "modules.json", |it| it[2]["path"] = json!("../x"), "[2].path");
    check_refused(
        name,
        "2_Dense/config.json",
        |it| it["activation_function"] = json!("torch.nn.GELU"),
        "\"GELU\" is not read",
    );
    check_refused(
        "e5_mistral",
        "config.json",
        |it| {
            it["architectures"] = json!(["BertModel"]);
            it["model_type"] = json!("bert");
        },
        "an encoder",
    );
}
