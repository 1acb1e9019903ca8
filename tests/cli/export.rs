//! What `export --hf` writes: the tensors of the published checkpoint, whatever packages call them.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, path, succeed},
    reshard::{json, weights},
};

type Tensors = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

/// The text model's tensors of a folder: without towers, and without layers beyond the last one,
/// which predict further tokens.
fn text_model(folder: &Path) -> Tensors {
    let config = json(&folder.join("config.json"));
    let layers = |config: &Value| {
        config["num_hidden_layers"].as_u64().or_else(|| config["num_layers"].as_u64())
    };
    let layers = layers(&config).or_else(|| layers(&config["text_config"])).unwrap();
    let kept = |name: &str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        let is_beyond = layer.is_some_and(|layer| layer.parse::<u64>().unwrap() >= layers);
        let left_out = ["mtp.", "model.mtp.", "model.mtp_layers.", "model.visual."];
        !is_beyond && !left_out.iter().any(|prefix| name.starts_with(prefix))
    };
    let own = |name: String| name.replacen("model.language_model.", "model.", 1);
    let tensors = weights(folder).into_iter().filter(|(name, _)| kept(name));
    tensors.map(|(name, tensor)| (own(name), tensor)).collect()
}

#[test]
fn sixteen_bits_of_every_family_are_exported_under_the_names_of_their_publishers() {
    let mut families = 0;
    for entry in fs::read_dir(data("models")).unwrap() {
        let source = entry.unwrap().path();
        if !source.is_dir() {
            continue;
        }
        families += 1;
        let folder = tempdir().unwrap();
        let model = format!("models/{}", source.file_name().unwrap().to_str().unwrap());
        let set = convert(&model, &folder.path().join("set"), &["--bits", "16", "--nodes", "3"]);
        let out = folder.path().join("hf");
        succeed(&["export", path(&set), "--hf", "-o", path(&out)]);
        let (found, expected) = (weights(&out), text_model(&source));
        let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "{model}");
        for (name, tensor) in &found {
            let (dtype, shape, bytes) = &expected[name];
            assert_eq!((&tensor.0, &tensor.1), (dtype, shape), "{model}: {name}");
            assert!(tensor.2 == *bytes, "{model}: {name}: the same bytes");
        }
    }
    assert!(families >= 64, "{families}");
}

#[test]
fn quantized_experts_and_latents_are_put_together_from_their_parts() {
    for model in [
        "models/gpt_oss",
        "models/deepseek_v3",
        "models/qwen3_next",
        "models/glm_moe_dsa_shared",
        "models/hy_v4",
        "models/deepseek_v4",
        "models/minimax_m3_vl_text",
        "models/longcat_flash",
    ] {
        let folder = tempdir().unwrap();
        let set = convert(model, &folder.path().join("set"), &["--bits", "8", "--nodes", "2"]);
        let out = folder.path().join("hf");
        succeed(&["export", path(&set), "--hf", "-o", path(&out), "--dtype", "f32"]);
        let (found, expected) = (weights(&out), text_model(&data(model)));
        assert!(found.keys().eq(expected.keys()), "{model}");
        // With MLA, transformers would take it for the width of the rotated part.
        let config = json(&out.join("config.json"));
        assert!(model != "models/deepseek_v3" || config["head_dim"].is_null(), "{config}");
        for (name, (_, shape, bytes)) in &found {
            let (dtype, wanted, stored) = &expected[name];
            assert_eq!(shape, wanted, "{model}: {name}");
            if dtype == "I64" {
                assert!(bytes == stored, "{model}: {name}");
                continue;
            }
            let wide = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            let found = bytes.chunks_exact(4).map(wide);
            let expected: Vec<f32> = match dtype.as_str() {
                "F32" => stored.chunks_exact(4).map(wide).collect(),
                _ => stored.chunks_exact(2).map(|two| wide(&[0, 0, two[0], two[1]])).collect(),
            };
            // A step of 8 bits over a group's range is under a hundredth of the largest weight.
            let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            for (found, expected) in found.zip(&expected) {
                assert!((found - expected).abs() <= 0.01 * largest, "{model}: {name}");
            }
        }
    }
}
