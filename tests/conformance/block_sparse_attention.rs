//! Block-sparse attention: batch invariance, and full attention while every block is selected. Its
//! logits are compared with transformers in `other_families`.

use std::path::Path;

use serde_json::json;
use shardpack_converter::plan::ExpertSharding;
use shardpack_formats::memory::KvType;
use tempfile::tempdir;

use crate::{
    batch_invariance::{check_batch_invariance, check_chunking_invariance, in_steps},
    harness::data,
    reference_models::{changed, expected, open, write},
};

/// Two of its four layers choose two blocks of eight keys for each of two key-value heads.
const MODEL: &str = "minimax_m3_vl_text";

#[test]
fn chunking_and_threads_change_no_logit_bit() {
    check_chunking_invariance(MODEL);
}

#[test]
fn batch_chunking_and_prefix_cache_change_no_token() {
    check_batch_invariance(MODEL, [0, 512, 256]);
}

#[test]
fn selecting_every_block_equals_full_attention_bit_for_bit() {
    let folder = tempdir().unwrap();
    let tokens = expected(MODEL, "tokens_b");
    let dense = folder.path().join("dense");
    changed(MODEL, &dense, &json!({"layer_types": vec!["full_attention"; 4]}), ".indexer.");
    let wide = folder.path().join("wide");
    changed(MODEL, &wide, &json!({"index_topk_blocks": tokens.len() / 8}), "?");
    let compute = |source: &Path, name: &str, steps: &[usize]| {
        let set = folder.path().join(name);
        write(source, &set, 16, 2, ExpertSharding::Inside);
        in_steps(&open(&set, 2), &tokens, steps, (1, KvType::F32))
    };
    let expected = compute(&dense, "dense-set", &[tokens.len()]);
    assert_eq!(compute(&wide, "wide-set", &[tokens.len()]), expected);
    assert_eq!(compute(&wide, "wide-steps", &[9, 1]), expected);
    // Two blocks: the first sixteen rows, and no other.
    let row = expected.len() / tokens.len();
    let narrow = compute(&data("models").join(MODEL), "narrow", &[tokens.len()]);
    assert_eq!(narrow[..16 * row], expected[..16 * row]);
    assert_ne!(narrow[16 * row..], expected[16 * row..]);
}
