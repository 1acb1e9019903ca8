//! The configuration that a GGUF file has in its keys, as transformers spells it.
//!
//! Every key of the architecture is used, known to change nothing, or the file is refused with
//! its name: what llama.cpp computes by a key that is not understood would be computed otherwise
//! here. A `config.json` beside the file takes the place of all this.

use std::f64::consts::PI;

use serde_json::{Map, Value as Json, json};

use super::{FREQUENCIES, GgufError, LONG_FREQUENCIES, Model, Part, Value};

mod families;

/// Keys of an architecture that say nothing about what is computed.
const IGNORED: &[&str] =
    &["context_length", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"];

/// Keys that are read here.
const USED: &[&str] = &[
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "embedding_length",
    "embedding_scale",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "logit_scale",
    "residual_scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
];

/// Factors of the frequencies of a rotary embedding, from the tensors that hold them.
#[derive(Clone, Debug, Default)]
pub struct Frequencies {
    /// For all positions.
    pub all: Option<Vec<f32>>,
    /// For texts beyond the positions that the model began with.
    pub long: Option<Vec<f32>>,
    /// For texts within them.
    pub short: Option<Vec<f32>>,
}

/// Largest relative difference of a frequency's factor from the formula's: its writer computes in
/// 32 bits.
const FACTOR_TOLERANCE: f64 = 1e-4;

/// Tokens that Llama 3 was trained with before its positions were stretched.
const LLAMA3_POSITIONS: f64 = 8192.0;

/// Where the configuration can be had instead.
const BESIDE: &str = "put the model's config.json beside the file";

/// Writes `config.json` for a model of these tensors.
pub fn config(model: &Model, parts: &[Part], frequencies: &Frequencies) -> Result<Json, GgufError> {
    check_keys(model)?;
    let tensors = Tensors(parts);
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    let heads = model.needed_count("attention.head_count")?;
    let hidden = model.needed_count("embedding_length")?;
    let head = head_size(model, heads, hidden)?;
    let (vocab, _) = tensors.shape("model.embed_tokens.weight").ok_or_else(|| {
        let tensor = "token_embd.weight".to_owned();
        GgufError::Tensor { tensor, problem: "it is missing, or no matrix".to_owned() }
    })?;
    set("hidden_size", hidden.into());
    set("num_hidden_layers", model.needed_count("block_count")?.into());
    set("num_attention_heads", heads.into());
    let kv_heads = model.count("attention.head_count_kv")?.filter(|count| *count > 0);
    set("num_key_value_heads", kv_heads.unwrap_or(heads).into());
    set("head_dim", head.into());
    set("vocab_size", vocab.into());
    set("max_position_embeddings", model.needed_count("context_length")?.into());
    set("rms_norm_eps", needed_decimal(model, "attention.layer_norm_rms_epsilon")?.into());
    set("tie_word_embeddings", tensors.shape("lm_head.weight").is_none().into());
    set("hidden_act", "silu".into());
    set("rope_theta", decimal(model, "rope.freq_base")?.unwrap_or(10000.0).into());
    if let Some(size) = model.count("feed_forward_length")? {
        set("intermediate_size", size.into());
    }
    for (key, token) in tokens(model) {
        set(key, token);
    }
    if let Some(scaling) = rope_scaling(model, head, frequencies.all.as_deref())? {
        set("rope_scaling", scaling);
    }
    family(model, &tensors, &mut config)?;
    families::add(model, (heads, hidden, head), frequencies, &mut config)?;
    Ok(Json::Object(config))
}

/// What differs from one architecture to the next.
fn family(
    model: &Model,
    tensors: &Tensors,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let experts = model.count("expert_count")?.filter(|count| *count > 0);
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    let bias = |module: &str| tensors.any(&format!(".{module}.bias"));
    let (model_type, class) = match (model.architecture.name, experts) {
        ("llama", Some(experts)) => {
            set("num_local_experts", experts.into());
            set("num_experts_per_tok", model.needed_count("expert_used_count")?.into());
            ("mixtral", "MixtralForCausalLM")
        }
        ("qwen3moe", Some(experts)) => {
            set("num_experts", experts.into());
            set("num_experts_per_tok", model.needed_count("expert_used_count")?.into());
            let size = model.needed_count("expert_feed_forward_length")?;
            set("moe_intermediate_size", size.into());
            // llama.cpp computes this architecture so, whatever the checkpoint said.
            set("norm_topk_prob", true.into());
            set("decoder_sparse_step", 1.into());
            set("mlp_only_layers", tensors.layers_with("mlp.gate_proj.weight").into());
            ("qwen3_moe", "Qwen3MoeForCausalLM")
        }
        ("gpt-oss", Some(experts)) => {
            set("num_local_experts", experts.into());
            set("num_experts_per_tok", model.needed_count("expert_used_count")?.into());
            let size = model.needed_count("expert_feed_forward_length")?;
            set("intermediate_size", size.into());
            ("gpt_oss", "GptOssForCausalLM")
        }
        (_, Some(_)) => {
            return Err(GgufError::key(model.name_of("expert_count"), "is not expected"));
        }
        ("qwen2", None) => ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", None) => ("qwen3", "Qwen3ForCausalLM"),
        ("seed_oss", None) => ("seed_oss", "SeedOssForCausalLM"),
        ("granite", None) => {
            for (key, ours) in [
                ("attention.scale", "attention_multiplier"),
                ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"),
                ("logit_scale", "logits_scaling"),
            ] {
                if let Some(value) = decimal(model, key)? {
                    set(ours, value.into());
                }
            }
            ("granite", "GraniteForCausalLM")
        }
        ("qwen3moe" | "gpt-oss", None) => return Err(model.missing("expert_count")),
        ("gemma2", None) => ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3", None) => ("gemma3_text", "Gemma3ForCausalLM"),
        ("phi3", None) => ("phi3", "Phi3ForCausalLM"),
        _ => ("llama", "LlamaForCausalLM"),
    };
    // The families for which the configuration says which biases there are.
    match model_type {
        "llama" | "granite" => {
            set("attention_bias", bias("self_attn.q_proj").into());
            set("mlp_bias", bias("mlp.up_proj").into());
        }
        "seed_oss" => {
            set("attention_bias", bias("self_attn.q_proj").into());
            set("attention_out_bias", bias("self_attn.o_proj").into());
            set("mlp_bias", bias("mlp.up_proj").into());
        }
        "qwen3" | "qwen3_moe" | "gpt_oss" => {
            set("attention_bias", bias("self_attn.q_proj").into());
        }
        _ => {}
    }
    set("model_type", model_type.into());
    set("architectures", json!([class]));
    Ok(())
}

/// The model's tensors by their names in the checkpoint.
struct Tensors<'a>(&'a [Part]);

impl Tensors<'_> {
    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| part.name.as_deref())
    }

    /// Rows and columns of a matrix.
    fn shape(&self, name: &str) -> Option<(u64, u64)> {
        let part = self.0.iter().find(|part| part.name.as_deref() == Some(name))?;
        match part.shape.as_slice() {
            [rows, columns] => Some((*rows, *columns)),
            _ => None,
        }
    }

    fn any(&self, ending: &str) -> bool {
        self.names().any(|name| name.ends_with(ending))
    }

    /// Layers that have a tensor which is called so within them.
    fn layers_with(&self, rest: &str) -> Vec<u64> {
        let layer = |name: &str| {
            let (layer, found) = name.strip_prefix("model.layers.")?.split_once('.')?;
            layer.parse().ok().filter(|_| found == rest)
        };
        let mut layers: Vec<u64> = self.names().filter_map(layer).collect();
        layers.sort_unstable();
        layers
    }
}

impl Model<'_> {
    fn missing(&self, key: &str) -> GgufError {
        GgufError::key(self.name_of(key), format!("is missing; {BESIDE}"))
    }
}

/// Whether every key of the architecture is understood.
fn check_keys(model: &Model) -> Result<(), GgufError> {
    let prefix = model.name_of("");
    let own =
        model.keys.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
    for (key, value) in own {
        let own = families::keys(model.architecture.name);
        if !USED.contains(&key) && !IGNORED.contains(&key) && !own.contains(&key) {
            let problem = format!("is {} and not understood; {BESIDE}", value.words());
            return Err(GgufError::key(model.name_of(key), problem));
        }
    }
    for (key, expected) in [("attention.causal", 1), ("attention.sliding_window", 0)] {
        let has_windows = families::has_windows(model.architecture.name);
        let Some(value) = model.value(key).filter(|_| expected == 1 || !has_windows) else {
            continue;
        };
        if value.truth().map(i64::from).or_else(|| value.integer()) != Some(expected) {
            let problem = format!("is {}, which is not read; {BESIDE}", value.words());
            return Err(GgufError::key(model.name_of(key), problem));
        }
    }
    Ok(())
}

/// The size of a head, about which up to three keys have to agree.
fn head_size(model: &Model, heads: u64, hidden: u64) -> Result<u64, GgufError> {
    let stated = model.count("attention.key_length")?;
    let head = stated.unwrap_or(hidden / heads);
    if head == 0 || (stated.is_none() && head * heads != hidden) {
        let problem = format!("is {heads}, which does not divide {hidden}");
        return Err(GgufError::key(model.name_of("attention.head_count"), problem));
    }
    // A part of the head can be rotated, where the configuration can say so.
    let keys: &[&str] = match model.architecture.name {
        "phi3" => &["attention.value_length"],
        _ => &["attention.value_length", "rope.dimension_count"],
    };
    for &key in keys {
        if let Some(found) = model.count(key)?.filter(|found| *found != head) {
            let problem = format!("is {found}, expected {head} as the keys' heads have; {BESIDE}");
            return Err(GgufError::key(model.name_of(key), problem));
        }
    }
    Ok(head)
}

fn decimal(model: &Model, key: &str) -> Result<Option<f64>, GgufError> {
    let Some(value) = model.value(key) else { return Ok(None) };
    let wrong = || GgufError::key(model.name_of(key), format!("is {}", value.words()));
    value.decimal().map(Some).ok_or_else(wrong)
}

fn needed_decimal(model: &Model, key: &str) -> Result<f64, GgufError> {
    decimal(model, key)?.ok_or_else(|| model.missing(key))
}

/// The tokens that begin and end a text.
fn tokens(model: &Model) -> Vec<(&'static str, Json)> {
    let id = |key: &str| model.keys.get(&format!("tokenizer.ggml.{key}"))?.integer();
    let mut tokens = Vec::new();
    if let Some(bos) = id("bos_token_id") {
        tokens.push(("bos_token_id", bos.into()));
    }
    if let Some(eos) = id("eos_token_id") {
        // The end of a turn ends an answer too.
        let turn = id("eot_token_id").filter(|turn| *turn != eos);
        tokens.push(("eos_token_id", turn.map_or_else(|| json!(eos), |turn| json!([eos, turn]))));
    }
    tokens
}

/// How positions are stretched, if they are.
fn rope_scaling(
    model: &Model,
    head: u64,
    frequencies: Option<&[f32]>,
) -> Result<Option<Json>, GgufError> {
    let key = "rope.scaling.type";
    let kind = match model.value(key).map(Value::text) {
        None => "none",
        Some(kind) => kind.ok_or_else(|| GgufError::key(model.name_of(key), "is no text"))?,
    };
    let factor = || needed_decimal(model, "rope.scaling.factor");
    let stated = match kind {
        "none" => None,
        "linear" => Some(json!({"rope_type": "linear", "factor": factor()?})),
        "yarn" => Some(yarn(model, factor()?)?),
        other => {
            let problem = format!("is {other:?}, which is not read; {BESIDE}");
            return Err(GgufError::key(model.name_of(key), problem));
        }
    };
    let Some(frequencies) = frequencies else { return Ok(stated) };
    let theta = decimal(model, "rope.freq_base")?.unwrap_or(10000.0);
    let wrong = |problem: &str| GgufError::Tensor {
        tensor: FREQUENCIES.to_owned(),
        problem: format!("{problem}; {BESIDE}"),
    };
    if stated.is_some() {
        return Err(wrong("the keys describe another scaling of positions"));
    }
    if frequencies.iter().all(|factor| *factor == 1.0) {
        return Ok(None);
    }
    llama3(frequencies, head, theta)
        .map(Some)
        .ok_or_else(|| wrong("its factors are not those of Llama 3"))
}

fn yarn(model: &Model, factor: f64) -> Result<Json, GgufError> {
    let mut scaling = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings":
            model.needed_count("rope.scaling.original_context_length")?,
    });
    for (key, ours) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
        if let Some(value) = decimal(model, &format!("rope.scaling.{key}"))? {
            scaling[ours] = value.into();
        }
    }
    Ok(scaling)
}

/// The scaling of Llama 3 whose factors these are. The lowest frequencies have the whole factor.
fn llama3(frequencies: &[f32], head: u64, theta: f64) -> Option<Json> {
    if frequencies.len() as u64 != head / 2 {
        return None;
    }
    let whole = f64::from(*frequencies.last()?);
    let (low, high) = (1.0, 4.0);
    let expected = |index: usize| {
        let frequency = 1.0 / libm::pow(theta, 2.0 * index as f64 / head as f64);
        let wave = 2.0 * PI / frequency;
        if wave < LLAMA3_POSITIONS / high {
            return 1.0;
        }
        if wave > LLAMA3_POSITIONS / low {
            return whole;
        }
        let smooth = (LLAMA3_POSITIONS / wave - low) / (high - low);
        1.0 / ((1.0 - smooth) / whole + smooth)
    };
    let near = |(index, found): (usize, &f32)| {
        let expected = expected(index);
        (f64::from(*found) - expected).abs() <= FACTOR_TOLERANCE * expected
    };
    let right = whole >= 1.0 && frequencies.iter().enumerate().all(near);
    right.then(|| {
        json!({
            "rope_type": "llama3",
            "factor": whole,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": LLAMA3_POSITIONS as u64,
        })
    })
}
