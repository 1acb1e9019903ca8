//! Attention to chosen keys: what the choice must not depend on, and what it was before there was
//! one. What it computes is compared with transformers among the other families.

use std::{fs, path::Path, sync::Arc, thread};

use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::Value;
use shardpack_collectives::Group;
use shardpack_converter::plan::ExpertCut;
use shardpack_loader::{
    backend::{Arithmetic, Cpu, CpuOptions, KvType},
    engine::{
        Engine, EngineOptions, Event, GenerateRequest, LocalModel, RankEngine, RequestId,
        StepOutcome, TokenId, memory_group,
    },
    model::Model,
    open::Package,
};
use tempfile::tempdir;

use crate::{
    exact::logits,
    experts::{open, write},
    harness::{convert, data, fail, path, succeed},
};

/// Reference models that choose eight keys.
const MODELS: [&str; 2] = ["deepseek_v32", "glm_moe_dsa_shared"];

fn expected(model: &str, name: &str) -> Vec<TokenId> {
    let file = fs::read(data("models").join(model).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor(name).unwrap().data().to_vec();
    let token = |four: &[u8]| TokenId(u32::from_le_bytes(four.try_into().unwrap()));
    bytes.chunks_exact(4).map(token).collect()
}

/// A copy of a reference model with some other keys in its configuration, and without some tensors.
fn changed(model: &str, out: &Path, keys: &Value, without: &str) {
    let from = data("models").join(model);
    fs::create_dir_all(out).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    let file = fs::read(from.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let kept = tensors.tensors().into_iter().filter(|(name, _)| !name.contains(without));
    let kept: Vec<(String, TensorView<'_>)> = kept.collect();
    fs::write(out.join("model.safetensors"), safetensors::serialize(kept, None).unwrap()).unwrap();
}

fn backends(ranks: u32, threads: usize, kv: KvType) -> Vec<Cpu> {
    let options = CpuOptions { threads, platform: None, arithmetic: Arithmetic::Fast };
    (0..ranks).map(|_| Cpu::with_options(&options).unwrap().with_kv(kv)).collect()
}

/// Bits of all logits of a sequence that is computed in steps of these lengths, the last one again
/// and again.
fn in_steps(
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

#[test]
fn a_choice_does_not_depend_on_steps_and_threads() {
    let folder = tempdir().unwrap();
    for model in MODELS {
        let tokens = expected(model, "tokens_b");
        for (bits, nodes) in [(16, 1), (4, 2)] {
            let set = folder.path().join(format!("{model}-{bits}"));
            write(&data("models").join(model), &set, bits, nodes, ExpertCut::Inside);
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
                        Event::Failed { message, .. } => panic!("{message}"),
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

#[test]
fn company_chunks_and_pages_of_others_change_no_token() {
    let folder = tempdir().unwrap();
    for model in MODELS {
        let source = folder.path().join(model);
        changed(model, &source, &serde_json::json!({"max_position_embeddings": 1024}), "?");
        // On five ranks one at least has no heads.
        for nodes in [1, 2, 5] {
            let set = folder.path().join(format!("{model}-{nodes}"));
            write(&source, &set, 16, nodes, ExpertCut::Inside);
            let packages = open(&set, nodes);
            let prompt = |seed: u32, length: u32| -> Vec<TokenId> {
                (0..length).map(|at| TokenId(3 + (at * at + seed * 7 + at / 3) % 61)).collect()
            };
            let long = prompt(0, 530);
            let begins_alike = [&long[..400], &prompt(9, 60)[..]].concat();
            let mut eight: Vec<_> = (1..7).map(|it| prompt(it, it * 11)).collect();
            eight.extend([long.clone(), begins_alike.clone()]);
            let chunks = |prefill_tokens| EngineOptions {
                prefill_tokens,
                mixed_tokens: prefill_tokens.min(64),
                ..EngineOptions::STANDARD
            };
            let alone: Vec<_> = eight.iter().map(std::slice::from_ref).collect();
            let cold: Vec<_> = alone
                .iter()
                .map(|prompt| answers(&packages, &[prompt], chunks(512)).remove(0).remove(0).0)
                .collect();
            assert!(cold.iter().all(|tokens| tokens.len() == 12), "{cold:?}");
            let together = answers(&packages, &[&eight], chunks(100)).remove(0);
            let tokens: Vec<_> = together.into_iter().map(|(tokens, _)| tokens).collect();
            assert_eq!(tokens, cold, "{model}, {nodes} nodes: eight together");
            let rounds = [&eight[6..7], &eight[6..7], &eight[7..]];
            let again = answers(&packages, &rounds, chunks(512));
            let cached: Vec<u32> = again.iter().map(|round| round[0].1).collect();
            assert_eq!(cached, [0, 512, 256], "{model}, {nodes} nodes");
            assert_eq!(again[1][0].0, cold[6], "{model}, {nodes} nodes: with pages of the first");
            assert_eq!(again[2][0].0, cold[7], "{model}, {nodes} nodes: with pages of another");
        }
    }
}

#[test]
fn while_all_keys_are_chosen_the_bits_are_those_without_a_choice() {
    let folder = tempdir().unwrap();
    let (model, tokens) = ("deepseek_v32", expected("deepseek_v32", "tokens_b"));
    let dense = folder.path().join("dense");
    let keys = serde_json::json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "index_topk": null, "index_n_heads": null, "index_head_dim": null,
    });
    changed(model, &dense, &keys, ".indexer.");
    let wide = folder.path().join("wide");
    changed(model, &wide, &serde_json::json!({"index_topk": tokens.len()}), "?");
    let compute = |source: &Path, name: &str, steps: &[usize]| {
        let set = folder.path().join(name);
        write(source, &set, 16, 2, ExpertCut::Inside);
        in_steps(&open(&set, 2), &tokens, steps, (1, KvType::F32))
    };
    let expected = compute(&dense, "dense-set", &[tokens.len()]);
    assert_eq!(compute(&wide, "wide-set", &[tokens.len()]), expected);
    assert_eq!(compute(&wide, "wide-steps", &[9, 1]), expected);
    // Eight keys: the first eight rows, and no other.
    let vocabulary = expected.len() / tokens.len();
    let narrow = compute(&data("models").join(model), "narrow", &[tokens.len()]);
    assert_eq!(narrow[..8 * vocabulary], expected[..8 * vocabulary]);
    assert_ne!(narrow[8 * vocabulary..9 * vocabulary], expected[8 * vocabulary..9 * vocabulary]);
}

#[test]
fn exact_logits_of_quantized_sets_are_those_of_their_exported_floats() {
    /// Of the same weights in f32, added up in another order.
    const TOLERANCE: f32 = 1e-3;
    for (model, bits) in [("deepseek_v32", "4"), (MODELS[1], "6"), (MODELS[1], "8")] {
        let folder = tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let set =
            convert(&format!("models/{model}"), &at("set"), &["--bits", bits, "--nodes", "2"]);
        let (floats, plain) = (at("floats"), at("plain"));
        succeed(&["export", path(&set), "-o", path(&floats), "--hf", "--dtype", "f32"]);
        let options = ["--bits", "16", "--dtype", "f32"];
        succeed(&[&["convert", path(&floats), "-o", path(&plain)], &options[..]].concat());
        let tokens = expected(model, "tokens_b");
        let tokens = format!("{:?}", tokens.iter().map(|token| token.0).collect::<Vec<_>>());
        let wanted = logits(&plain, &tokens, &[]);
        let exact = logits(&set, &tokens, &["--exact"]);
        assert_eq!(wanted.len(), exact.len());
        let differences = wanted.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f32::max);
        assert!(worst < TOLERANCE, "{model}, {bits} bits: {worst}");
    }
}

#[test]
fn stages_begin_where_keys_are_chosen() {
    let folder = tempdir().unwrap();
    let source = data("models/glm_moe_dsa_shared");
    let out = folder.path().join("set");
    let options = ["--nodes", "3", "--stages", "3"];
    let args = ["convert", path(&source), "-o", path(&out)];
    let error = fail(2, &[&args[..], &options].concat());
    assert!(error.contains("2 layers that choose their keys"), "{error}");
    let two = convert("models/glm_moe_dsa_shared", &out, &["--nodes", "2", "--stages", "2"]);
    let shown = succeed(&["inspect", path(&two)]);
    assert!(shown.contains("0..2") && shown.contains("2..4"), "{shown}");
}

#[test]
fn what_chooses_keys_has_eight_bits_at_least_and_stands_on_every_rank() {
    let folder = tempdir().unwrap();
    let model = "models/glm_moe_dsa_shared";
    let set = convert(model, &folder.path().join("set"), &["--bits", "4", "--nodes", "2"]);
    for rank in 0..2 {
        let text = fs::read(set.join(format!("node-{rank}/manifest.json"))).unwrap();
        let manifest: Value = serde_json::from_slice(&text).unwrap();
        let module = |name: &str| format!("model.layers.2.self_attn.indexer.{name}");
        for name in ["wq_b", "wk"] {
            let found = &manifest["quantization"]["overrides"][module(name)];
            assert!(found.to_string().contains('8'), "{name}: {found}");
        }
        let of_index = |tensor: &&Value| tensor["name"].as_str().unwrap().contains(".indexer.");
        let tensors = manifest["tensors"].as_array().unwrap();
        let found: Vec<&Value> = tensors.iter().filter(of_index).collect();
        // Of two layers that choose: two matrices of three tensors each, a matrix of floats and two
        // vectors.
        assert_eq!(found.len(), 2 * 9, "{found:?}");
        assert!(found.iter().all(|tensor| tensor["cut"] == "replicated"), "{found:?}");
        let file = |tensor: &Value| tensor["file"].as_str().unwrap().to_owned();
        assert!(found.iter().all(|tensor| file(tensor).contains("shared")), "{found:?}");
    }
}

#[test]
fn a_checkpoint_without_its_index_is_refused_with_what_is_missing() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("source");
    changed("deepseek_v32", &source, &serde_json::json!({}), ".indexer.");
    let out = folder.path().join("set");
    let error = fail(1, &["convert", path(&source), "-o", path(&out)]);
    assert!(error.contains("model.layers.0.self_attn.indexer.wq_b.weight [192, 32]"), "{error}");
    assert!(!out.exists());
}

/// A package of before the index was read: the same tensors as those of a dense model, in whose
/// manifest the family stands with a context that ends where a choice would begin.
#[test]
fn packages_without_an_index_open_and_say_why_they_are_short() {
    let folder = tempdir().unwrap();
    let dense = folder.path().join("dense");
    let keys = serde_json::json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3", "max_position_embeddings": 8,
        "index_topk": null, "index_n_heads": null, "index_head_dim": null,
    });
    changed("deepseek_v32", &dense, &keys, ".indexer.");
    let set = folder.path().join("set");
    write(&dense, &set, 16, 1, ExpertCut::Inside);
    let file = set.join("node-0/manifest.json");
    let manifest = fs::read_to_string(&file).unwrap();
    let family = |name: &str| format!("\"model_type\":\"{name}\"");
    assert!(manifest.contains(&family("deepseek_v3")), "{manifest}");
    fs::write(&file, manifest.replace(&family("deepseek_v3"), &family("deepseek_v32"))).unwrap();
    let packages = open(&set, 1);
    let groups = memory_group(1).unwrap();
    let model = LocalModel::over(&packages, &groups, backends(1, 1, KvType::F32)).unwrap();
    let tokens = expected("deepseek_v32", "tokens_b");
    let mut sequence = model.sequence(8);
    assert_eq!(model.extend(&mut sequence, &tokens[..8], 0).unwrap().len(), 8 * 64);
    let error = model.extend(&mut sequence, &tokens[8..9], 0).unwrap_err().to_string();
    assert!(error.contains("convert the model again"), "{error}");
}
