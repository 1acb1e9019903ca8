//! Attention to chosen blocks of keys: what the choice must not depend on, and what it is while all
//! are chosen. What it computes is compared with transformers among the other families.

use std::path::Path;

use serde_json::json;
use shardpack_converter::plan::ExpertCut;
use shardpack_formats::memory::KvType;
use tempfile::tempdir;

use crate::{
    company::{changed, check_company, check_steps, expected, in_steps},
    experts::{open, write},
    harness::data,
};

/// Two of its four layers choose two blocks of eight keys for each of two key-value heads.
const MODEL: &str = "minimax_m3_vl_text";

#[test]
fn a_choice_of_blocks_does_not_depend_on_steps_and_threads() {
    check_steps(MODEL);
}

#[test]
fn company_chunks_and_pages_of_others_change_no_choice_of_blocks() {
    check_company(MODEL, [0, 512, 256]);
}

#[test]
fn while_all_blocks_are_chosen_the_bits_are_those_without_a_choice() {
    let folder = tempdir().unwrap();
    let tokens = expected(MODEL, "tokens_b");
    let dense = folder.path().join("dense");
    changed(MODEL, &dense, &json!({"layer_types": vec!["full_attention"; 4]}), ".indexer.");
    let wide = folder.path().join("wide");
    changed(MODEL, &wide, &json!({"index_topk_blocks": tokens.len() / 8}), "?");
    let compute = |source: &Path, name: &str, steps: &[usize]| {
        let set = folder.path().join(name);
        write(source, &set, 16, 2, ExpertCut::Inside);
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
