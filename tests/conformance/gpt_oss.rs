//! gpt-oss as it is published: experts in MXFP4, gates and ups in turns.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::engine::{logits, memory_group};
use shardpack_engine_api::TokenId;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, path, succeed},
    reference_models::{join, open, write},
};

const SOURCE: &str = "sources/mxfp4_gpt_oss";

/// A float32 engine stays this close to transformers' logits.
const TOLERANCE: f32 = 5e-4;

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

#[test]
fn logits_of_mxfp4_experts_match_transformers() {
    let file = fs::read(data(SOURCE).join("logits.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        tensors.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec()
    };
    let tokens: Vec<TokenId> =
        words("tokens").iter().map(|four| TokenId(u32::from_le_bytes(*four))).collect();
    let expected: Vec<f32> = words("logits").iter().map(|four| f32::from_le_bytes(*four)).collect();
    for nodes in 1..=3 {
        for experts in [ExpertSharding::Inside, ExpertSharding::Whole] {
            let folder = tempdir().unwrap();
            let set = folder.path().join("set");
            write(&data(SOURCE), &set, 16, nodes, experts);
            let groups = memory_group(nodes).unwrap();
            let found = logits(&open(&set, nodes), &groups, &tokens, 1).unwrap();
            assert_eq!(found.len(), expected.len());
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < TOLERANCE, "{nodes} nodes, {experts:?}: {worst}");
        }
    }
}

/// The elements of a logical tensor, `[experts, out, in]`, as the published ones have them: inputs
/// before outputs, and gates and ups in turn.
fn published(tensors: &SafeTensors, name: &str) -> Vec<u8> {
    let data = |name: &str| {
        let tensor = tensors.tensor(name).unwrap_or_else(|_| panic!("no {name}"));
        (tensor.shape().to_vec(), tensor.data().to_vec())
    };
    let Some((module, kind)) =
        name.rsplit_once('.').filter(|(module, _)| module.contains(".experts."))
    else {
        return data(name).1;
    };
    let (block, projection) = module.rsplit_once('.').unwrap();
    let (stored, first, step) = match projection {
        "gate_proj" => ("gate_up_proj", 0, 2),
        "up_proj" => ("gate_up_proj", 1, 2),
        other => (other, 0, 1),
    };
    let ending = if kind == "bias" { "_bias" } else { "" };
    let (shape, bytes) = data(&format!("{block}.{stored}{ending}"));
    let (inner, outer) = (if kind == "bias" { 1 } else { shape[1] }, *shape.last().unwrap());
    let element = |expert: usize, out: usize, input: usize| {
        let at = (expert * inner + input) * outer + first + out * step;
        &bytes[at * 4..][..4]
    };
    let experts = 0..shape[0];
    let places = experts.flat_map(|expert| (0..outer / step).map(move |out| (expert, out)));
    let places = places.flat_map(|(expert, out)| (0..inner).map(move |input| (expert, out, input)));
    places.flat_map(|(expert, out, input)| element(expert, out, input).to_vec()).collect()
}

#[test]
fn mxfp4_experts_are_dequantized_bit_for_bit() {
    let folder = tempdir().unwrap();
    let set = convert(SOURCE, &folder.path().join("set"), &["--bits", "16", "--nodes", "2"]);
    let floats = folder.path().join("floats");
    succeed(&["export", path(&set), "-o", path(&floats), "--hf", "--dtype", "f32"]);
    let file = fs::read(floats.join("model.safetensors")).unwrap();
    let found = SafeTensors::deserialize(&file).unwrap();
    let expected = json(&data(SOURCE).join("expected.json"));
    let expected = expected["tensors"].as_object().unwrap();
    // Gates and ups are in turn in one tensor of a layer, and so are their biases.
    let fused = expected.keys().filter(|name| name.contains(".up_proj.")).count();
    assert_eq!(found.len(), expected.len() - fused);
    for (name, expected) in expected {
        let digest = Sha256::digest(published(&found, name));
        let hex = digest.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        assert_eq!(hex, expected["f32_sha256"], "{name}");
    }
}

#[test]
fn mxfp4_experts_are_repacked_or_requantized() {
    let folder = tempdir().unwrap();
    let carried = |bits: &str, group: &str| {
        let to = folder.path().join(format!("{bits}-{group}"));
        let set = convert(SOURCE, &to, &["--bits", bits, "--group-size", group]);
        let report = json(&set.join("report.json"));
        let tensor = &report["tensors"]["model.layers.0.mlp.experts.up_proj.weight"];
        (
            tensor["prequantized"].as_str().unwrap().to_owned(),
            tensor["relative_rmse"].as_f64().unwrap(),
        )
    };
    // e2m1 in steps of a half from -6 to 6 needs five bits.
    assert_eq!(carried("6", "32"), ("repacked".to_owned(), 0.0));
    let (what, rmse) = carried("4", "32");
    assert!(what == "requantized" && 0.0 < rmse && rmse < 0.12, "{what} {rmse}");
    for bits in [4, 6] {
        let [one, three] = [1, 3].map(|nodes| {
            let set = folder.path().join(format!("sharded-{bits}-{nodes}"));
            write(&data(SOURCE), &set, bits, nodes, ExpertSharding::Inside);
            join(&set, nodes)
        });
        assert!(one == three, "{bits} bits");
    }
}
