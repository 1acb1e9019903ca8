//! Vision-language checkpoints: they convert to the packages of their text model, and the report says
//! that the vision tower is left out.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::harness::{data, path, succeed};

/// Stored tensors.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Writes a reference model as its wrapper holds it: names behind a prefix, the configuration
/// within another one, and the tensors of a vision tower.
fn wrap(model: &str, to: &Path, (outer, text): (&str, Option<&str>), prefix: &str, vision: &str) {
    let from = data("models").join(model);
    fs::create_dir(to).unwrap();
    let mut tensors = Tensors::new();
    for entry in fs::read_dir(&from).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = fs::read(&file).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let name = match name.strip_prefix("model.") {
                    Some(rest) => format!("{prefix}.{rest}"),
                    None if prefix.starts_with("language_model") => {
                        format!("language_model.{name}")
                    }
                    None => name,
                };
                tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    tensors.insert(format!("{vision}.weight"), (Dtype::BF16, vec![2, 3], vec![7; 12]));
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let mut inner: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let tied = inner["tie_word_embeddings"].clone();
    if let Some(text) = text {
        inner["model_type"] = text.into();
    }
    let mut config = json!({
        "model_type": outer,
        "architectures": ["AnyForConditionalGeneration"],
        "text_config": inner,
        "vision_config": { "depth": 3 },
        "image_token_index": 10,
    });
    if !tied.is_null() {
        config["tie_word_embeddings"] = tied;
    }
    fs::write(to.join("config.json"), config.to_string()).unwrap();
}

/// Every stored tensor of a one-node set, and the package's configuration.
fn read(set: &Path) -> (Value, Value) {
    let json = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(set.join("node-0").join(name)).unwrap()).unwrap()
    };
    let manifest = json("manifest.json");
    (json!([manifest["tensors"], manifest["architecture"]]), json("config.json"))
}

#[track_caller]
fn check(model: &str, wrapper: (&str, Option<&str>), prefix: &str, vision: &str) {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    wrap(model, &at("wrapped"), wrapper, prefix, vision);
    let convert = |from: &Path, to: &str| {
        succeed(&["convert", path(from), "-o", path(&at(to))]);
        read(&at(to))
    };
    let (found, config) = convert(&at("wrapped"), "found");
    let (expected, _) = convert(&data("models").join(model), "expected");
    assert_eq!(found, expected, "{model}");
    assert!(config["text_config"].is_null() && config["vision_config"].is_null(), "{config}");
    assert_eq!(config["model_type"], expected[1]["model_type"]);
    let report = fs::read_to_string(at("found").join("report.json")).unwrap();
    assert!(report.contains("vision tower"), "{report}");
    // The package is understood by itself.
    succeed(&["reshard", path(&at("found")), "-o", path(&at("resharded")), "--nodes", "2"]);
}

#[test]
fn text_models_are_extracted_from_vision_language_checkpoints() {
    check("mistral", ("mistral3", None), "language_model.model", "vision_tower.patch_conv");
    check("ministral3", ("mistral3", None), "model.language_model", "model.vision_tower.ln");
    check("gemma3_text", ("gemma3", None), "language_model.model", "multi_modal_projector.x");
    check("kimi_k2", ("kimi_k25", None), "language_model.model", "mm_projector.proj.0");
    check("qwen3", ("qwen3_vl", Some("qwen3_vl_text")), "model.language_model", "model.visual.a");
}

#[test]
fn transposed_experts_of_qwen3_vl_are_read() {
    let folder = tempdir().unwrap();
    let (plain, turned) = (folder.path().join("plain"), folder.path().join("turned"));
    let wrapper = ("qwen3_vl_moe", Some("qwen3_vl_moe_text"));
    wrap("qwen3_moe", &plain, wrapper, "model.language_model", "model.visual.a");
    fs::create_dir(&turned).unwrap();
    fs::copy(plain.join("config.json"), turned.join("config.json")).unwrap();
    let bytes = fs::read(plain.join("model.safetensors")).unwrap();
    let mut tensors: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    for layer in [0, 2] {
        fuse_turned(&mut tensors, &format!("model.language_model.layers.{layer}.mlp.experts"));
    }
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    fs::write(turned.join("model.safetensors"), file).unwrap();
    let set = |from: &Path, name: &str| {
        let to = folder.path().join(name);
        succeed(&["convert", path(from), "-o", path(&to)]);
        read(&to).0
    };
    assert_eq!(set(&turned, "a"), set(&data("models/qwen3_moe"), "b"));
}

/// One matrix per expert becomes `[experts, in, out]`, gates before ups.
fn fuse_turned(tensors: &mut Tensors, prefix: &str) {
    let (mut sides, mut downs) = (Vec::new(), Vec::new());
    let mut sizes = [0, 0];
    let mut count = 0;
    while let Some((_, shape, gate)) = tensors.remove(&format!("{prefix}.{count}.gate_proj.weight"))
    {
        let up = tensors.remove(&format!("{prefix}.{count}.up_proj.weight")).unwrap().2;
        let down = tensors.remove(&format!("{prefix}.{count}.down_proj.weight")).unwrap().2;
        sizes = [shape[0], shape[1]];
        let both = [gate, up].concat();
        sides.extend(transposed(&both, 2 * sizes[0], sizes[1]));
        downs.extend(transposed(&down, sizes[1], sizes[0]));
        count += 1;
    }
    let [inner, hidden] = sizes;
    let side = (Dtype::BF16, vec![count, hidden, 2 * inner], sides);
    tensors.insert(format!("{prefix}.gate_up_proj"), side);
    tensors.insert(format!("{prefix}.down_proj"), (Dtype::BF16, vec![count, inner, hidden], downs));
}

fn transposed(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let element = |row: usize, column: usize| {
        let at = 2 * (row * columns + column);
        [bytes[at], bytes[at + 1]]
    };
    (0..columns).flat_map(|column| (0..rows).flat_map(move |row| element(row, column))).collect()
}
