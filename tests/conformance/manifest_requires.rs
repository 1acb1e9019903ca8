//! What a package requires of its reader: every operator beyond the plain decoder is named, so that a
//! program without it refuses the package.

use std::{collections::BTreeSet, fs};

use serde_json::Value;
use shardpack_converter::{ConvertOptions, Plan, Source, plan::ExpertSharding};
use shardpack_formats::{Spec, normalise::resolve, rules::RulePack};
use shardpack_manifests::{Manifest, ManifestError, PackageSet};
use tempfile::tempdir;

use crate::{harness::data, reference_models::write};

/// Fields of architectures that the plain decoder does not have, and the operator that a package with
/// them requires; of several the last one counts.
const OPERATORS: &[(&str, &str)] = &[
    ("attention.block_sparse", "block-sparse-attention"),
    ("attention.clip_qkv", "qkv-clipping"),
    ("attention.output_gate", "attention-output-gate"),
    ("attention.output_gate_in_q", "attention-output-gate"),
    ("attention.qk_norm=plain_after_rope", "unweighted-norm"),
    ("attention.sinks", "attention-sinks"),
    ("attention.sinks_tensor", "attention-sinks"),
    ("attention.temperature_tuning", "attention-temperature-tuning"),
    ("attention.v_head_dim", "asymmetric-head-dims"),
    ("attention.v_norm", "value-norm"),
    ("attention.v_scale", "value-scale"),
    ("block.layer_scale", "layer-scale"),
    ("compressed_attention", "compressed-kv"),
    ("embedding", "embedding"),
    ("embedding_norm", "embedding-norm"),
    ("ffn.activation=xielu", "xielu"),
    ("ffn.clamped_swiglu", "clamped-swiglu"),
    ("ffn.gate_scale", "mup-multipliers"),
    ("ffn.out_scale", "mup-multipliers"),
    ("hyper_connections", "hyper-connections"),
    ("layers.block_sparse", "block-sparse-attention"),
    ("layers.compressed_kv", "compressed-kv"),
    ("layers.dense_swiglu_limit", "clamped-swiglu"),
    ("layers.expert_swiglu_limit", "clamped-swiglu"),
    ("layers.hash_routing", "hash-routing"),
    ("layers.linear_attention", "linear-attention"),
    ("layers.mask.bidirectional_sliding", "bidirectional-attention"),
    ("layers.mask.chunked", "chunked-attention"),
    ("layers.moe", "moe"),
    ("layers.only", "single-block-layers"),
    ("layers.parallel_attention", "parallel-linear-attention"),
    ("layers.reuses_top_k", "sparse-attention"),
    ("layers.second_attention", "heterogeneous-attention"),
    ("layers.short_convolution", "short-convolution"),
    ("linear_attention", "linear-attention"),
    ("linear_attention.kind=kimi_delta_attention", "kimi-delta-attention"),
    ("linear_attention.kind=mamba2", "mamba2"),
    ("linear_attention.multipliers", "mup-multipliers"),
    ("lm_head_bias", "lm-head-bias"),
    ("mla", "mla"),
    ("mla.indexer", "sparse-attention"),
    ("moe", "moe"),
    ("moe.clamped_swiglu", "clamped-swiglu"),
    ("moe.latent_size", "latent-moe"),
    ("moe.parallel_dense", "parallel-dense-moe"),
    ("moe.shared_expert.swiglu_limit", "clamped-swiglu"),
    ("moe.shortcut", "shortcut-moe"),
    ("moe.zero_experts", "zero-computation-experts"),
    ("norm.unweighted", "unweighted-norm"),
    ("second_attention", "heterogeneous-attention"),
    ("second_attention.k_eq_v", "k-eq-v"),
    ("second_attention.output_gate", "attention-output-gate"),
    ("second_attention.sinks", "attention-sinks"),
    ("second_attention.sinks_tensor", "attention-sinks"),
    ("second_attention.v_head_dim", "asymmetric-head-dims"),
    ("second_attention.v_norm", "value-norm"),
    ("second_attention.v_scale", "value-scale"),
    ("short_convolution", "short-convolution"),
];

/// Families of the plain decoder: between them they have every field that needs no feature.
fn is_plain(model: &str) -> bool {
    const PLAIN: [&str; 34] = [
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "llama-tied",
        "llama",
        "ministral",
        "mistral",
        "nemotron",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "vaultgemma",
    ];
    PLAIN.contains(&model)
}

/// All places of a document with a value, and the values that are words.
fn places(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                found.insert(at.clone());
                places(value, &at, found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| places(value, at, found)),
        Value::String(word)
            if ["qk_norm", "scoring", "activation", ".kind"].iter().any(|it| at.ends_with(it)) =>
        {
            found.insert(format!("{at}={word}"));
        }
        _ => {}
    }
}

/// The architectures of all reference models, by name.
pub(crate) fn architectures() -> Vec<(String, Spec)> {
    let packs = RulePack::builtin();
    let folders = fs::read_dir(data("models")).unwrap().map(|entry| entry.unwrap().path());
    folders
        .filter(|folder| folder.is_dir())
        .map(|folder| {
            let source = Source::open(&folder).unwrap();
            let model = resolve(&source.config, &source.source_tensors(), &packs).unwrap();
            (folder.file_name().unwrap().to_str().unwrap().to_owned(), model.spec)
        })
        .collect()
}

/// The same of the embedding models.
fn embedding_models() -> Vec<(String, Spec)> {
    let model = |name: &str| {
        let source = Source::open(&data("embeddings").join(name)).unwrap();
        let plan = Plan::new(&source, ConvertOptions::new("set".into(), 1)).unwrap();
        (name.to_owned(), plan.normalised.spec)
    };
    ["qwen3_embedding", "e5_mistral", "embedding_gemma"].map(model).to_vec()
}

#[test]
fn every_operator_beyond_the_plain_decoder_is_required() {
    let of = |spec: &Spec| {
        let mut found = BTreeSet::new();
        places(&serde_json::to_value(spec).unwrap(), "", &mut found);
        found
    };
    let mut all = architectures();
    all.extend(embedding_models());
    assert!(all.len() >= 64, "{}", all.len());
    let (plain, others): (Vec<_>, Vec<_>) = all.iter().partition(|(model, _)| is_plain(model));
    let known: BTreeSet<String> = plain.iter().flat_map(|(_, spec)| of(spec)).collect();
    for (model, spec) in plain {
        assert!(spec.features().is_empty(), "{model}: {:?}", spec.features());
    }
    let is_part = |place: &str, whole: &str| {
        place.strip_prefix(whole).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut unclear = BTreeSet::new();
    let mut declared_by_all = BTreeSet::new();
    let mut used: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (model, spec) in others {
        let mut required = BTreeSet::new();
        for place in of(spec) {
            let declared = OPERATORS.iter().rev().find(|(whole, _)| is_part(&place, whole));
            if declared.is_some() == known.contains(&place) {
                unclear.insert(place);
            }
            required.extend(declared.map(|(_, feature)| *feature));
            used.extend(declared);
        }
        let features: BTreeSet<&str> = spec.features().into_iter().collect();
        assert_eq!(features, required, "{model}");
        declared_by_all.extend(features);
    }
    assert!(unclear.is_empty(), "either plain or an operator's: {unclear:?}");
    let unused: Vec<_> = OPERATORS.iter().filter(|row| !used.contains(row)).collect();
    assert!(unused.is_empty(), "no reference model has {unused:?}");
    let features: Vec<&str> = Spec::known_features().collect();
    assert!(features.is_sorted());
    assert_eq!(features, declared_by_all.into_iter().collect::<Vec<_>>());
}

#[test]
fn a_reader_without_a_required_feature_refuses_the_package() {
    let folder = tempdir().unwrap();
    for (model, features) in [
        ("qwen3", &[][..]),
        ("nemotron_h", &["latent-moe", "linear-attention", "mamba2", "moe", "single-block-layers"]),
        ("apertus", &["xielu"]),
        ("gemma4_text", &["heterogeneous-attention", "k-eq-v", "layer-scale", "value-norm"]),
        ("deepseek_v32", &["mla", "moe", "sparse-attention"]),
        (
            "deepseek_v4",
            &[
                "attention-sinks",
                "clamped-swiglu",
                "compressed-kv",
                "hash-routing",
                "hyper-connections",
                "moe",
            ],
        ),
        (
            "bailing_hybrid",
            &["attention-output-gate", "kimi-delta-attention", "linear-attention", "mla", "moe"],
        ),
        (
            "falcon_h1",
            &[
                "linear-attention",
                "mamba2",
                "mup-multipliers",
                "parallel-linear-attention",
                "value-scale",
            ],
        ),
        (
            "hy_v4",
            &[
                "attention-output-gate",
                "attention-sinks",
                "clamped-swiglu",
                "hyper-connections",
                "mla",
                "moe",
                "sparse-attention",
            ],
        ),
        ("lfm2", &["short-convolution"]),
        ("longcat_flash", &["mla", "moe", "shortcut-moe", "zero-computation-experts"]),
        ("minimax_m3_vl_text", &["block-sparse-attention", "clamped-swiglu", "moe"]),
    ] {
        let set = folder.path().join(model);
        write(&data("models").join(model), &set, 4, 2, ExpertSharding::Inside);
        let document = PackageSet::parse(&fs::read(set.join("set.json")).unwrap()).unwrap();
        assert_eq!(document.requires, features, "{model}");
        for node in ["node-0", "node-1"] {
            let bytes = fs::read(set.join(node).join("manifest.json")).unwrap();
            assert_eq!(Manifest::parse(&bytes).unwrap().requires, features, "{model}, {node}");
            // Another program's list of features has other names.
            for feature in features {
                let text = String::from_utf8(bytes.clone()).unwrap();
                let unknown = text.replace(&format!("\"{feature}\""), "\"a-later-idea\"");
                let error = Manifest::parse(unknown.as_bytes()).unwrap_err();
                let says = matches!(&error, ManifestError::Feature { feature } if feature == "a-later-idea");
                assert!(says, "{model}: {error}");
            }
        }
    }
}
