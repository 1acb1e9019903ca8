//! Speculative decoding changes no token: on every kind of architecture, on one and two ranks.

use std::{collections::BTreeMap, path::Path, sync::Arc, thread};

use serde_json::json;
use shardpack_collectives::Group;
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::Cpu,
    engine::{Engine, EngineOptions, RankEngine, Speculate, StepOutcome, memory_group},
    model::Model,
};
use shardpack_engine_api::{
    Event, FinishReason, GenerateRequest, RequestId, Sampling, TokenId, TokenLogprobs,
};
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{changed, open, write},
};

/// An answer with all that is said of it.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    end: Option<FinishReason>,
}

/// What requests come to on a set, in how many steps, and how many drafts were run and kept.
struct Run {
    answers: BTreeMap<RequestId, Answer>,
    steps: usize,
    drafts: [u64; 2],
}

fn run(set: &Path, nodes: u32, speculate: Speculate, requests: &[GenerateRequest]) -> Run {
    let options = EngineOptions { speculate, ..EngineOptions::STANDARD };
    let mut engines: Vec<Engine<Cpu>> = open(set, nodes)
        .iter()
        .map(|package| {
            let backend = Cpu::new(1).unwrap();
            Engine::new(Model::load(package, &backend).unwrap(), backend, options)
        })
        .collect();
    let groups: Vec<Arc<dyn Group>> = memory_group(nodes).unwrap();
    let (leader, followers) = engines.split_first_mut().unwrap();
    let mut answers: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut steps = 0;
    thread::scope(|scope| {
        for (engine, group) in followers.iter_mut().zip(&groups[1..]) {
            scope.spawn(move || while engine.follow(group.as_ref()).is_ok() {});
        }
        let group = groups[0].as_ref();
        for (id, request) in requests.iter().enumerate() {
            leader.submit(RequestId(id as u64), request.clone());
        }
        let mut take = |event| match event {
            Event::Token { request, token, logprobs } => {
                let answer = answers.entry(request).or_default();
                answer.tokens.push(token);
                answer.logprobs.extend(logprobs);
            }
            Event::Finished { request, reason, .. } => {
                answers.entry(request).or_default().end = Some(reason);
            }
            other => panic!("{other:?}"),
        };
        while leader.lead(group, &mut take).unwrap() == StepOutcome::Worked {
            steps += 1;
        }
        group.abort("done");
    });
    Run { answers, steps, drafts: leader.drafts() }
}

/// Greedy, drawn and penalised, beyond the windows and blocks of small models, of the tokens of a
/// vocabulary.
fn requests(vocabulary: u32) -> Vec<GenerateRequest> {
    let drawn = Sampling { temperature: 0.8, top_p: 0.9, seed: 11, ..Sampling::GREEDY };
    let penalised = Sampling { repetition_penalty: 1.2, presence_penalty: 0.3, ..drawn.clone() };
    [(Sampling::GREEDY, 30), (drawn, 230), (penalised, 7)]
        .into_iter()
        .map(|(sampling, length)| {
            let prompt = (0..length).map(|i| TokenId(i * 37 % (vocabulary - 5) + 5)).collect();
            GenerateRequest { sampling, logprobs: Some(20), ..GenerateRequest::greedy(prompt, 40) }
        })
        .collect()
}

/// With the answers as predicted output, except for some tokens.
fn foretelling(requests: &[GenerateRequest], run: &Run, wrong: usize) -> Vec<GenerateRequest> {
    let tell = |(request, answer): (&GenerateRequest, &Answer)| {
        let tokens = answer.tokens.iter().enumerate();
        let change = |(place, token): (usize, &TokenId)| {
            if place % wrong == wrong - 1 { TokenId(token.0 ^ 1) } else { *token }
        };
        GenerateRequest { prediction: tokens.map(change).collect(), ..request.clone() }
    };
    requests.iter().zip(run.answers.values()).map(tell).collect()
}

#[test]
fn speculative_decoding_changes_no_token_or_logprob() {
    // Dense, tied; MLA with experts; windows; windows, sinks and experts; experts; linear
    // attention, whose states are rolled back; sparse attention; Mamba; heads of two sizes; chunked
    // attention; hyper-connections; compressed KV entries; block-sparse attention.
    let usual =
        ["qwen3", "llama-tied", "deepseek_v3", "gemma3_text", "gpt_oss", "mixtral", "qwen3_next"];
    let small = [
        "deepseek_v32",
        "nemotron_h",
        "gemma4_text",
        "llama4_text",
        "hy_v4",
        "deepseek_v4",
        "minimax_m3_vl_text",
    ];
    for model in usual {
        check_drafts(model, false);
    }
    for model in small {
        check_drafts(model, true);
    }
}

/// On one and two nodes. Small models have 64 tokens, and contexts that are too short here.
pub(crate) fn check_drafts(model: &str, is_small: bool) {
    let folder = tempdir().unwrap();
    let (mut source, mut vocabulary) = (data("models").join(model), 406);
    if is_small {
        (source, vocabulary) = (folder.path().join(model), 64);
        changed(model, &source, &json!({"max_position_embeddings": 1024}), "?");
    }
    let requests = requests(vocabulary);
    for nodes in [1, 2] {
        let set = folder.path().join(format!("{model}-{nodes}"));
        write(&source, &set, 4, nodes, ExpertSharding::Auto);
        let plain = run(&set, nodes, Speculate::Off, &requests);
        assert_eq!(plain.drafts, [0, 0]);
        for wrong in [7, usize::MAX] {
            let told = foretelling(&requests, &plain, wrong);
            let found = run(&set, nodes, Speculate::Auto, &told);
            assert_eq!(found.answers, plain.answers, "{model} on {nodes}, wrong every {wrong}");
            let [drafted, accepted] = found.drafts;
            // The one with the fewest right drafts decides how many steps there are.
            assert!(accepted > 0 && found.steps <= plain.steps, "{model}: {accepted}");
            assert_eq!(accepted < drafted, wrong == 7, "{model}: {accepted} of {drafted}");
        }
    }
}

/// Draft tokens that are rejected must be taken back, which a recurrent state cannot.
#[test]
fn draft_models_without_kv_rollback_are_refused() {
    let folder = tempdir().unwrap();
    for name in ["qwen3_next", "deepseek_v4"] {
        let set = folder.path().join(name);
        write(&data("models").join(name), &set, 16, 1, ExpertSharding::Auto);
        let mut models = open(&set, 1).into_iter().map(|package| {
            let backend = Cpu::new(1).unwrap();
            (Model::load(&package, &backend).unwrap(), backend)
        });
        let (draft, backend) = models.next().unwrap();
        let model = Model::load(&open(&set, 1)[0], &backend).unwrap();
        let engine = Engine::new(model, backend, EngineOptions::STANDARD);
        let error = engine.with_draft_model(draft).map(drop).unwrap_err().to_string();
        assert!(error.contains("recurrent layers or compressed attention"), "{name}: {error}");
    }
}
