//! Hyper-connections (several residual streams): how their parameters are stored, what they add to the
//! all-reduces, and what is refused. Logits are compared with transformers in `other_families`.

use std::{fs, sync::Arc, thread, time::Duration};

use serde_json::{Value, json};
use shardpack_collectives::Group;
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::{Cpu, KvCache, Ranks, Tensors},
    engine::{CountedGroup, memory_group},
    loading::Package,
    model::{Batch, Model, Shard},
};
use shardpack_formats::Spec;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, path},
    reference_models::{changed, open, write},
};

#[test]
fn hyper_connection_parameters_stay_f32_and_replicated() {
    let folder = tempdir().unwrap();
    let set = convert("models/hy_v4", &folder.path().join("set"), &["--bits", "4", "--nodes", "2"]);
    for rank in 0..2 {
        let text = fs::read(set.join(format!("node-{rank}/manifest.json"))).unwrap();
        let manifest: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(manifest["architecture"]["hyper_connections"]["expansion_rate"], 3);
        let tensors = manifest["tensors"].as_array().unwrap();
        let of_streams = |tensor: &&Value| tensor["name"].as_str().unwrap().contains("hc");
        let found: Vec<&Value> = tensors.iter().filter(of_streams).collect();
        // Three for each part of four layers, and three at the end.
        assert_eq!(found.len(), 3 * 2 * 4 + 3, "{found:?}");
        for tensor in found {
            assert_eq!([&tensor["shard"], &tensor["dtype"]], ["replicated", "F32"], "{tensor}");
        }
    }
}

/// All-reduces of two ranks in one step of three tokens: how many, and bytes of each.
fn sums(model: &str) -> [u64; 2] {
    let folder = tempdir().unwrap();
    write(&data("models").join(model), folder.path(), 16, 2, ExpertSharding::Inside);
    let packages = open(folder.path(), 2);
    let batch = &Batch {
        tokens: vec![5, 9, 11],
        positions: vec![0, 1, 2],
        lengths: vec![3],
        logit_rows: vec![2],
        hidden_rows: Vec::new(),
        ..Batch::default()
    };
    let groups = memory_group(2).unwrap();
    let on_rank = |(package, group): (&Package, &Arc<dyn Group>)| {
        let backend = Cpu::new(1).unwrap();
        let model = Model::load(package, &backend).unwrap();
        let mut cache = backend.cache(&model.cache_shape(), &[]);
        let group = CountedGroup::new(group.as_ref());
        let ranks = Ranks::all(&group, Duration::from_mins(10));
        let step = || model.forward(&backend, batch, &mut [&mut cache], &ranks).map(|_| ());
        backend.run(step).unwrap();
        group.observer().take().all_reduces
    };
    thread::scope(|scope| {
        let start = |rank| scope.spawn(move || on_rank(rank));
        let running: Vec<_> = packages.iter().zip(&groups).map(start).collect();
        let sums: Vec<_> = running.into_iter().map(|rank| rank.join().unwrap()).collect();
        [sums[0].count, sums[0].bytes / sums[0].count]
    })
}

#[test]
fn several_residual_streams_need_no_more_all_reduces_than_one() {
    // Two in each of four layers, over rows of 32 floats.
    let one = sums("glm_moe_dsa_shared");
    assert_eq!(one, [8, 3 * 32 * 4]);
    assert_eq!(sums("hy_v4"), one);
}

#[test]
fn settings_that_are_not_implemented_are_refused() {
    for (keys, expected) in [
        (json!({"rope_interleave": true}), "layout of rotary embeddings"),
        (json!({"gating_type": "headwise"}), "element-wise attention output gate"),
        (json!({"learnable_sink": false}), "only hyper-connections with attention sinks"),
        (json!({"enable_ihc": false}), "only hyper-connections with attention sinks"),
        (json!({"swiglu_limit": 0.0}), "swiglu_limit above 0"),
        (json!({"indexer_types": ["full", "none", "shared", "full"]}), "indexer_types"),
        (json!({"indexer_types": ["shared", "full", "shared", "full"]}), "layer 0"),
        (json!({"hc_mult": 4}), "hc_attn_layer.hc_pre.hc_fn"),
        (json!({"scoring_func": "softmax"}), "sigmoid scores"),
    ] {
        let folder = tempdir().unwrap();
        let source = folder.path().join("source");
        changed("hy_v4", &source, &keys, "?");
        let out = folder.path().join("set");
        let error = fail(1, &["convert", path(&source), "-o", path(&out)]);
        assert!(error.contains(expected), "{keys}: {error}");
        assert!(!out.exists());
    }
}

#[test]
fn a_checkpoint_without_hyper_connection_tensors_is_refused_by_name() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("source");
    changed("hy_v4", &source, &json!({}), ".hc_mlp_layer.");
    let out = folder.path().join("set");
    let error = fail(1, &["convert", path(&source), "-o", path(&out)]);
    assert!(error.contains("model.layers.0.ffn_hc.fn [6, 96]"), "{error}");
    assert!(!out.exists());
}

/// A package that says that its streams stand in a block of another kind is refused as it is opened,
/// not computed otherwise.
#[test]
fn hyper_connections_in_other_block_layouts_are_refused() {
    let folder = tempdir().unwrap();
    let set = folder.path().join("set");
    write(&data("models/hy_v4"), &set, 16, 1, ExpertSharding::Inside);
    let package = open(&set, 1).remove(0);
    let manifest = package.manifest();
    let check = |change: &dyn Fn(&mut Spec), expected: &str| {
        let mut spec = manifest.architecture.clone();
        change(&mut spec);
        let error = Shard::new(&spec, &manifest.layout, 0).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(&|spec| spec.block.parallel = true, "several residual streams");
    check(
        &|spec| spec.hyper_connections.as_mut().unwrap().expansion_rate = 0,
        "hyper_connections.expansion_rate",
    );
    check(
        &|spec| spec.hyper_connections.as_mut().unwrap().expansion_rate = 1 << 16,
        "hyper_connections.expansion_rate",
    );
    check(
        &|spec| spec.mla.as_mut().unwrap().indexer.as_mut().unwrap().width = 8,
        "at least the rotated part's 16",
    );
}
