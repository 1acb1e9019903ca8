//! Attention to entries of far tokens: what it must not depend on, and how it is kept. What it
//! computes is compared with transformers among the other families.

use std::fs;

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    company::{changed, check_company, check_steps},
    harness::{convert, fail, path},
};

const MODEL: &str = "deepseek_v4";

#[test]
fn entries_do_not_depend_on_steps_and_threads() {
    check_steps(MODEL);
}

/// Pages carry the numbers of which the next page's first entries are made.
#[test]
fn company_chunks_and_pages_of_others_change_no_token() {
    check_company(MODEL, [0, 512, 256]);
}

#[test]
fn entries_and_tables_stand_whole_on_every_rank_and_groups_of_heads_are_cut() {
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
fn entries_that_no_page_holds_are_refused() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("source");
    let rates = json!({"compressed_sparse_attention": 4, "heavily_compressed_attention": 12});
    changed(MODEL, &source, &json!({"compress_rates": rates}), "?");
    let out = folder.path().join("set");
    let error = fail(1, &["convert", path(&source), "-o", path(&out)]);
    assert!(error.contains("a divisor of 256") && error.contains("12"), "{error}");
    assert!(!out.exists());
}
