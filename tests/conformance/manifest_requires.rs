//! `requires` of the manifest: it declares every part of an architecture that a reader of version 1
//! would ignore.

use std::{collections::BTreeSet, fs};

use serde_json::Value;
use shardpack_converter::{Source, plan::ExpertCut};
use shardpack_formats::{Spec, normalise::resolve, rules::RulePack};
use shardpack_manifests::{Manifest, ManifestError, PackageSet};
use tempfile::tempdir;

use crate::{harness::data, reference_models::write};

/// Places in architectures that programs of the first version do not know, and what a package that
/// has them requires. Every later one stands here.
const LATER: &[(&str, &str)] = &[
    ("attention.head_gate", "attention-forms"),
    ("attention.head_gate.function", "further-forms"),
    ("attention.limit", "further-forms"),
    ("attention.blocks", "chosen-blocks"),
    ("attention.position_scale.from_one", "attention-forms"),
    ("attention.position_scale.unrotated", "attention-forms"),
    ("attention.qk_norm=plain_after_rope", "attention-forms"),
    ("attention.sinks_in", "attention-forms"),
    ("attention.value_dim", "attention-forms"),
    ("attention.value_norm", "attention-forms"),
    ("attention.value_scale", "attention-forms"),
    ("block.layer_scale", "layer-forms"),
    ("compressed", "compressed-attention"),
    ("convolution", "short-convolution"),
    ("embedding_norm", "further-forms"),
    ("ffn.activation=xielu", "further-forms"),
    ("head_bias", "further-forms"),
    ("delta.conv_bias", "mamba2"),
    ("delta.direct", "direct-delta"),
    ("delta.factors", "hybrid-forms"),
    ("delta.fade_limit", "direct-delta"),
    ("delta.rule=kimi_delta", "kimi-delta"),
    ("delta.rule=mamba2", "mamba2"),
    ("delta.unnormed", "hybrid-forms"),
    ("ffn.clamped", "chosen-blocks"),
    ("ffn.gate_scale", "hybrid-forms"),
    ("ffn.out_scale", "hybrid-forms"),
    ("compressed", "compressed-attention"),
    ("layers.both", "hybrid-forms"),
    ("layers.chooses_blocks", "chosen-blocks"),
    ("layers.clamp", "layer-forms"),
    ("layers.convolution", "short-convolution"),
    ("layers.dense_clamp", "layer-forms"),
    ("layers.entries", "compressed-attention"),
    ("layers.experts_by_token", "compressed-attention"),
    ("layers.mask.chunked", "attention-forms"),
    ("layers.only", "layer-forms"),
    ("layers.second", "attention-forms"),
    ("layers.shares_keys", "chosen-keys"),
    ("mla.index", "chosen-keys"),
    ("mla.kv_scale", "deferred-experts"),
    ("moe.deferred", "deferred-experts"),
    ("moe.identities", "deferred-experts"),
    ("mla.index.rotated_last", "latent-forms"),
    ("moe.activation=relu_squared", "expert-forms"),
    ("moe.after", "further-forms"),
    ("moe.beside", "expert-forms"),
    ("moe.clamped.plain", "expert-limits"),
    ("moe.latent", "expert-forms"),
    ("moe.router.expert_scales", "expert-forms"),
    ("moe.router.input", "expert-forms"),
    ("moe.router.jitter", "further-forms"),
    ("moe.router.scores=sigmoid_of_taken", "expert-forms"),
    ("moe.router.scores=sparse_mixer", "further-forms"),
    ("moe.router.scores=sqrt_softplus", "compressed-attention"),
    ("moe.router.softcap", "further-forms"),
    ("moe.shared.limit", "compressed-attention"),
    ("moe.shared.scale", "further-forms"),
    ("moe.weighs_inputs", "expert-forms"),
    ("norm.plain", "further-forms"),
    ("second_attention", "attention-forms"),
    ("second_attention.head_gate.function", "further-forms"),
    ("second_attention.values_are_keys", "attention-forms"),
    ("streams", "hyper-connections"),
    ("streams.mixed", "compressed-attention"),
];

/// Families of the first version: between them they have every place that it knows.
fn is_first(model: &str) -> bool {
    const LATER_FAMILIES: [&str; 31] = [
        "afmoe",
        "apertus",
        "axk1",
        "bailing_hybrid",
        "cohere2_moe",
        "deepseek_v32",
        "deepseek_v4",
        "falcon_h1",
        "falcon_h1_norm",
        "gemma4_moe",
        "gemma4_text",
        "kolibri1",
        "laguna",
        "nanochat",
        "olmo",
        "phi",
        "phimoe",
        "glm_moe_dsa",
        "glm_moe_dsa_shared",
        "granitemoehybrid",
        "granitemoehybrid_dense",
        "hy_v4",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama4_text",
        "longcat_flash",
        "mimo_v2_flash",
        "minimax_m3_vl_text",
        "nemotron_h",
        "step3p5",
    ];
    !LATER_FAMILIES.contains(&model)
}

/// All places of a document with a value, and the values that are words.
fn places(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                // Every rule has a name of its own.
                if key != "rule" || at == *key {
                    found.insert(at.clone());
                }
                places(value, &at, found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| places(value, at, found)),
        Value::String(word)
            if ["qk_norm", "scores", "activation", ".rule"].iter().any(|it| at.ends_with(it)) =>
        {
            found.insert(format!("{at}={word}"));
        }
        _ => {}
    }
}

/// The architectures of all reference models, by name.
fn architectures() -> Vec<(String, Spec)> {
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

#[test]
fn every_feature_that_version_1_lacks_is_required() {
    let of = |spec: &Spec| {
        let mut found = BTreeSet::new();
        places(&serde_json::to_value(spec).unwrap(), "", &mut found);
        found
    };
    let all = architectures();
    assert!(all.len() >= 64, "{}", all.len());
    let (first, later): (Vec<_>, Vec<_>) = all.iter().partition(|(model, _)| is_first(model));
    let mut known: BTreeSet<String> = first.iter().flat_map(|(_, spec)| of(spec)).collect();
    // Experts with these gates were computed before a family had them.
    known.extend(["gelu_glu", "gelu_tanh_glu"].map(|word| format!("moe.activation={word}")));
    for (model, spec) in first {
        assert!(spec.features().is_empty(), "{model}: {:?}", spec.features());
    }
    let is_part = |place: &str, whole: &str| {
        place.strip_prefix(whole).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut unclear = BTreeSet::new();
    let mut used: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (model, spec) in later {
        let mut required = BTreeSet::new();
        for place in of(spec) {
            let declared = LATER.iter().rev().find(|(later, _)| is_part(&place, later));
            if declared.is_some() == known.contains(&place) {
                unclear.insert(place);
            }
            required.extend(declared.map(|(_, feature)| *feature));
            used.extend(declared);
        }
        // These of other attention came later to attention over a latent.
        let attention = &spec.attention;
        if spec.mla.is_some() && (attention.sinks || attention.head_gate.is_some()) {
            required.insert("latent-forms");
        }
        let features: BTreeSet<&str> = spec.features().into_iter().collect();
        assert_eq!(features, required, "{model}");
    }
    assert!(unclear.is_empty(), "either of the first version or declared: {unclear:?}");
    let unused: Vec<_> = LATER.iter().filter(|later| !used.contains(later)).collect();
    assert!(unused.is_empty(), "no reference model has {unused:?}");
}

#[test]
fn a_reader_without_a_required_feature_refuses_the_package() {
    let folder = tempdir().unwrap();
    for (model, features) in [
        ("qwen3", &[][..]),
        ("nemotron_h", &["expert-forms", "layer-forms", "mamba2"]),
        ("apertus", &["further-forms"]),
        ("gemma4_text", &["attention-forms", "layer-forms"]),
        ("deepseek_v32", &["chosen-keys"]),
        ("deepseek_v4", &["compressed-attention", "expert-limits", "hyper-connections"]),
        ("bailing_hybrid", &["attention-forms", "direct-delta", "kimi-delta", "latent-forms"]),
        ("falcon_h1", &["attention-forms", "hybrid-forms", "mamba2"]),
        (
            "hy_v4",
            &[
                "attention-forms",
                "chosen-keys",
                "expert-limits",
                "hyper-connections",
                "latent-forms",
            ],
        ),
        ("lfm2", &["short-convolution"]),
        ("longcat_flash", &["deferred-experts"]),
        ("minimax_m3_vl_text", &["chosen-blocks"]),
    ] {
        let set = folder.path().join(model);
        write(&data("models").join(model), &set, 4, 2, ExpertCut::Inside);
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
