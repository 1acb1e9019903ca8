//! A model's tensors under the names that transformers gives them.
//!
//! llama.cpp renames every tensor, stacks the experts of a layer, and for some architectures
//! (those whose rotary embedding it computes over neighbouring pairs) reorders the rows of
//! queries and keys within each head: `[2, half]` became `[half, 2]`. The gains of Gemma's norms it
//! stores with the one that the model adds. All of that is undone here; what no table knows keeps its name, so that the rules refuse it by that.
//!
//! Source: `conversion/` and `gguf/tensor_mapping.py` of llama.cpp.

mod fused;

use std::collections::BTreeMap;

use super::{GgufError, Header, Kind, Tensor, Value};
use crate::container::TensorInfo;
use shardpack_quantize::dtype::Dtype;

/// What llama.cpp does to the checkpoints of one of its architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Architecture {
    /// Its name in `general.architecture`, which is also the beginning of its keys.
    pub(super) name: &'static str,
    /// Whether the rows of queries and keys are reordered.
    is_turned: bool,
    /// Whether the gains of norms are stored with one added.
    is_shifted: bool,
    /// Names that differ from [`LAYER`].
    own: &'static [(&'static str, &'static str)],
    /// What a layer's router and its experts' gate, up and down are called.
    experts: Option<[&'static str; 4]>,
}

const QWEN_MOE: [&str; 4] = ["mlp.gate", "gate_proj", "up_proj", "down_proj"];

/// The architectures that are read.
const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "llama",
        is_turned: true,
        experts: Some(["block_sparse_moe.gate", "w1", "w3", "w2"]),
        ..PLAIN
    },
    Architecture { name: "granite", is_turned: true, ..PLAIN },
    Architecture { name: "qwen2", ..PLAIN },
    Architecture { name: "qwen3", ..PLAIN },
    Architecture { name: "qwen3moe", experts: Some(QWEN_MOE), ..PLAIN },
    Architecture {
        name: "seed_oss",
        own: &[("post_attention_norm", "post_attention_layernorm")],
        ..PLAIN
    },
    Architecture { name: "gemma2", is_shifted: true, own: GEMMA, ..PLAIN },
    Architecture { name: "gemma3", is_shifted: true, own: GEMMA, ..PLAIN },
    Architecture {
        name: "phi3",
        own: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        ..PLAIN
    },
    Architecture { name: "gpt-oss", own: GPT_OSS, ..PLAIN },
];

/// What is said of most.
const PLAIN: Architecture =
    Architecture { name: "", is_turned: false, is_shifted: false, own: &[], experts: None };

/// Norms before and after each part.
const GEMMA: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Experts stay in stacks, under the names that the published ones have when they are decoded.
const GPT_OSS: &[(&str, &str)] = &[
    ("attn_sinks", SINKS),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_gate_inp", "mlp.router"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

/// A tensor that has no ending.
const SINKS: &str = "self_attn.sinks";

/// Tensors outside of layers.
const WHOLE: &[(&str, &str)] = &[
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Modules of a layer.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The factors of rotary frequencies, which the configuration says too.
pub const FREQUENCIES: &str = "rope_freqs.weight";

/// The same beyond the positions that a model began with, and up to them.
pub const LONG_FREQUENCIES: &str = "rope_factors_long.weight";
/// See [`LONG_FREQUENCIES`].
pub const SHORT_FREQUENCIES: &str = "rope_factors_short.weight";

/// How stored rows become a checkpoint's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// As they are.
    Same,
    /// Of each `head` rows, those at even places are the first half.
    Rotary {
        /// Rows of a head.
        head: u64,
    },
    /// As they are, each number one more than the checkpoint's.
    OneMore,
    /// One half of the rows of every matrix of a stack.
    Half(Half),
    /// One half of every row.
    HalfColumns(Half),
}

/// Which half of something fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The gates.
    First,
    /// The up projections.
    Second,
}

/// A tensor of the file, or one expert of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name in the file; of an expert with its number in brackets.
    pub stored: String,
    /// The checkpoint's name; absent for what the configuration says too.
    pub name: Option<String>,
    /// How it is stored.
    pub kind: Kind,
    /// Shape, last dimension contiguous.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// The order of its rows.
    pub rows: Rows,
}

impl Part {
    /// The stored tensor: floats as they are, or bytes `[…, bytes of a row]`.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        let mut shape = self.shape.clone();
        // What is stored has the other half too.
        if let Rows::Half(_) | Rows::HalfColumns(_) = self.rows
            && let Some(size) = shape.get_mut(1)
        {
            *size *= 2;
        }
        let dtype = match self.kind {
            Kind::Floats(dtype) => dtype,
            kind => {
                if let Some(width) = shape.last_mut() {
                    *width = *width / kind.block_len() * kind.block_bytes();
                }
                Dtype::U8
            }
        };
        let (offset, size) = (self.offset, self.size);
        TensorInfo { name: self.stored.clone(), dtype, shape, offset, size }
    }
}

/// What a file says of its model.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    pub(super) keys: &'a BTreeMap<String, Value>,
    pub(super) architecture: &'static Architecture,
}

impl<'a> Model<'a> {
    /// Looks at the header of a model's only or first file.
    pub fn new(header: &'a Header) -> Result<Self, GgufError> {
        let keys = &header.keys;
        if let Some(kind) = keys.get("general.type").and_then(Value::text)
            && kind != "model"
        {
            return Err(GgufError::Unread(format!("it is a GGUF file of type {kind:?}, no model")));
        }
        let key = "general.architecture";
        let name = keys.get(key).and_then(Value::text);
        let name = name.ok_or_else(|| GgufError::key(key, "is missing: it is no model"))?;
        let found = ARCHITECTURES.iter().find(|architecture| architecture.name == name);
        let architecture = found.ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
            GgufError::Unread(format!(
                "it holds llama.cpp's architecture {name:?}, whose names and row orders are not known (known are {}); take the model's .safetensors files",
                known.join(", ")
            ))
        })?;
        Ok(Self { keys, architecture })
    }

    /// The files that the model is split into.
    pub fn file_count(&self) -> Result<u64, GgufError> {
        let key = "split.count";
        match self.keys.get(key).map(Value::integer) {
            None => Ok(1),
            Some(Some(count @ 0..=99_999)) => Ok((count as u64).max(1)),
            Some(_) => Err(GgufError::key(key, "is no number of files")),
        }
    }

    /// A key of the architecture.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.keys.get(&self.name_of(key))
    }

    pub(super) fn name_of(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    /// A positive integer of the architecture.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>, GgufError> {
        let wrong = |value: &Value| {
            GgufError::key(self.name_of(key), format!("is {}, expected one count", value.words()))
        };
        let Some(value) = self.value(key) else { return Ok(None) };
        let count = match value {
            // One number for each layer is taken if they are one.
            Value::Numbers(numbers) => {
                let first = numbers.integer(0);
                let same = (0..numbers.len()).all(|index| numbers.integer(index) == first);
                first.filter(|_| same)
            }
            value => value.integer(),
        };
        let count = count.and_then(|count| u64::try_from(count).ok());
        count.map(Some).ok_or_else(|| wrong(value))
    }

    pub(super) fn needed_count(&self, key: &str) -> Result<u64, GgufError> {
        let count = self.count(key)?.filter(|count| *count > 0);
        count.ok_or_else(|| GgufError::key(self.name_of(key), "is missing or zero"))
    }

    /// The tensors of one of its files.
    pub fn parts(&self, tensors: &[Tensor]) -> Result<Vec<Part>, GgufError> {
        let mut parts = Vec::new();
        for tensor in tensors {
            self.add(tensor, &mut parts)?;
        }
        Ok(parts)
    }

    fn add(&self, tensor: &Tensor, parts: &mut Vec<Part>) -> Result<(), GgufError> {
        let part = Part {
            stored: tensor.name.clone(),
            name: Some(tensor.name.clone()),
            kind: tensor.kind,
            shape: tensor.shape.clone(),
            offset: tensor.offset,
            size: tensor.size,
            rows: Rows::Same,
        };
        let shifted = self.shifted(tensor)?;
        if let Some((_, name)) = WHOLE.iter().find(|(stored, _)| *stored == tensor.name) {
            parts.push(Part { name: Some((*name).to_owned()), rows: shifted, ..part });
            return Ok(());
        }
        let configured = [FREQUENCIES, LONG_FREQUENCIES, SHORT_FREQUENCIES];
        if configured.contains(&tensor.name.as_str())
            || tensor.name.ends_with(".attn_rot_embd.weight")
        {
            parts.push(Part { name: None, ..part });
            return Ok(());
        }
        let Some((layer, module, ending)) = split(&tensor.name) else {
            parts.push(part);
            return Ok(());
        };
        if let Some(fused) = self.fused(module) {
            return self.add_fused(fused, tensor, (layer, ending), parts);
        }
        if let Some(expert) = self.expert_name(layer, module, ending) {
            return fused::split_experts(&part, &[expert], parts);
        }
        let rows = match module {
            "attn_q" => self.rows(tensor, "attention.head_count")?,
            "attn_k" => self.rows(tensor, "attention.head_count_kv")?,
            _ => shifted,
        };
        let router = self.architecture.experts.map(|[router, ..]| router);
        let router = router.filter(|_| module == "ffn_gate_inp");
        let own = self.architecture.own.iter().chain(LAYER);
        let ours = own.clone().find(|(theirs, _)| *theirs == module).map(|(_, ours)| *ours);
        let name = router.or(ours).map_or_else(
            || tensor.name.clone(),
            |ours| match ours {
                SINKS => format!("model.layers.{layer}.{ours}"),
                _ => format!("model.layers.{layer}.{ours}.{ending}"),
            },
        );
        parts.push(Part { name: Some(name), rows, ..part });
        Ok(())
    }

    /// What comes before and after an expert's number in the name of its matrix.
    fn expert_name(&self, layer: &str, module: &str, ending: &str) -> Option<[String; 2]> {
        let [router, gate, up, down] = self.architecture.experts?;
        let matrix = match module {
            "ffn_gate_exps" => gate,
            "ffn_up_exps" => up,
            "ffn_down_exps" => down,
            _ => return None,
        };
        let (block, _) = router.rsplit_once('.')?;
        let before = format!("model.layers.{layer}.{block}.experts.");
        Some([before, format!(".{matrix}.{ending}")])
    }

    /// How a tensor is stored that may be the gains of a norm.
    fn shifted(&self, tensor: &Tensor) -> Result<Rows, GgufError> {
        if !self.architecture.is_shifted || !tensor.name.ends_with("norm.weight") {
            return Ok(Rows::Same);
        }
        if tensor.shape.len() == 1 && matches!(tensor.kind, Kind::Floats(_)) {
            return Ok(Rows::OneMore);
        }
        let problem = format!("{} {:?} are no gains of a norm", tensor.kind, tensor.shape);
        Err(GgufError::Tensor { tensor: tensor.name.clone(), problem })
    }

    fn rows(&self, tensor: &Tensor, heads: &str) -> Result<Rows, GgufError> {
        if !self.architecture.is_turned {
            return Ok(Rows::Same);
        }
        let heads = match self.count(heads)? {
            Some(heads) if heads > 0 => heads,
            // Without grouped queries there are as many keys.
            _ => self.needed_count("attention.head_count")?,
        };
        let is_vector = tensor.shape.len() == 1 && matches!(tensor.kind, Kind::Floats(_));
        if tensor.shape.len() != 2 && !is_vector {
            let problem = format!("{:?} is no matrix", tensor.shape);
            return Err(GgufError::Tensor { tensor: tensor.name.clone(), problem });
        }
        let rows = tensor.shape.first().copied().unwrap_or(0);
        let head = rows / heads;
        if head * heads != rows || head == 0 || !head.is_multiple_of(2) {
            return Err(GgufError::Tensor {
                tensor: tensor.name.clone(),
                problem: format!("its {rows} rows are not {heads} heads of an even size"),
            });
        }
        Ok(Rows::Rotary { head })
    }
}

/// Layer, module and ending of a name such as `blk.7.attn_q.weight`.
fn split(name: &str) -> Option<(&str, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (module, ending) = rest.split_once('.')?;
    // One spelling per layer: `blk.01` would be a second name for `blk.1`.
    let number: u32 = layer.parse().ok()?;
    let right = number.to_string() == layer && matches!(ending, "weight" | "bias");
    right.then_some((layer, module, ending))
}
