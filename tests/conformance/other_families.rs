//! Families whose forms have tests of their own elsewhere, or none: logits of transformers, and packages
//! that join to the one-node package.

use std::collections::BTreeSet;

use crate::{
    dense_families, hybrid_families, moe_families,
    reference_models::{all_models, check_families, check_families_joined},
};

/// Folders of the reference models, and whether they have experts.
const FAMILIES: &[(&str, bool)] = &[
    ("apertus", false),
    ("arcee", false),
    ("cohere", false),
    ("cwm", false),
    ("ernie4_5", false),
    ("exaone4", false),
    ("gemma", false),
    ("gemma4_text", false),
    ("glm", false),
    ("granite_swa", false),
    ("helium", false),
    ("hunyuan_v1_dense", false),
    ("hyperclovax", false),
    ("internlm3", false),
    ("iquestcoder", false),
    ("jais2", false),
    ("ministral", false),
    ("nanochat", false),
    ("nemotron", false),
    ("olmo", false),
    ("olmo3", false),
    ("phi", false),
    ("smollm3", false),
    ("stablelm", false),
    ("vaultgemma", false),
    ("youtu", false),
    ("afmoe", true),
    ("axk1", true),
    ("cohere2_moe", true),
    ("deepseek_v2", true),
    ("deepseek_v32", true),
    ("deepseek_v4", true),
    ("minimax_m3_vl_text", true),
    ("gemma4_moe", true),
    ("dots1", true),
    ("exaone_moe", true),
    ("flex_olmo", true),
    ("glm_moe_dsa", true),
    ("glm_moe_dsa_shared", true),
    ("granitemoe", true),
    ("granitemoe_swa", true),
    ("granitemoeshared", true),
    ("hunyuan_v1_moe", true),
    ("hy_v3", true),
    ("hy_v4", true),
    ("kolibri1", true),
    ("laguna", true),
    ("longcat_flash", true),
    ("mellum", true),
    ("phimoe", true),
    ("mistral4", true),
    ("llama4_text", true),
    ("mimo_v2_flash", true),
    ("nemotron_h", true),
    ("solar_open", true),
    ("step3p5", true),
    ("olmoe", true),
    ("qwen2_moe", true),
    ("qwen3_5_moe", true),
];

#[test]
fn logits_at_16_bits_match_transformers() {
    check_families(FAMILIES, 3);
}

#[test]
fn packages_of_any_number_of_nodes_join_to_the_one_node_package() {
    check_families_joined(FAMILIES);
}

#[test]
fn every_reference_model_is_compared_with_transformers() {
    let dense = dense_families::FAMILIES.iter().map(|(model, ..)| *model);
    let lists = [FAMILIES, moe_families::FAMILIES, hybrid_families::FAMILIES];
    let others = lists.iter().copied().flatten().map(|(model, _)| *model);
    let compared: BTreeSet<&str> = dense.chain(others).collect();
    let models = all_models();
    assert!(models.len() >= 93, "{} models", models.len());
    assert_eq!(compared, models.iter().map(String::as_str).collect());
}
