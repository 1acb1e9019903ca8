//! What a checkpoint says of its stored precision: `quantization_config` or `quantization` in
//! `config.json`, `hf_quant_config.json`, or `quantize_config.json`. A key that is not known must
//! have a value that asks for nothing.

mod auto_round;
mod compressed;
mod methods;
mod section;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Map, Value};

use super::{StoredError, group::described};
use crate::container::TensorInfo;
pub(super) use compressed::{CompressedTensors, Kind, Strategy, Weights};
use section::Section;

/// Largest tensor that says how another is stored: that of bitsandbytes has some 200 bytes.
const MAX_DESCRIPTION_BYTES: u64 = 1 << 16;

/// Most keys of a description: MLX's lists every matrix of the model.
const MAX_KEYS: usize = 1 << 20;

/// What is asked of the user whose checkpoint is in a format that is not read.
pub(super) const GIVE_ORIGINAL: &str = "give the 16-bit original, or a checkpoint in FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes, HQQ, torchao, MXFP4, NVFP4, MLX or GGUF form";

/// A checkpoint's description of its stored precision, understood in full.
#[derive(Clone, Debug)]
pub struct StoredConfig(pub(super) Method);

/// How a checkpoint was quantized.
#[derive(Clone, Debug)]
pub(super) enum Method {
    /// FP8 with scales for blocks of so many rows and columns, or by each scale's own shape.
    Fp8 {
        block: Option<[u64; 2]>,
    },
    CompressedTensors(CompressedTensors),
    Gptq(PerModule<Gptq>),
    Awq(PerModule<Awq>),
    /// gpt-oss.
    Mxfp4,
    /// nvidia-modelopt: FP8, NVFP4 or integers, as each tensor's own types say.
    ModelOpt,
    Mlx(Mlx),
    /// Four or eight bits, as each tensor's own description says.
    BitsAndBytes,
    /// Likewise.
    Hqq,
    /// Integers or floats of eight bits, by each tensor's own type.
    TorchAo,
}

/// Parameters of every quantized module, and of those that differ.
#[derive(Clone, Debug)]
pub(super) struct PerModule<T> {
    pub(super) main: T,
    /// By module, in the order of precedence.
    pub(super) overrides: Vec<(Modules, T)>,
}

/// Which modules an override is for.
#[derive(Clone, Debug)]
pub(super) enum Modules {
    /// The one of this name.
    Named(String),
    /// Those in whose name the expression is found.
    Matching(Regex),
}

impl<T> PerModule<T> {
    pub(super) const fn same(main: T) -> Self {
        Self { main, overrides: Vec::new() }
    }

    /// The parameters of a module.
    pub(super) fn of(&self, module: &str) -> &T {
        let is_for = |modules: &Modules| match modules {
            Modules::Named(name) => name == module,
            Modules::Matching(expression) => expression.is_match(module),
        };
        let own = self.overrides.iter().find(|(modules, _)| is_for(modules));
        own.map_or(&self.main, |(_, parameters)| parameters)
    }
}

/// AWQ's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awq {
    /// Absent for one group.
    pub(super) group_size: Option<u64>,
}

/// GPTQ's parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gptq {
    pub(super) bits: u32,
    /// Absent for one group.
    pub(super) group_size: Option<u64>,
    /// Zero points are stored as they are, not minus one.
    pub(super) is_v2: bool,
}

/// MLX's parameters.
#[derive(Clone, Debug)]
pub(super) struct Mlx {
    pub(super) main: MlxFormat,
    /// By module; `None` is not quantized.
    pub(super) overrides: BTreeMap<String, Option<MlxFormat>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MlxFormat {
    pub(super) mode: MlxMode,
    pub(super) bits: u32,
    pub(super) group_size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MlxMode {
    Affine,
    Mxfp4,
    Nvfp4,
    Mxfp8,
}

/// The documents that can describe a checkpoint's stored precision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Documents<'a> {
    /// `config.json`.
    pub config: Option<&'a Value>,
    /// `hf_quant_config.json`, which nvidia-modelopt writes.
    pub hf_quant_config: Option<&'a Value>,
    /// `quantize_config.json`, which older GPTQ and AWQ tools write.
    pub quantize_config: Option<&'a Value>,
}

impl StoredConfig {
    /// Reads the description; `None` when there is none, which means plain floats.
    pub fn parse(documents: Documents<'_>) -> Result<Option<Self>, StoredError> {
        let null = Value::Null;
        let config = documents.config.unwrap_or(&null);
        let places = [
            ("quantization_config", &config["quantization_config"]),
            ("text_config.quantization_config", &config["text_config"]["quantization_config"]),
            ("compression_config", &config["compression_config"]),
            ("quantization", &config["quantization"]),
            ("text_config.quantization", &config["text_config"]["quantization"]),
        ];
        for (place, value) in places {
            if !value.is_null() {
                let section = Section::new(place, object(place, value)?);
                return parse_main(&section).map(|method| Some(Self(method)));
            }
        }
        if let Some(value) = documents.hf_quant_config {
            let place = "quantization of hf_quant_config.json";
            let section = Section::new(place, object(place, &value["quantization"])?);
            return methods::modelopt(&section).map(|method| Some(Self(method)));
        }
        if let Some(value) = documents.quantize_config {
            let place = "quantize_config.json";
            let section = Section::new(place, object(place, value)?);
            return methods::gptq(&section).map(|method| Some(Self(method)));
        }
        Ok(None)
    }

    /// The format's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match &self.0 {
            Method::Fp8 { .. } => "FP8",
            Method::CompressedTensors(_) => "compressed-tensors",
            Method::Gptq(_) => "GPTQ",
            Method::Awq(_) => "AWQ",
            Method::Mxfp4 => "MXFP4",
            Method::ModelOpt => "modelopt",
            Method::Mlx(_) => "MLX",
            Method::BitsAndBytes => "bitsandbytes",
            Method::Hqq => "HQQ",
            Method::TorchAo => "torchao",
        }
    }

    /// Whether a tensor says how others are stored, so that its bytes are needed to put tensors
    /// together.
    #[must_use]
    pub fn is_description(&self, tensor: &TensorInfo) -> bool {
        let name = tensor.name.as_str();
        let is_named = match &self.0 {
            Method::BitsAndBytes => {
                name.contains(described::STATE) || name.ends_with(described::BYTE_LAYOUT)
            }
            Method::Hqq => {
                name.rsplit_once('.').is_some_and(|(_, key)| described::HQQ_META.contains(&key))
            }
            _ => false,
        };
        is_named && tensor.size <= MAX_DESCRIPTION_BYTES
    }
}

fn object<'a>(place: &str, value: &'a Value) -> Result<&'a Map<String, Value>, StoredError> {
    match value {
        Value::Object(map) if map.len() <= MAX_KEYS => Ok(map),
        _ => Err(StoredError::Config {
            place: place.to_owned(),
            found: section::shown(value),
            expected: "an object".to_owned(),
        }),
    }
}

fn parse_main(section: &Section<'_>) -> Result<Method, StoredError> {
    let Some(method) = section.text("quant_method")? else {
        if section.has("bits") || section.has("mode") {
            return methods::mlx(section);
        }
        // Early FP8 and 8-bit checkpoints; nobody writes them any more.
        return Err(section.wrong("quant_method", "the name of a format"));
    };
    let refuse = |reason: &str| {
        Err(StoredError::Refused {
            format: format!("{method} (quant_method)"),
            reason: format!("{reason}{GIVE_ORIGINAL}"),
        })
    };
    match method {
        "fp8" => methods::fp8(section),
        "compressed-tensors" => compressed::parse(section).map(Method::CompressedTensors),
        "gptq" | "gptqmodel" => methods::gptq(section),
        "auto-round" | "auto_round" | "intel/auto-round" => auto_round::parse(section),
        "awq" => methods::awq(section),
        "mxfp4" => methods::mxfp4(section),
        "modelopt" => methods::modelopt(section),
        "bitsandbytes" => methods::bitsandbytes(section),
        "hqq" => methods::hqq(section),
        "torchao" => methods::torchao(section),
        "exl2" | "exl3" | "aqlm" | "spqr" | "quip" | "vptq" | "higgs" | "eetq" | "quanto"
        | "bitnet" | "fbgemm_fp8" | "quark" => refuse(""),
        _ => refuse("it is unknown; "),
    }
}
