//! The reference models of `tests/data/models`: their weights, what transformers computes for
//! them, and their architecture in our words.

use std::{fs, path::PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;
use shardpack_formats::{
    Spec,
    hex::HexF32,
    spec::{Activation, Attention, Block, Ffn, Layer, Norm, NormKind, QkNorm, Rope, RopeStyle},
};
use shardpack_quantize::Dtype;

/// A tensor with its bytes.
#[derive(Clone)]
pub(crate) struct Plain {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

fn folder(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models").join(model)
}

pub(crate) fn tensors(model: &str) -> Vec<Plain> {
    read(model, "model.safetensors")
}

fn read(model: &str, file: &str) -> Vec<Plain> {
    let bytes = fs::read(folder(model).join(file)).unwrap();
    SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, tensor)| Plain {
            name,
            dtype: Dtype::from_name(&tensor.dtype().to_string()).unwrap(),
            shape: tensor.shape().iter().map(|dim| *dim as u64).collect(),
            bytes: tensor.data().to_vec(),
        })
        .collect()
}

/// What transformers computes: `logits[i]` are those after token `i`.
pub(crate) struct Expected {
    pub(crate) tokens: [Vec<u32>; 2],
    pub(crate) logits: [Vec<f32>; 2],
    /// Continues the first sequence.
    pub(crate) greedy: Vec<u32>,
}

impl Expected {
    pub(crate) fn of(model: &str) -> Self {
        let all = read(model, "expected.safetensors");
        let words = |name: &str| -> Vec<u32> {
            let tensor = all.iter().find(|tensor| tensor.name == name).unwrap();
            tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
        };
        let floats = |name| words(name).into_iter().map(f32::from_bits).collect();
        Self {
            tokens: [words("tokens_a"), words("tokens_b")],
            logits: [floats("logits_a"), floats("logits_b")],
            greedy: words("greedy"),
        }
    }
}

/// The architecture, read from the model's `config.json` for these models alone.
pub(crate) fn spec(model: &str) -> Spec {
    let text = fs::read_to_string(folder(model).join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let int = |key: &str| config[key].as_u64().unwrap() as u32;
    let float = |key: &str| config[key].as_f64().unwrap();
    let flag = |key: &str| config[key].as_bool().unwrap_or(false);
    let head_dim = int("head_dim");
    let model_type = config["model_type"].as_str().unwrap().to_owned();
    let qk_norm = if model_type == "qwen3" { QkNorm::Head } else { QkNorm::None };
    let layer = Layer::plain();
    Spec {
        embedding_norm: false,
        lm_head_bias: false,
        rules: "dense-gqa".to_owned(),
        model_type,
        hidden_size: int("hidden_size"),
        vocab_size: int("vocab_size"),
        max_positions: int("max_position_embeddings"),
        norm: Norm {
            kind: NormKind::Rms,
            eps: HexF32(float("rms_norm_eps") as f32),
            plus_one: false,
            bias: false,
            plain: false,
        },
        attention: Attention {
            heads: int("num_attention_heads"),
            kv_heads: int("num_key_value_heads"),
            head_dim,
            scale: HexF32(1.0 / (head_dim as f32).sqrt()),
            qkv_bias: flag("attention_bias"),
            o_bias: flag("attention_bias"),
            qk_norm,
            softcap: None,
            sinks: false,
            sinks_in: None,
            gated: false,
            value_dim: None,
            value_scale: None,
            values_are_keys: false,
            value_norm: false,
            limit: None,
            head_gate: None,
            block_sparse: None,
            position_scale: None,
        },
        ropes: vec![rope(head_dim, &config)],
        ffn: Ffn {
            size: int("intermediate_size"),
            activation: Activation::SiluGlu,
            bias: flag("mlp_bias"),
            names: None,
            gate_scale: None,
            out_scale: None,
            clamped: None,
        },
        layers: vec![layer; int("num_hidden_layers") as usize],
        second_attention: None,
        tied_embeddings: flag("tie_word_embeddings"),
        moe: None,
        mla: None,
        compressed_attention: None,
        linear_attention: None,
        short_convolution: None,
        hyper_connections: None,
        embedding: None,
        block: Block::pre_norm(),
        embedding_scale: None,
        logit_scale: None,
        logit_softcap: None,
    }
}

fn rope(head_dim: u32, config: &Value) -> Rope {
    let theta = config["rope_theta"].as_f64().unwrap();
    let inv_freq = (0..head_dim / 2)
        .map(|pair| theta.powf(-2.0 * f64::from(pair) / f64::from(head_dim)))
        .map(|freq| llama3(freq, &config["rope_scaling"]))
        .map(|freq| HexF32(freq as f32))
        .collect();
    Rope { style: RopeStyle::Half, inv_freq, attention_factor: HexF32(1.0), long: None }
}

/// Llama 3's scaling of one inverse frequency; without scaling, the frequency itself.
fn llama3(freq: f64, scaling: &Value) -> f64 {
    let Some(factor) = scaling["factor"].as_f64() else { return freq };
    let [low, high, original] =
        ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            .map(|key| scaling[key].as_f64().unwrap());
    let wavelength = std::f64::consts::TAU / freq;
    let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
    (1.0 - smooth) * freq / factor + smooth * freq
}
