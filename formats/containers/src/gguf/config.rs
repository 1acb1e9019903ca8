//! The configuration that a GGUF file has in its keys, as transformers spells it.
//!
//! Every key of the architecture is used, known to change nothing, or the file is refused with
//! its name: what llama.cpp computes by a key that is not understood would be computed otherwise
//! here. Where llama.cpp has a value for an absent key, it is that value. A `config.json` beside the
//! file is asked when the keys are not understood.

use serde_json::{Map, Value as Json, json};

use super::{GgufError, LONG_FREQUENCIES, Model, Part, tokenizer};

mod families;
mod rope;

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
    "rope.scale_linear",
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
    if let Some(scaling) = rope::scaling(model, head, frequencies.all.as_deref())? {
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
            set("moe_intermediate_size", expert_size(model)?.into());
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
        ("granite", None) => ("granite", "GraniteForCausalLM"),
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

/// Features within an expert; without a key the experts that are used share those of a layer.
fn expert_size(model: &Model) -> Result<u64, GgufError> {
    if let Some(size) = model.count("expert_feed_forward_length")?.filter(|size| *size > 0) {
        return Ok(size);
    }
    Ok(model.needed_count("feed_forward_length")? / model.needed_count("expert_used_count")?)
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
    let id = |key: &str| tokenizer::special_id(model.keys, key);
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
