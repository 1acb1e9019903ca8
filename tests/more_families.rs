//! Further families, in one process: what `convert` writes of them computes what transformers
//! computes, and joined packages are the one-node package.

use std::fs;

use shardpack_converter::plan::ExpertCut;
use tempfile::tempdir;

use crate::{
    experts::{check_against_transformers, join, write},
    harness::data,
};

/// Folders of the reference models, and whether they have experts.
const FAMILIES: &[(&str, bool)] = &[
    ("arcee", false),
    ("cohere", false),
    ("cwm", false),
    ("ernie4_5", false),
    ("exaone4", false),
    ("gemma", false),
    ("glm", false),
    ("hunyuan_v1_dense", false),
    ("hyperclovax", false),
    ("internlm3", false),
    ("iquestcoder", false),
    ("jais2", false),
    ("nemotron", false),
    ("olmo3", false),
    ("smollm3", false),
    ("youtu", false),
    ("deepseek_v2", true),
    ("deepseek_v32", true),
    ("dots1", true),
    ("exaone_moe", true),
    ("glm_moe_dsa", true),
    ("glm_moe_dsa_shared", true),
    ("granitemoe", true),
    ("granitemoeshared", true),
    ("hunyuan_v1_moe", true),
    ("hy_v3", true),
    ("mistral4", true),
    ("solar_open", true),
    ("olmoe", true),
    ("qwen2_moe", true),
    ("qwen3_5_moe", true),
];

const CUTS: [ExpertCut; 2] = [ExpertCut::Inside, ExpertCut::Whole];

#[test]
fn sixteen_bits_compute_what_transformers_computes() {
    for (model, has_experts) in FAMILIES {
        for nodes in 1..=3 {
            let cuts = if *has_experts && nodes > 1 { 2 } else { 1 };
            for experts in CUTS.into_iter().take(cuts) {
                check_against_transformers(model, nodes, experts);
            }
        }
    }
}

#[test]
fn joined_packages_are_the_package_of_one_node() {
    for (model, has_experts) in FAMILIES {
        let folder = tempdir().unwrap();
        let source = data("models").join(model);
        for bits in [4, 6, 8, 16] {
            let one = folder.path().join("one");
            write(&source, &one, bits, 1, ExpertCut::Inside);
            let expected = join(&one, 1);
            fs::remove_dir_all(one).unwrap();
            for nodes in 2..=4 {
                let cuts = if *has_experts && nodes == 3 { 2 } else { 1 };
                for experts in CUTS.into_iter().take(cuts) {
                    let set = folder.path().join("set");
                    write(&source, &set, bits, nodes, experts);
                    let same = join(&set, nodes) == expected;
                    assert!(same, "{model}, {bits} bits, {nodes} nodes, {experts:?}");
                    fs::remove_dir_all(set).unwrap();
                }
            }
        }
    }
}
