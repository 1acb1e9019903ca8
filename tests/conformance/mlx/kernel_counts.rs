//! How many kernels a layer costs at decode, counted on the graph that is computed: as a GPU would run
//! it, one marker for each fused kernel. On a GPU, decoding a large model is bound by them.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use serde_json::Value;
use shardpack_collectives::LinkedGroup;
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::{Collectives, DrawnStep, Mlx, Ranks},
    loading::{OpenOptions, Package},
    model::{Batch, Model},
};
use shardpack_formats::spec::{self, LinearAttentionKind, QkNorm};
use shardpack_mlx::{Device, runtime};
use tempfile::tempdir;

use super::{copy_in_bf16, families};
use crate::{
    harness::data,
    reference_models::{open_with, write},
    skip::mlx_runtime,
};

/// What moves no data on a GPU, or no more than an address.
const VIEWS: [&str; 15] = [
    "Reshape",
    "Transpose",
    "Slice",
    "Broadcast",
    "ExpandDims",
    "Squeeze",
    "Flatten",
    "Unflatten",
    "Split",
    "Depends",
    "StopGradient",
    "NumberOfElements",
    "AsStrided",
    "Contiguous",
    "BroadcastAxes",
];

/// Kernels and nodes of a decode step.
#[derive(Clone, Copy, Debug)]
struct Cost {
    kernels: usize,
    nodes: usize,
}

/// The primitives of a graph in the DOT language, by name.
fn primitives(graph: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in graph.lines().filter(|line| line.contains("rectangle")) {
        let label = line.split("label").nth(1).and_then(|rest| rest.split('"').nth(1));
        *counts.entry(label.unwrap_or_default().to_owned()).or_default() += 1;
    }
    counts
}

fn cost(counts: &BTreeMap<String, usize>) -> Cost {
    let kernels = counts.iter().filter(|(name, _)| !VIEWS.contains(&name.as_str()));
    // A concatenation copies each of its parts.
    let kernels =
        kernels.map(|(name, count)| if name == "Concatenate" { 2 * count } else { *count });
    Cost { kernels: kernels.sum(), nodes: counts.values().sum() }
}

/// The primitives of a step, by rank 0 of so many.
fn step(
    runtime: &Path,
    package: &Package,
    drawn: DrawnStep,
    ranks: u32,
) -> BTreeMap<String, usize> {
    let backend = Mlx::open(runtime, Some(Device::Cpu), Collectives::Own, [0, 1]).unwrap();
    let backend = backend.as_on_gpu();
    let model = Model::load(package, &backend).unwrap();
    let groups = LinkedGroup::in_memory(ranks, 0).unwrap();
    let ranks = Ranks::all(&groups[0], Duration::from_mins(10));
    let shape = model.cache_shape();
    let graph = backend.graph_of_step(&shape, drawn, &|caches, positions| {
        let (sequences, rows) = (caches.len(), positions.len());
        let positions = (0..sequences).flat_map(|_| positions.clone());
        let batch = Batch {
            tokens: (0..(sequences * rows) as u32).collect(),
            positions: positions.map(|position| position as u32).collect(),
            lengths: vec![rows; sequences],
            logit_rows: (1..=sequences).map(|sequence| sequence * rows - 1).collect(),
            hidden_rows: Vec::new(),
            ..Batch::default()
        };
        model.forward(&backend, &batch, caches, &ranks)
    });
    primitives(&graph.unwrap())
}

/// The primitives of the last layer alone: those of a model less those of one without that layer.
fn last_layer(
    runtime: &Path,
    model: &str,
    [sequences, rows]: [usize; 2],
) -> BTreeMap<String, usize> {
    let drawn = DrawnStep { sequences, prompt: 4, rows };
    let folder = tempdir().unwrap();
    let source = data("models").join(model);
    let config = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    let mut counts: Vec<_> = [layers - 1, layers]
        .iter()
        .map(|kept| {
            let copy = folder.path().join(format!("model-{kept}"));
            let dropped = format!("model.layers.{kept}.");
            copy_in_bf16(&source, &copy, |name| !name.starts_with(&dropped));
            config["num_hidden_layers"] = Value::from(*kept);
            fs::write(copy.join("config.json"), config.to_string()).unwrap();
            let set = folder.path().join(format!("set-{kept}"));
            write(&copy, &set, 4, 1, ExpertSharding::Inside);
            step(runtime, &open_with(&set, 1, OpenOptions::stored(1))[0], drawn, 1)
        })
        .collect();
    let (mut all, less) = (counts.remove(1), counts.remove(0));
    for (name, count) in less {
        *all.get_mut(&name).unwrap_or(&mut 0) -= count;
    }
    all.retain(|_, count| *count > 0);
    all
}

/// At most so many kernels of a layer at decode, and the nodes that mlx-lm 0.32.2 builds for it.
struct Bound {
    model: &'static str,
    kernels: usize,
    mlx_lm_nodes: usize,
}

#[test]
fn mlx_layers_cost_few_kernels_at_decode() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let bound = |model, kernels, mlx_lm_nodes| Bound { model, kernels, mlx_lm_nodes };
    for Bound { model, kernels, mlx_lm_nodes } in [
        bound("mistral", 20, 28),
        bound("ministral3", 20, 30),
        bound("qwen3_moe", 34, 58),
        bound("deepseek_v3", 50, 90),
        bound("kimi_k2", 45, 78),
    ] {
        let counts = last_layer(&runtime, model, [1, 1]);
        let found = cost(&counts);
        println!("{model}: {found:?} {counts:?}");
        assert!(found.kernels <= kernels, "{model}: {found:?}, {counts:?}");
        assert!(found.nodes * 10 <= mlx_lm_nodes * 13, "{model}: {found:?}, {counts:?}");
    }
}

/// Sequences of one shape attend with one call, whatever their number.
#[test]
fn mlx_sequences_cost_no_kernels_of_their_own() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    for model in ["mistral", "qwen3_moe", "kimi_k2"] {
        let [four, eight] =
            [4, 8].map(|sequences| cost(&last_layer(&runtime, model, [sequences, 1])));
        let one = cost(&last_layer(&runtime, model, [1, 1]));
        println!("{model}: {one:?}, with 4 sequences {four:?}, with 8 {eight:?}");
        assert_eq!(four.kernels, eight.kernels, "{model}");
        assert!(eight.kernels <= one.kernels + 4, "{model}: {one:?}, {eight:?}");
    }
}

/// With rows in the order of their experts, each projection is one product that reads each expert
/// once.
#[test]
fn mlx_prefill_reads_each_expert_once() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    for (model, projections) in [("qwen3_moe", 3), ("deepseek_v3", 3), ("gpt_oss", 3)] {
        let counts = last_layer(&runtime, model, [1, 512]);
        let of = |name: &str| counts.get(name).copied().unwrap_or(0);
        println!("{model}: {counts:?}");
        assert_eq!(of("GatherQMM"), projections, "{model}: {counts:?}");
        // Rows are sorted, and brought back.
        assert_eq!(of("ArgSort"), 2, "{model}: {counts:?}");
    }
}

/// One all-reduce per half-layer: one behind each mixer and one behind each feed-forward part, or one
/// for both where they read the same; one more where a norm needs the sum over all ranks' columns,
/// or follows the experts alone, and one for a sharded embedding.
#[test]
fn mlx_steps_have_no_more_all_reduces_than_the_architecture_needs() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    for model in &families() {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        write(model, &set, 16, 2, ExpertSharding::Inside);
        let package = &open_with(&set, 2, OpenOptions::stored(1))[0];
        let spec = &package.manifest().architecture;
        let of_layer = |(index, layer): (usize, &spec::Layer)| {
            let norm = spec.attention_of(index).qk_norm == QkNorm::Full && !layer.has_state();
            let halves = if spec.block.parallel { 1 } else { 2 };
            // A norm between the experts and the dense network beside them.
            let apart = spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some());
            let linear = spec.linear_attention.as_ref().filter(|_| layer.linear_attention);
            let groups = linear.is_some_and(|linear| {
                linear.kind == LinearAttentionKind::Mamba2 && !linear.no_output_norm
            });
            let more = [norm, apart && layer.moe, groups];
            halves + more.into_iter().filter(|it| *it).count()
        };
        let most: usize = spec.layers.iter().enumerate().map(of_layer).sum();
        let most = most + usize::from(package.manifest().layout.embedding_sharded);
        let counts = step(&runtime, package, DrawnStep { sequences: 1, prompt: 0, rows: 1 }, 2);
        let found = counts.get("ShardpackCollective").copied().unwrap_or(0);
        let name = model.file_name().unwrap().display();
        println!("{name}: {found} all-reduces in {} layers", spec.layers.len());
        assert!(found > 0 && found <= most, "{name}: {found}, at most {most}");
    }
}
