//! Families with mixtures of experts, MLA or linear attention: logits of transformers, and packages that
//! join to the one-node package.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::SafeTensors;
use serde_json::Value;
use shardpack_converter::plan::ExpertSharding;
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{check_families, check_families_joined, write},
};

/// Folders of the reference models, and whether they have experts.
pub(crate) const FAMILIES: &[(&str, bool)] = &[
    ("qwen3_moe", true),
    ("mixtral", true),
    ("glm4_moe", true),
    ("deepseek_v3", true),
    ("kimi_k2", true),
    ("qwen3_next", true),
    ("qwen3_5", false),
    ("qwen3_5_vl", false),
    ("minimax_m2", true),
    ("ernie4_5_moe", true),
    ("gpt_oss", true),
];

#[test]
fn logits_at_16_bits_match_transformers() {
    check_families(FAMILIES, 3);
}

#[test]
fn packages_of_any_number_of_nodes_join_to_the_one_node_package() {
    check_families_joined(FAMILIES);
}

/// Writes a checkpoint like `model` whose experts are fused: one tensor for all gates and ups of
/// a layer, one for all downs.
fn fuse(model: &Path, out: &Path, block: &str, [gate, up, down]: [&str; 3]) {
    fs::create_dir_all(out).unwrap();
    let mut tensors: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let file = fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
                let held = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                tensors.insert(name, held);
            }
        }
    }
    fs::copy(model.join("config.json"), out.join("config.json")).unwrap();
    for layer in 0.. {
        if !tensors.contains_key(&format!("model.layers.{layer}.input_layernorm.weight")) {
            break;
        }
        let prefix = format!("model.layers.{layer}.{block}.experts");
        let (mut sides, mut downs) = (Vec::new(), Vec::new());
        let mut shape = Vec::new();
        let mut count = 0;
        while let Some(found) = tensors.remove(&format!("{prefix}.{count}.{gate}.weight")) {
            let mut take =
                |name| tensors.remove(&format!("{prefix}.{count}.{name}.weight")).unwrap();
            sides.extend([found.2, take(up).2].concat());
            downs.extend(take(down).2);
            shape = found.1;
            count += 1;
        }
        if count > 0 {
            let kind = safetensors::Dtype::BF16;
            let side = vec![count, 2 * shape[0], shape[1]];
            tensors.insert(format!("{prefix}.gate_up_proj"), (kind, side, sides));
            let down = vec![count, shape[1], shape[0]];
            tensors.insert(format!("{prefix}.down_proj"), (kind, down, downs));
        }
    }
    let views = tensors.iter().map(|(name, (kind, shape, bytes))| {
        let view = safetensors::tensor::TensorView::new(*kind, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    fs::write(out.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn fused_expert_tensors_give_the_same_packages() {
    let folder = tempdir().unwrap();
    for (model, block, names) in [
        ("qwen3_moe", "mlp", ["gate_proj", "up_proj", "down_proj"]),
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
    ] {
        let source = data("models").join(model);
        let fused = folder.path().join(format!("{model}-fused"));
        fuse(&source, &fused, block, names);
        let sets = [source, fused].map(|source| {
            let set = folder.path().join("set");
            write(&source, &set, 4, 2, ExpertSharding::Inside);
            let found = [0, 1].map(|rank| {
                let text = fs::read(set.join(format!("node-{rank}/manifest.json"))).unwrap();
                serde_json::from_slice::<Value>(&text).unwrap()["tensors"].clone()
            });
            fs::remove_dir_all(set).unwrap();
            found
        });
        assert_eq!(sets[0], sets[1], "{model}");
    }
}
