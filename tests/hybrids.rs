//! Families whose layers carry states from token to token, in place of attention or beside it: what
//! `convert` writes of them computes what transformers computes, on any number of nodes, in any
//! company, with drafts or without.

use shardpack_converter::plan::ExpertCut;
use shardpack_formats::memory::KvType;
use shardpack_loader::engine::TokenId;
use tempfile::tempdir;

use crate::{
    company::{check_company, in_steps},
    experts::{check_families, check_joined, open, write},
    harness::data,
    speculation::check_drafts,
};

/// Folders of the reference models, and whether they have experts.
const FAMILIES: &[(&str, bool)] = &[
    ("bailing_hybrid", true),
    ("falcon_h1", false),
    ("falcon_h1_norm", false),
    ("granitemoehybrid", true),
    ("granitemoehybrid_dense", false),
    ("kimi_linear", true),
    ("lfm2", false),
    ("lfm2_moe", true),
];

#[test]
fn sixteen_bits_compute_what_transformers_computes() {
    check_families(FAMILIES, 4);
}

#[test]
fn joined_packages_are_the_package_of_one_node() {
    for (model, _) in FAMILIES {
        check_joined(model, &[(2, ExpertCut::Inside), (3, ExpertCut::Inside)]);
    }
}

#[test]
fn company_and_chunks_change_no_token() {
    for model in ["bailing_hybrid", "falcon_h1_norm", "granitemoehybrid", "kimi_linear", "lfm2_moe"]
    {
        // Pages hold nothing of states.
        check_company(model, [0, 0, 0]);
    }
}

#[test]
fn logits_do_not_depend_on_steps_and_threads() {
    let folder = tempdir().unwrap();
    let tokens: Vec<_> = (0..90).map(|at| TokenId(3 + (at * at + at / 3) % 61)).collect();
    for (model, _) in FAMILIES {
        for (bits, nodes) in [(16, 1), (4, 2)] {
            let set = folder.path().join(format!("{model}-{bits}"));
            write(&data("models").join(model), &set, bits, nodes, ExpertCut::Inside);
            let packages = open(&set, nodes);
            let whole = in_steps(&packages, &tokens, &[tokens.len()], (1, KvType::F32));
            for (steps, threads) in [(&[1][..], 1), (&[5], 2), (&[30, 1], 1)] {
                let found = in_steps(&packages, &tokens, steps, (threads, KvType::F32));
                assert!(found == whole, "{model}, {bits} bits, steps of {steps:?}");
            }
        }
    }
}

#[test]
fn drafts_change_no_bit() {
    for model in ["bailing_hybrid", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2"] {
        check_drafts(model, true);
    }
}
