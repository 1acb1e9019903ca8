//! Hybrid families, whose layers carry recurrent states (Mamba-2, KDA, short convolutions) in place of
//! attention or beside it: logits of transformers on any number of nodes, batch invariance, and the
//! same tokens with speculative decoding.

use shardpack_converter::plan::ExpertSharding;
use shardpack_engine_api::TokenId;
use shardpack_formats::memory::KvType;
use tempfile::tempdir;

use crate::{
    batch_invariance::{check_batch_invariance, in_steps},
    harness::data,
    reference_models::{ALL_BITS, check_families, check_joined, open, write},
    speculative_decoding::check_drafts,
};

/// Folders of the reference models, and whether they have experts.
pub(crate) const FAMILIES: &[(&str, bool)] = &[
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
fn logits_at_16_bits_match_transformers() {
    check_families(FAMILIES, 4);
}

#[test]
fn packages_of_any_number_of_nodes_join_to_the_one_node_package() {
    for (model, _) in FAMILIES {
        check_joined(model, &ALL_BITS, &[(2, ExpertSharding::Inside), (3, ExpertSharding::Inside)]);
    }
}

#[test]
fn batch_and_chunking_change_no_token() {
    for model in ["bailing_hybrid", "falcon_h1_norm", "granitemoehybrid", "kimi_linear", "lfm2_moe"]
    {
        // Pages hold nothing of states.
        check_batch_invariance(model, [0, 0, 0]);
    }
}

#[test]
fn chunking_and_threads_change_no_logit_bit() {
    let folder = tempdir().unwrap();
    let tokens: Vec<_> = (0..90).map(|at| TokenId(3 + (at * at + at / 3) % 61)).collect();
    for (model, _) in FAMILIES {
        for (bits, nodes) in [(16, 1), (4, 2)] {
            let set = folder.path().join(format!("{model}-{bits}"));
            write(&data("models").join(model), &set, bits, nodes, ExpertSharding::Inside);
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
fn speculative_decoding_changes_no_token_or_logprob() {
    for model in ["bailing_hybrid", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2"] {
        check_drafts(model, true);
    }
}
