//! Compressed KV entries: batch invariance, and how compressors and entries are stored. Logits are
//! compared with transformers in `other_families`.

use std::fs;

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    batch_invariance::{check_batch_invariance, check_chunking_invariance},
    harness::{convert, fail, path},
    reference_models::changed,
};

const MODEL: &str = "deepseek_v4";

#[test]
fn chunking_and_threads_change_no_logit_bit() {
    check_chunking_invariance(MODEL);
}

/// Pages carry the compressor inputs of which the next page's first entries are made.
#[test]
fn batch_chunking_and_prefix_cache_change_no_token() {
    check_batch_invariance(MODEL, [0, 512, 256]);
}

#[test]
fn compressors_and_hash_routing_tables_are_replicated_and_head_groups_sharded() {
    let folder = tempdir().unwrap();
    let set = convert(
        &format!("models/{MODEL}"),
        &folder.path().join("set"),
        &["--bits", "4", "--nodes", "2"],
    );
    let mut groups = 0;
    for rank in 0..2 {
        let text = fs::read(set.join(format!("node-{rank}/manifest.json"))).unwrap();
        let manifest: Value = serde_json::from_slice(&text).unwrap();
        let tensors = manifest["tensors"].as_array().unwrap();
        let named = |part: &str| -> Vec<&Value> {
            let has = |it: &&Value| it["name"].as_str().unwrap().contains(part);
            tensors.iter().filter(has).collect()
        };
        for (part, dtype) in [("position_bias", "F32"), ("tid2eid", "F32"), ("_hc.", "F32")] {
            let found = named(part);
            assert!(!found.is_empty(), "{part}");
            for tensor in found {
                assert_eq!([&tensor["shard"], &tensor["dtype"]], ["replicated", dtype], "{tensor}");
            }
        }
        assert!(named(".compressor.").iter().all(|it| it["shard"] == "replicated"));
        groups += named("layers.0.self_attn.o_a_proj.weight")[0]["shape"][0].as_u64().unwrap();
        let eight =
            &manifest["quantization"]["overrides"]["model.layers.1.self_attn.compressor.kv_proj"];
        assert!(eight.to_string().contains('8'), "{eight}");
    }
    assert_eq!(groups, 3);
}

#[test]
fn compression_ratios_that_do_not_divide_a_kv_page_are_refused() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("source");
    let rates = json!({"compressed_sparse_attention": 4, "heavily_compressed_attention": 12});
    changed(MODEL, &source, &json!({"compress_rates": rates}), "?");
    let out = folder.path().join("set");
    let error = fail(1, &["convert", path(&source), "-o", path(&out)]);
    assert!(error.contains("a divisor of 256") && error.contains("12"), "{error}");
    assert!(!out.exists());
}
