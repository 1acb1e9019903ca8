//! Adapters on a model whose head is its embedding.

use shardpack_containers::container::header;

use super::*;
use crate::source::RowBuffers;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A folder with an adapter of F32 tensors of these shapes, whose elements count in eighths.
fn adapter(config: &Value, tensors: &[(&str, [u64; 2])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let info = |(name, shape): &(&str, [u64; 2])| TensorInfo {
        name: format!("base_model.model.{name}"),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        offset: 0,
        size: shape.iter().product::<u64>() * 4,
    };
    let mut bytes = header(&tensors.iter().map(info).collect::<Vec<_>>());
    for (_, shape) in tensors {
        let count = shape.iter().product::<u64>();
        bytes.extend((0..count).flat_map(|at| ((at % 16) as f32 / 8.0).to_le_bytes()));
    }
    fs::write(folder.path().join("adapter_model.safetensors"), bytes).unwrap();
    let mut all = serde_json::json!({"peft_type": "LORA", "r": 1, "lora_alpha": 2});
    all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    fs::write(folder.path().join("adapter_config.json"), all.to_string()).unwrap();
    folder
}

fn value(source: &Source, name: &str) -> Option<Vec<f32>> {
    let logical = source.logical(name)?;
    if let Some(info) = source.adapters.info(name) {
        return Some(floats(info.dtype, &source.read_tensor(name).unwrap().unwrap()));
    }
    let size = logical.shape.iter().product::<u64>() as usize * logical.dtype.size_bytes();
    let mut bytes = vec![0; size];
    source.read_bytes(logical, 0, &mut bytes, &mut RowBuffers::default()).unwrap();
    Some(floats(logical.dtype, &bytes))
}

fn model() -> Source {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models/llama-tied");
    Source::open(&folder).unwrap()
}

/// Embedding and head after an adapter; no head where both stay one.
fn ends(config: &Value, tensors: &[(&str, [u64; 2])]) -> (Vec<f32>, Option<Vec<f32>>) {
    let mut source = model();
    let folder = adapter(config, tensors);
    source.merge_adapters(&[folder.path().to_owned()]).unwrap();
    let head = value(&source, HEAD);
    let tied = source.config["tie_word_embeddings"].as_bool().unwrap();
    assert_eq!(tied, head.is_none());
    assert_eq!(source.notes.iter().any(|note| note.contains(HEAD)), head.is_some());
    (value(&source, EMBEDDING).unwrap(), head)
}

#[test]
fn a_head_that_an_adapter_changes_is_parted_from_the_embedding() {
    let source = model();
    let shape = source.logical(EMBEDDING).unwrap().shape.clone();
    let (rows, width) = (shape[0], shape[1]);
    let base = value(&source, EMBEDDING).unwrap();
    let lora = |module: &str, a: [u64; 2], b: [u64; 2]| {
        let names = [format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight")];
        ends(&serde_json::json!({}), &[(&names[0], a), (&names[1], b)])
    };
    let (embedding, head) = lora("lm_head", [1, width], [rows, 1]);
    assert!(embedding == base);
    let head = head.unwrap();
    for (row, column) in [(0, 0), (1, 1), (3, 5), (rows - 1, width - 1)] {
        let at = (row * width + column) as usize;
        let delta = 2.0 * (row % 16) as f32 / 8.0 * ((column % 16) as f32 / 8.0);
        assert!((head[at] - base[at] - delta).abs() < 1e-5, "{row}, {column}");
    }
    // Saved whole.
    let saved = serde_json::json!({"modules_to_save": ["lm_head"]});
    let name = "lm_head.modules_to_save.weight";
    let (embedding, head) = ends(&saved, &[(name, [rows, width])]);
    assert!(embedding == base && head.unwrap()[..3] == [0.0, 0.125, 0.25]);
}

#[test]
fn an_embedding_that_an_adapter_changes_leaves_the_head_unless_both_are_said_to_be_one() {
    let source = model();
    let shape = source.logical(EMBEDDING).unwrap().shape.clone();
    let (rows, width) = (shape[0], shape[1]);
    let base = value(&source, EMBEDDING).unwrap();
    let name = "model.embed_tokens.modules_to_save.weight";
    let saved = |more: Value| -> Value {
        let mut config = serde_json::json!({"modules_to_save": ["embed_tokens"]});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let (embedding, head) = ends(&saved(serde_json::json!({})), &[(name, [rows, width])]);
    assert!(embedding[..2] == [0.0, 0.125] && head.unwrap() == base);
    let kept = saved(serde_json::json!({"ensure_weight_tying": true}));
    assert_eq!(ends(&kept, &[(name, [rows, width])]).1, None);
    // New rows can only be those of both; and a copy of the embedding is no other head.
    assert_eq!(ends(&saved(serde_json::json!({})), &[(name, [rows + 2, width])]).1, None);
    let both = [("model.embed_tokens.weight", [rows, width]), ("lm_head.weight", [rows, width])];
    let (embedding, head) = ends(&serde_json::json!({}), &both);
    assert!(embedding[1] == 0.125 && head.is_none());
}
