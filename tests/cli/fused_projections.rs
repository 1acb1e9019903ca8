//! Fused projections (`qkv_proj`, `gate_up_proj`): packages shard their parts separately, and files hold
//! them fused, under the names that other programs look for.

use std::{fs, path::Path};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, path, succeed},
    reshard::{check_chain, json, weights},
};

/// Families, and a fused matrix of theirs with the projections that it is split into.
const FAMILIES: &[(&str, &str, &[&str])] = &[
    ("models/glm", "mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
    ("models/glm4", "mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
    (
        "models/phi3",
        "self_attn.qkv_proj",
        &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ),
    (
        "models/qwen3_5",
        "linear_attn.in_proj_qkv",
        &["linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v"],
    ),
];

const LAYER: &str = "model.layers.1";

fn id(set: &Path) -> Value {
    json(&set.join("set.json"))["ids"]["weights"].clone()
}

#[test]
fn the_one_node_package_keeps_the_fused_tensors_of_the_source() {
    for (model, ..) in FAMILIES {
        let folder = tempdir().unwrap();
        let set = convert(model, &folder.path().join("set"), &["--bits", "16"]);
        let found = weights(&set.join("node-0"));
        assert!(found == weights(&data(model)), "{model}: the same names, types, shapes and bytes");
        let index = json(&set.join("node-0/model.safetensors.index.json"));
        assert!(index["weight_map"].as_object().unwrap().keys().eq(found.keys()), "{model}");
    }
}

#[test]
fn a_fused_matrix_is_its_pieces_end_to_end_on_every_rank() {
    for (model, fused, pieces) in FAMILIES {
        let folder = tempdir().unwrap();
        let set = convert(model, &folder.path().join("set"), &["--bits", "4", "--nodes", "2"]);
        for rank in ["node-0", "node-1"] {
            let package = set.join(rank);
            let stored = weights(&package);
            let tensors = json(&package.join("manifest.json"))["tensors"].clone();
            for part in ["weight", "scales", "biases"] {
                let entry = |piece: &&str| {
                    let name = format!("{LAYER}.{piece}.{part}");
                    let entry =
                        tensors.as_array().unwrap().iter().find(|entry| entry["name"] == *name);
                    entry.unwrap_or_else(|| panic!("{model}: no {name}")).clone()
                };
                let entries: Vec<Value> = pieces.iter().map(entry).collect();
                let (_, shape, bytes) = &stored[&format!("{LAYER}.{fused}.{part}")];
                let rows = entries.iter().map(|entry| entry["shape"][0].as_u64().unwrap());
                assert_eq!(shape[0] as u64, rows.sum::<u64>(), "{model} {rank} {part}");
                let joined = entries.iter().flat_map(|entry| {
                    let file = fs::read(package.join(entry["file"].as_str().unwrap())).unwrap();
                    let at = entry["offset"].as_u64().unwrap() as usize;
                    file[at..at + entry["size"].as_u64().unwrap() as usize].to_vec()
                });
                assert!(joined.eq(bytes.iter().copied()), "{model} {rank} {part}");
            }
        }
    }
}

#[test]
fn resharding_and_exports_keep_fused_matrices() {
    for (model, ..) in FAMILIES {
        check_chain(model, &["--bits", "4", "--recipe", "sensitive"]);
        let folder = tempdir().unwrap();
        let options = ["--bits", "16", "--nodes", "3"];
        let set = convert(model, &folder.path().join("set"), &options);
        let out = folder.path().join("hf");
        succeed(&["export", path(&set), "--hf", "-o", path(&out)]);
        assert!(weights(&out) == weights(&data(model)), "{model}");
    }
}

#[test]
fn a_package_of_fused_matrices_is_a_source() {
    for (model, ..) in FAMILIES {
        let folder = tempdir().unwrap();
        let first = convert(model, &folder.path().join("first"), &["--bits", "4"]);
        let again = folder.path().join("again");
        let package = first.join("node-0");
        succeed(&["convert", path(&package), "-o", path(&again), "--bits", "4", "--nodes", "2"]);
        assert_eq!(id(&again), id(&first), "{model}: its integers are carried over");
    }
}

#[test]
fn pieces_of_one_matrix_have_the_most_precise_format_of_any() {
    let folder = tempdir().unwrap();
    let options = ["--bits", "4", "--override", "*.v_proj=8"];
    let set = convert("models/phi3", &folder.path().join("set"), &options);
    let config = json(&set.join("node-0/config.json"));
    let told = |module: &str| config["quantization"][format!("{LAYER}.{module}")]["bits"].clone();
    assert_eq!([told("self_attn.qkv_proj"), told("self_attn.v_proj")], [8.into(), Value::Null]);
    let manifest = json(&set.join("node-0/manifest.json"));
    for piece in ["q_proj", "k_proj", "v_proj"] {
        let name = format!("{LAYER}.self_attn.{piece}");
        assert_eq!(manifest["quantization"]["overrides"][name]["affine"]["bits"], 8, "{piece}");
    }
}
