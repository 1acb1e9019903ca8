//! MiniMax M3 as it is published: names and a configuration of its own, within a vision-language
//! model; matrices in BF16, or in FP8 with scales for blocks.

use std::{collections::BTreeSet, path::Path};

use serde_json::{Value, json};
use shardpack_quantize::Dtype;

use super::{
    published::{Stored, converted, floats, fp8, tensors, write},
    *,
};

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models/minimax_m3_vl_text")
}

/// Parts of a tensor that stand one after the other in its first dimension.
fn parts(tensor: &Stored, count: usize) -> Vec<Vec<u8>> {
    tensor.bytes.chunks_exact(tensor.bytes.len() / count).map(<[u8]>::to_vec).collect()
}

/// The reference model's tensors by their published names, or those of the text model by itself.
fn published(source: &Source, prefix: &str) -> Vec<Stored> {
    let mut all = Vec::new();
    for tensor in tensors(source) {
        let name = tensor.name.strip_prefix("model.").unwrap_or(&tensor.name);
        let base = if name == tensor.name { prefix.to_owned() } else { format!("{prefix}model.") };
        let mut put = |name: &str, shape: &[u64], bytes: Vec<u8>| {
            let (name, shape) = (format!("{base}{name}"), shape.to_vec());
            all.push(Stored { name, dtype: tensor.dtype, shape, bytes });
        };
        let [first, rest @ ..] = &tensor.shape[..] else { panic!("{name}") };
        if name.starts_with("mtp.") {
            put("mtp.layers.0.eh_proj.weight", &tensor.shape, tensor.bytes.clone());
        } else if let Some((layer, which)) = name.split_once(".mlp.experts.") {
            for (expert, bytes) in parts(&tensor, *first as usize).into_iter().enumerate() {
                let own = |w: &str| format!("{layer}.block_sparse_moe.experts.{expert}.{w}.weight");
                if which == "down_proj" {
                    put(&own("w2"), rest, bytes);
                    continue;
                }
                let half = bytes.len() / 2;
                put(&own("w1"), &[rest[0] / 2, rest[1]], bytes[..half].to_vec());
                put(&own("w3"), &[rest[0] / 2, rest[1]], bytes[half..].to_vec());
            }
        } else {
            let has_experts = name.contains(".mlp.shared") || name.contains(".mlp.gate.");
            let name = if has_experts {
                let name = name.replace(".mlp.gate.e_score", ".mlp.e_score");
                name.replace(".mlp.", ".block_sparse_moe.")
            } else {
                name.replace(".indexer.", ".index_")
            };
            if name.contains("gate_up_proj") {
                let mut halves = parts(&tensor, 2).into_iter();
                for part in ["gate_proj", "up_proj"] {
                    let name = name.replace("gate_up_proj", part);
                    put(&name, &[first / 2, rest[0]], halves.next().unwrap());
                }
            } else {
                put(&name, &tensor.shape, tensor.bytes.clone());
            }
        }
    }
    all
}

/// The published spelling of the reference model's configuration, within that of the whole.
fn whole(config: &Value) -> Value {
    let mut text = config.clone();
    let keys = text.as_object_mut().unwrap();
    let ours = |key: &str| key.starts_with("index_") || key.ends_with("layer_types");
    keys.retain(|key, _| !ours(key) && !["rope_parameters", "layer_types"].contains(&&**key));
    let own = json!({
        "model_type": null, "architectures": ["MiniMaxM3SparseForCausalLM"],
        "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1, 1], "partial_rotary_factor": 0.5,
        "rope_theta": 10000, "scoring_func": "sigmoid", "use_gemma_norm": true,
        "use_qk_norm": true, "qk_norm_type": "per_head", "num_mtp_modules": 7,
        "sparse_attention_config": {
            "use_sparse_attention": true, "sparse_index_dim": 32, "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 2, "sparse_block_size": 8, "sparse_score_type": "max",
            "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1], "sparse_disable_index_value": [0, 1, 0, 1],
        },
    });
    keys.extend(own.as_object().unwrap().clone());
    json!({
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl", "text_config": text,
        "vision_config": {"hidden_size": 32}, "image_token_index": 9,
    })
}

/// Writes the whole as it is published, the same in FP8, and the text model of the latter's values.
fn rewrite(folder: &Path) {
    let source = Source::open(&reference()).unwrap();
    let config = whole(&source.config);
    let mut all = published(&source, "language_model.");
    for name in ["vision_tower.vision_model.pre_layrnorm", "patch_merge_mlp.linear_1"] {
        let (name, shape) = (format!("{name}.weight"), vec![4]);
        all.push(Stored { name, dtype: Dtype::BF16, shape, bytes: vec![0; 8] });
    }
    write(&folder.join("published"), &config, &all);
    let (mut eight, mut values) = (Vec::new(), Vec::new());
    for tensor in all {
        let is = |part: &str| tensor.name.contains(part);
        if !(is("proj.weight") && is(".layers.") || is(".experts.")) || is(".mtp.") {
            let copy = Stored { name: tensor.name.clone(), ..stored_again(&tensor) };
            eight.push(copy);
            values.push(tensor);
            continue;
        }
        let width = tensor.shape[1] as usize;
        let (codes, scales, of_scales, stood) = fp8(&floats(&tensor), width);
        // Scales of powers of two, as numbers.
        let scale = |byte: &u8| 2_f32.powi(i32::from(*byte) - 127).to_le_bytes();
        eight.push(Stored {
            name: tensor.name.replace(".weight", ".weight_scale_inv"),
            dtype: Dtype::F32,
            shape: of_scales.to_vec(),
            bytes: scales.iter().flat_map(scale).collect(),
        });
        let mut narrow = vec![0; stood.len() * 2];
        affine::narrow(Platform::detect_for_quantizing(), Dtype::BF16, &stood, &mut narrow);
        values.push(Stored { bytes: narrow, ..stored_again(&tensor) });
        eight.push(Stored { dtype: Dtype::F8E4M3, bytes: codes, ..tensor });
    }
    write(&folder.join("values"), &config, &values);
    let mut config = config;
    config["text_config"]["quantization_config"] = json!({
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    });
    write(&folder.join("eight"), &config, &eight);
}

fn stored_again(tensor: &Stored) -> Stored {
    let Stored { name, dtype, shape, bytes } = tensor;
    Stored { name: name.clone(), dtype: *dtype, shape: shape.clone(), bytes: bytes.clone() }
}

#[test]
fn a_published_checkpoint_is_the_model_that_transformers_has() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    rewrite(folder.path());
    for bits in [4, 16] {
        let of = |name: &str| converted(&at(name), at(&format!("{name}-{bits}")), bits);
        let mut published = of("published");
        let plain = converted(&reference(), at(&format!("plain-{bits}")), bits);
        assert_eq!(published.1["model_type"], "minimax_m3");
        published.1["model_type"] = "minimax_m3_vl_text".into();
        assert_eq!(published.1, plain.1, "the same architecture");
        assert!(published.0 == plain.0, "the same bytes at {bits} bits");
        assert!(of("eight") == of("values"), "the values of FP8 at {bits} bits");
    }
}

/// Names of a folder's tensors.
fn names(folder: &Path) -> BTreeSet<String> {
    Source::open(folder).unwrap().tensors().map(|tensor| tensor.name.clone()).collect()
}

#[test]
fn exports_have_published_names_and_those_of_mlx() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    rewrite(folder.path());
    let source = Source::open(&at("published")).unwrap();
    let options = ConvertOptions { bits: 16, ..ConvertOptions::new(at("set"), 3) };
    let plan = Plan::new(&source, options).unwrap();
    let set = convert(&source, &plan, &|_| {}).unwrap().output;
    let model = UnshardedModel::open(std::slice::from_ref(&set)).unwrap();
    let to = |name: &str, form: ExportForm| {
        let options = ExportOptions { output: at(name), form, memory_bytes: 256 << 20 };
        export(&model, &options, &|_| {}).unwrap();
        Source::open(&at(name)).unwrap()
    };
    let exported = to("floats", ExportForm::HuggingFace { dtype: None });
    assert_eq!(exported.config["model_type"], "minimax_m3");
    let expected = published(&Source::open(&reference()).unwrap(), "");
    let expected: BTreeMap<String, Vec<u8>> = expected
        .into_iter()
        .filter(|tensor| !tensor.name.contains("mtp."))
        .map(|tensor| (tensor.name, tensor.bytes))
        .collect();
    let found: BTreeMap<String, Vec<u8>> =
        tensors(&exported).into_iter().map(|tensor| (tensor.name, tensor.bytes)).collect();
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    assert!(found == expected, "the same bytes");
    to("mlx", ExportForm::Mlx);
    let mlx = names(&at("mlx"));
    for name in ["mlp.gate_proj", "self_attn.q_norm"] {
        assert!(mlx.contains(&format!("model.layers.0.{name}.weight")), "{name}: {mlx:?}");
    }
    for name in [
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.e_score_correction_bias",
        "block_sparse_moe.switch_mlp.down_proj.weight",
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "self_attn.index_q_proj.weight",
        "self_attn.index_k_norm.weight",
    ] {
        assert!(mlx.contains(&format!("model.layers.1.{name}")), "{name}: {mlx:?}");
    }
    assert!(!mlx.iter().any(|name| name.contains(".indexer.")), "{mlx:?}");
}

#[test]
fn matrices_of_the_index_have_eight_bits_and_are_cut_as_keys() {
    let folder = tempfile::tempdir().unwrap();
    let source = Source::open(&reference()).unwrap();
    for ranks in [1, 2, 3] {
        let output = folder.path().join(format!("{ranks}"));
        let options =
            ConvertOptions { bits: 4, group_size: 32, ..ConvertOptions::new(output, ranks) };
        let plan = Plan::new(&source, options).unwrap();
        let set = convert(&source, &plan, &|_| {}).unwrap().output;
        for rank in 0..ranks {
            let manifest = fs::read(set.join(format!("node-{rank}/manifest.json"))).unwrap();
            let manifest: Value = serde_json::from_slice(&manifest).unwrap();
            let tensors = manifest["tensors"].as_array().unwrap();
            let rows = |name: &str| {
                let name = format!("model.layers.1.self_attn.{name}.weight");
                tensors.iter().find(|it| it["name"] == name.as_str()).unwrap()["shape"][0].as_u64()
            };
            let own = if ranks == 1 { 64 } else { 32 };
            assert_eq!(
                [rows("indexer.q_proj"), rows("k_proj")],
                [Some(own); 2],
                "{rank} of {ranks}"
            );
            assert_eq!(rows("indexer.k_proj"), Some(32));
            let overrides = &manifest["quantization"]["overrides"];
            for part in ["q_proj", "k_proj"] {
                let found = &overrides[format!("model.layers.1.self_attn.indexer.{part}")];
                assert!(found.to_string().contains('8'), "{overrides}");
            }
        }
    }
}
