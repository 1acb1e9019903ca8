//! Dense families: logits of transformers with no more collectives than the architecture needs, packages
//! that join to the one-node package, and checkpoints that do not match their config.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use shardpack_collectives::{Group, GroupCall, GroupObserver, ObservedGroup};
use shardpack_converter::{ConvertOptions, Plan, Source, plan::ExpertSharding};
use shardpack_engine::engine::{logits, memory_group};
use shardpack_engine_api::TokenId;
use tempfile::tempdir;

use crate::{
    harness::{causes, copy_folder, data},
    reference_models::{ALL_BITS, check_against_transformers, check_joined, open, write},
};

/// Folders of the reference models, their layers, all-reduces in each, and whether the
/// output head is the embedding.
pub(crate) const FAMILIES: &[(&str, u64, u64, bool)] = &[
    ("llama", 3, 2, false),
    ("llama-tied", 3, 2, true),
    ("mistral", 3, 2, false),
    ("ministral3", 3, 2, false),
    ("qwen2", 3, 2, false),
    ("qwen3", 4, 2, false),
    ("gemma2", 4, 2, true),
    ("gemma3_text", 4, 2, true),
    ("phi3", 3, 2, false),
    ("glm4", 3, 2, false),
    ("granite", 4, 2, true),
    ("starcoder2", 4, 2, true),
    ("seed_oss", 3, 2, false),
    // One more for norms over all heads at once.
    ("olmo2", 3, 3, false),
    // Both parts of a parallel block share one.
    ("cohere2", 4, 1, true),
];

#[test]
fn logits_at_16_bits_match_transformers() {
    for (model, ..) in FAMILIES {
        for nodes in 1..=3 {
            check_against_transformers(model, nodes, ExpertSharding::Inside);
        }
    }
}

#[test]
fn packages_of_any_number_of_nodes_join_to_the_one_node_package() {
    // Those of tests/cli/convert.rs apart, which are joined there.
    let here = |model: &&str| !["llama", "llama-tied", "qwen3"].contains(model);
    for model in FAMILIES.iter().map(|(model, ..)| *model).filter(here) {
        check_joined(model, &ALL_BITS, &[2, 3, 4].map(|nodes| (nodes, ExpertSharding::Inside)));
    }
}

/// Counts the collective calls of all ranks.
struct SharedCounter(Arc<AtomicU64>);

impl GroupObserver for SharedCounter {
    fn observe<T>(&self, _: GroupCall, run: impl FnOnce() -> T) -> T {
        self.0.fetch_add(1, Ordering::Relaxed);
        run()
    }
}

#[test]
fn a_step_makes_only_the_collectives_that_its_architecture_needs() {
    for (model, layers, per_layer, tied) in FAMILIES {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        write(&data("models").join(model), &set, 16, 2, ExpertSharding::Inside);
        let packages = open(&set, 2);
        let sharded = packages[0].manifest().layout.embedding_sharded;
        assert!(sharded || !tied, "{model}: a tied embedding is sharded as the head is");
        let calls = Arc::new(AtomicU64::new(0));
        let counted = |inner| {
            let counter = SharedCounter(Arc::clone(&calls));
            Arc::new(ObservedGroup::with_observer(inner, counter)) as Arc<dyn Group>
        };
        let groups: Vec<_> = memory_group(2).unwrap().into_iter().map(counted).collect();
        logits(&packages, &groups, &[TokenId(7), TokenId(300), TokenId(12)], 1).unwrap();
        // The logits, and the rows of a sharded embedding.
        let expected = layers * per_layer + 1 + u64::from(sharded);
        assert_eq!(calls.load(Ordering::Relaxed), 2 * expected, "{model}");
    }
}

/// Why a changed model is refused; it must be before anything is written.
fn refused(model: &str, change: impl FnOnce(&Path)) -> String {
    let folder = tempdir().unwrap();
    let (source, output) = (folder.path().join("source"), folder.path().join("set"));
    copy_folder(&data("models").join(model), &source);
    change(&source);
    let error = Plan::new(&Source::open(&source).unwrap(), ConvertOptions::new(output.clone(), 2))
        .map(drop)
        .expect_err("a plan");
    assert!(!output.exists(), "{model}");
    causes(&error)
}

/// Writes the weights again without, with, or with changed tensors.
fn rewrite(source: &Path, change: impl FnOnce(&mut Vec<(String, Vec<usize>, Vec<u8>)>)) {
    let path = source.join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let mut tensors: Vec<_> = SafeTensors::deserialize(&file)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.shape().to_vec(), view.data().to_vec()))
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn checkpoints_that_do_not_match_their_config_are_refused_before_a_byte_is_written() {
    for (model, ..) in FAMILIES {
        let missing = refused(model, |source| {
            rewrite(source, |all| all.retain(|(name, ..)| name != "model.norm.weight"));
        });
        assert!(missing.contains("1 missing tensor"), "{model}: {missing}");
        assert!(missing.contains("model.norm.weight"), "{model}: {missing}");
        let surplus = refused(model, |source| {
            rewrite(source, |all| {
                all.push(("model.layers.0.extra.weight".to_owned(), vec![1], vec![0; 2]));
            });
        });
        let expected = "1 unknown tensor (named by no rule): model.layers.0.extra.weight [1]";
        assert!(surplus.contains(expected), "{model}: {surplus}");
        let swapped = refused(model, |source| {
            rewrite(source, |all| {
                let wide = |(name, shape, _): &&mut (String, Vec<usize>, _)| {
                    name.contains("layers.1.mlp") && shape.len() == 2 && shape[0] != shape[1]
                };
                all.iter_mut().find(wide).unwrap().1.reverse();
            });
        });
        assert!(swapped.contains("has shape"), "{model}: {swapped}");
        let key = refused(model, |source| {
            let path = source.join("config.json");
            let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            config["residual_gate"] = json!("tanh");
            fs::write(path, config.to_string()).unwrap();
        });
        assert!(key.contains("residual_gate = \"tanh\""), "{model}: {key}");
    }
}
