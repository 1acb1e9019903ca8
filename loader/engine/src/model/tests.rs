//! Logits against transformers.

use std::collections::BTreeMap;

use shardpack_engine_api::TokenId;
use shardpack_manifests::{Layout, Manifest, TensorShard, canonical};

use super::*;
use crate::{
    backend::{Arithmetic, Cpu, CpuOptions},
    engine::{LocalModel, logits},
    loading::{OpenOptions, Package},
    testing::{
        group::thread_groups,
        models::{self, Expected},
        package::{Recipe, Weights},
    },
};

/// The reference's own rounding is 7e-5; a right engine in f32 stays below this.
const LOGIT_TOLERANCE: f32 = 5e-4;

const MODELS: [&str; 3] = ["llama", "llama-tied", "qwen3"];

fn logits_of(packages: &[Package], tokens: &[u32]) -> Vec<f32> {
    let tokens: Vec<_> = tokens.iter().map(|token| TokenId(*token)).collect();
    logits(packages, &thread_groups(packages.len() as u32, 1), &tokens, 1).unwrap()
}

/// Logits with activations that are not rounded before quantized weights.
fn exact_logits(packages: &[Package], tokens: &[u32]) -> Vec<f32> {
    let tokens: Vec<_> = tokens.iter().map(|token| TokenId(*token)).collect();
    let options = CpuOptions { threads: 1, platform: None, arithmetic: Arithmetic::Exact };
    let backends = packages.iter().map(|_| Cpu::with_options(&options).unwrap()).collect();
    let groups = thread_groups(packages.len() as u32, 1);
    LocalModel::over(packages, &groups, backends).unwrap().logits(&tokens).unwrap()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn argmax(row: &[f32]) -> u32 {
    let best = (0..row.len()).reduce(|best, i| if row[i] > row[best] { i } else { best });
    best.unwrap() as u32
}

fn check_against_transformers(recipe: Recipe) {
    let expected = Expected::of(recipe.model);
    let packages = recipe.open();
    for (tokens, theirs) in expected.tokens.iter().zip(&expected.logits) {
        let difference = difference(&logits_of(&packages, tokens), theirs);
        assert!(
            difference < LOGIT_TOLERANCE,
            "{} on {} ranks: logits differ by {difference}",
            recipe.model,
            recipe.ranks
        );
    }
    // One pass over prompt and continuation: each row has to choose the next token of it.
    let [prompt, _] = &expected.tokens;
    let all: Vec<u32> = prompt.iter().chain(&expected.greedy).copied().collect();
    let vocab = models::spec(recipe.model).vocab_size as usize;
    let chosen: Vec<_> =
        logits_of(&packages, &all[..all.len() - 1]).chunks(vocab).map(argmax).collect();
    assert_eq!(chosen[prompt.len() - 1..], expected.greedy, "{}: greedy tokens", recipe.model);
}

#[test]
fn logits_are_those_of_transformers_on_any_number_of_ranks() {
    for model in MODELS {
        for ranks in 1..=4 {
            check_against_transformers(Recipe::plain(model, ranks));
        }
    }
}

#[test]
fn a_rank_without_heads_or_columns_takes_part() {
    // Heads of 32 go by pairs (three for four ranks); the inner columns go by 256.
    check_against_transformers(Recipe { align: 64, ..Recipe::plain("llama", 4) });
    check_against_transformers(Recipe { align: 256, ..Recipe::plain("llama", 3) });
    check_against_transformers(Recipe { align: 256, ..Recipe::plain("qwen3", 4) });
}

#[test]
fn the_embedding_may_be_whole_on_every_rank() {
    for model in MODELS {
        check_against_transformers(Recipe { embedding_sharded: false, ..Recipe::plain(model, 3) });
    }
}

#[test]
fn quantized_weights_compute_what_they_stand_for() {
    for (model, bits, group, ranks) in [
        ("llama", 4, 64, 1),
        ("llama", 6, 64, 2),
        ("llama-tied", 8, 32, 3),
        ("qwen3", 4, 32, 3),
        ("qwen3", 8, 64, 4),
    ] {
        let recipe = |ranks, weights| Recipe { align: 64, weights, ..Recipe::plain(model, ranks) };
        let [tokens, _] = Expected::of(model).tokens;
        let decoded = recipe(1, Weights::Decoded { bits, group }).open();
        let affine = recipe(ranks, Weights::Affine { bits, group }).open();
        let difference = difference(&logits_of(&decoded, &tokens), &exact_logits(&affine, &tokens));
        assert!(
            difference < LOGIT_TOLERANCE,
            "{model}, {bits} bits, {ranks} ranks: logits differ by {difference}"
        );
    }
}

#[test]
fn threads_change_no_bits() {
    let [tokens, _] = Expected::of("llama").tokens;
    let packages = Recipe::plain("llama", 1).open();
    let ids: Vec<_> = tokens.iter().map(|token| TokenId(*token)).collect();
    let on = |threads| logits(&packages, &thread_groups(1, 1), &ids, threads).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(on(1)), bits(on(3)));
}

/// Why a package with a changed manifest is not loaded.
fn refused(recipe: Recipe, rank: usize, change: impl FnOnce(&mut Manifest)) -> String {
    let out = tempfile::tempdir().unwrap();
    let directory = recipe.write(out.path()).swap_remove(rank);
    let file = directory.join("manifest.json");
    let mut manifest = Manifest::parse(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut manifest);
    std::fs::write(&file, canonical::to_string(&manifest).unwrap()).unwrap();
    let package = Package::open(&directory, &OpenOptions::stored(1), &|_| {}).unwrap();
    let backend = Cpu::new(1).unwrap();
    match Model::load(&package, &backend) {
        Ok(_) => panic!("loaded"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn check_refused(change: impl FnOnce(&mut Manifest), reason: &str) {
    let error = refused(Recipe::plain("llama", 2), 1, change);
    assert!(error.contains(reason), "expected {reason:?} in {error:?}");
}

fn entry<'a>(
    manifest: &'a mut Manifest,
    name: &str,
) -> &'a mut shardpack_manifests::manifest::TensorEntry {
    manifest.tensors.iter_mut().find(|tensor| tensor.name.ends_with(name)).unwrap()
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    check_refused(
        |manifest| manifest.tensors.retain(|t| t.name != "model.layers.1.mlp.up_proj.weight"),
        r#"tensor "model.layers.1.mlp.up_proj.weight" is missing on rank 1"#,
    );
    check_refused(
        |manifest| entry(manifest, "0.self_attn.q_proj.bias").name = "other".to_owned(),
        r#"tensor "model.layers.0.self_attn.q_proj.bias" is missing"#,
    );
    check_refused(
        |manifest| manifest.architecture.attention.qkv_bias = false,
        "has no place in the architecture",
    );
    check_refused(
        |manifest| entry(manifest, "model.norm.weight").shape = vec![2, 96],
        r#"tensor "model.norm.weight" on rank 1: expected shape [192], found [2, 96]"#,
    );
    check_refused(
        |manifest| {
            let tensor = entry(manifest, "0.self_attn.q_proj.weight");
            let TensorShard::Range { start, end, .. } = &mut tensor.shard else {
                panic!("unsharded")
            };
            *end -= *start;
            *start = 0;
        },
        "expected 96..192 of 192 in dimension 0, found 0..96 of 192 in dimension 0",
    );
    check_refused(
        |manifest| {
            manifest.quantization.bits = 4;
            manifest.quantization.group_size = Some(64);
        },
        "model.embed_tokens",
    );
}

#[test]
fn layouts_that_contradict_the_architecture_are_refused() {
    let axis = |name: &'static str, ranges: [[u64; 2]; 2]| {
        move |manifest: &mut Manifest| {
            manifest.layout.axes.get_mut(name).unwrap().ranges = ranges.to_vec();
        }
    };
    check_refused(axis("ffn", [[0, 160], [128, 320]]), "ranges that follow one another");
    check_refused(axis("vocab", [[0, 256], [256, 500]]), "an end at 512");
    check_refused(axis("kv", [[0, 1], [0, 1]]), "key-value head of query head 3 on rank 1");
    check_refused(|manifest| manifest.layout.axes = BTreeMap::new(), "a range for every rank");
    check_refused(|manifest| manifest.layout.q_to_kv.truncate(5), "expected 6, found 5");
    check_refused(
        |manifest| manifest.architecture.attention.head_dim = 64,
        r#"axis "q": expected 6 of 64, found 6 units of 32"#,
    );
    check_refused(
        |manifest| manifest.architecture.ropes.clear(),
        "rope of layer 0: expected one of 0 ropes",
    );
    check_refused(|manifest| manifest.architecture.ffn.size = 0, "ffn.size");
}

#[test]
fn an_axis_may_count_in_blocks() {
    let out = tempfile::tempdir().unwrap();
    let recipe = Recipe { align: 64, ..Recipe::plain("llama", 2) };
    let directory = recipe.write(out.path()).swap_remove(0);
    let package = Package::open(&directory, &OpenOptions::stored(1), &|_| {}).unwrap();
    let manifest = package.manifest();
    let shard = |layout: &Layout| Shard::new(&manifest.architecture, layout, 1).unwrap();
    let mut in_pairs = manifest.layout.clone();
    let q = in_pairs.axes.get_mut("q").unwrap();
    (q.size, q.unit) = (q.size / 2, q.unit * 2);
    q.ranges.iter_mut().flatten().for_each(|end| *end /= 2);
    assert_eq!(shard(&manifest.layout), shard(&in_pairs));
}
