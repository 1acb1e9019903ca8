//! Documents of every format version: format 1 is refused, and read for what rewrites it.

use std::{fs, path::Path};

use serde_json::json;

use super::rename;
use crate::{Manifest, PackageSet, manifest::ManifestError};

fn golden(format: u32, name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/packages");
    fs::read(folder.join(format!("format-{format}")).join(name)).unwrap()
}

#[test]
fn format_1_is_refused_with_what_to_do() {
    let manifest = Manifest::parse(&golden(1, "node-0/manifest.json")).unwrap_err();
    let set = PackageSet::parse(&golden(1, "set.json")).unwrap_err();
    for error in [manifest, set] {
        assert!(matches!(error, ManifestError::Earlier { found: 1 }), "{error}");
        assert_eq!(
            error.to_string(),
            "package format 1, this program reads 2; rewrite the package set with `shardpack reshard \
             SET -o NEW --nodes N` (its weights stay as they are), or convert the model again"
        );
    }
}

#[test]
fn a_later_format_is_refused_as_such() {
    let text = String::from_utf8(golden(2, "node-0/manifest.json")).unwrap();
    let later = text.replace("\"format\":2", "\"format\":3");
    for parse in [Manifest::parse, Manifest::parse_any_format] {
        let error = parse(later.as_bytes()).unwrap_err();
        assert!(matches!(error, ManifestError::Format { found: 3 }), "{error}");
    }
}

#[test]
fn format_2_parses() {
    let manifest = Manifest::parse(&golden(2, "node-0/manifest.json")).unwrap();
    assert_eq!((manifest.format, manifest.requires), (2, vec!["moe".to_owned()]));
    assert_eq!(PackageSet::parse(&golden(2, "set.json")).unwrap().format, 2);
}

#[test]
fn format_1_says_the_same_in_the_names_of_format_2() {
    let old = Manifest::parse_any_format(&golden(1, "node-0/manifest.json")).unwrap();
    let new = Manifest::parse(&golden(2, "node-0/manifest.json")).unwrap();
    assert_eq!(old.format, 1);
    assert_ne!(old.ids, new.ids);
    // Weights, text files and where they stand are the same.
    assert_eq!(old, Manifest { format: 1, ids: old.ids.clone(), ..new });
    let old = PackageSet::parse_any_format(&golden(1, "set.json")).unwrap();
    assert_eq!((old.format, old.requires.len()), (1, 0));
}

#[test]
fn features_of_format_1_are_known_and_others_refused() {
    let text = String::from_utf8(golden(1, "node-0/manifest.json")).unwrap();
    let requiring = |feature: &str| {
        let text = text.replace("\"requires\":[]", &format!("\"requires\":[\"{feature}\"]"));
        Manifest::parse_any_format(text.as_bytes())
    };
    // What a package requires is told anew from its architecture.
    assert_eq!(requiring("chosen-keys").unwrap().requires, ["moe"]);
    let error = requiring("sparse-attention").unwrap_err();
    assert!(matches!(error, ManifestError::Feature { .. }), "{error}");
}

#[test]
fn names_are_replaced_at_their_place_alone() {
    let mut manifest = json!({
        "architecture": {
            "delta": {"rule": "kimi_delta", "value_dim": 32, "kernel": 4},
            "attention": {"value_dim": 8, "delta": 1},
            "layers": [{"delta": true, "rope": 0}, {"entries": {"every": 4, "chosen": true}}],
            "mla": {"rope": 8, "index": {"width": 16}},
        },
        "layout": {"embedding_cut": true},
        "tensors": [{"cut": "replicated", "delta": 2}],
    });
    rename(&mut manifest);
    assert_eq!(
        manifest,
        json!({
            "architecture": {
                "linear_attention": {
                    "kind": "kimi_delta_attention", "value_dim": 32, "conv_kernel_size": 4,
                },
                "attention": {"v_head_dim": 8, "delta": 1},
                "layers": [
                    {"linear_attention": true, "rope": 0},
                    {"compressed_kv": {"compression_ratio": 4, "sparse": true}},
                ],
                "mla": {"qk_rope_head_dim": 8, "indexer": {"head_dim": 16}},
            },
            "layout": {"embedding_sharded": true},
            "tensors": [{"shard": "replicated", "delta": 2}],
        })
    );
}
