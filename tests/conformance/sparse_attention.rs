//! Sparse attention (top-k indices of an indexer): batch invariance, full attention while every key is
//! selected, and packages and checkpoints without an indexer. Its logits are compared with
//! transformers in `other_families`.

use std::{fs, path::Path};

use serde_json::Value;
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::engine::{LocalModel, memory_group};
use shardpack_formats::memory::KvType;
use tempfile::tempdir;

use crate::{
    batch_invariance::{backends, check_batch_invariance, check_chunking_invariance, in_steps},
    harness::{convert, data, fail, path, succeed},
    reference_models::{changed, expected, open, write},
};

/// Reference models that choose eight keys.
const MODELS: [&str; 3] = ["deepseek_v32", "glm_moe_dsa_shared", "hy_v4"];

#[test]
fn chunking_and_threads_change_no_logit_bit() {
    MODELS.into_iter().for_each(check_chunking_invariance);
}

#[test]
fn batch_chunking_and_prefix_cache_change_no_token() {
    for model in MODELS {
        check_batch_invariance(model, [0, 512, 256]);
    }
}

#[test]
fn selecting_every_key_equals_full_attention_bit_for_bit() {
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
        write(source, &set, 16, 2, ExpertSharding::Inside);
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
fn pipeline_stages_begin_at_layers_with_their_own_indexer() {
    let folder = tempdir().unwrap();
    let source = data("models/glm_moe_dsa_shared");
    let out = folder.path().join("set");
    let options = ["--nodes", "3", "--stages", "3"];
    let args = ["convert", path(&source), "-o", path(&out)];
    let error = fail(2, &[&args[..], &options].concat());
    assert!(error.contains("2 layers with an indexer of their own"), "{error}");
    let two = convert("models/glm_moe_dsa_shared", &out, &["--nodes", "2", "--stages", "2"]);
    let shown = succeed(&["inspect", path(&two)]);
    assert!(shown.contains("0..2") && shown.contains("2..4"), "{shown}");
}

#[test]
fn indexers_are_replicated_and_have_at_least_8_bits() {
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
        assert!(found.iter().all(|tensor| tensor["shard"] == "replicated"), "{found:?}");
        let file = |tensor: &Value| tensor["file"].as_str().unwrap().to_owned();
        assert!(found.iter().all(|tensor| file(tensor).contains("shared")), "{found:?}");
    }
}

#[test]
fn a_checkpoint_without_its_indexer_is_refused_by_tensor_name() {
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
fn packages_without_an_indexer_open_with_a_short_context() {
    let folder = tempdir().unwrap();
    let dense = folder.path().join("dense");
    let keys = serde_json::json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3", "max_position_embeddings": 8,
        "index_topk": null, "index_n_heads": null, "index_head_dim": null,
    });
    changed("deepseek_v32", &dense, &keys, ".indexer.");
    let set = folder.path().join("set");
    write(&dense, &set, 16, 1, ExpertSharding::Inside);
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
