//! The descriptions of single formats.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Awq, GIVE_ORIGINAL, Gptq, Method, Mlx, MlxFormat, MlxMode, PerModule, Section};
use crate::stored::StoredError;

/// Largest side of a block or group that is believed: the widest matrices have under 2^18.
const MAX_BLOCK: u64 = 1 << 20;

/// Keys that say how activations or the cache are quantized at run time, or what was left alone;
/// stored tensors tell the latter by themselves.
const RUN_TIME: &[&str] = &[
    "quant_method",
    "activation_scheme",
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "kv_cache_quant_method",
    "exclude_modules",
    "dequantize",
];

pub(super) fn refused(format: &str, reason: &str) -> StoredError {
    let reason = format!("{reason}; {GIVE_ORIGINAL}");
    StoredError::Refused { format: format.to_owned(), reason }
}

pub(super) fn known(keys: &[&'static str]) -> Vec<&'static str> {
    RUN_TIME.iter().chain(keys).copied().collect()
}

pub(super) fn fp8(section: &Section<'_>) -> Result<Method, StoredError> {
    let keys = ["fmt", "scale_fmt", "weight_block_size", "is_checkpoint_fp8_serialized"];
    section.only("fp8", &known(&keys))?;
    if !matches!(section.text("fmt")?, None | Some("e4m3" | "float8_e4m3fn")) {
        return Err(section.wrong("fmt", "\"e4m3\""));
    }
    if !matches!(section.text("scale_fmt")?, None | Some("ue8m0" | "float")) {
        return Err(section.wrong("scale_fmt", "\"ue8m0\" or \"float\""));
    }
    Ok(Method::Fp8 { block: block(section, "weight_block_size")? })
}

/// Rows and columns of a block.
pub(super) fn block(section: &Section<'_>, key: &str) -> Result<Option<[u64; 2]>, StoredError> {
    let Some(value) = section.get(key) else { return Ok(None) };
    let side =
        |index: usize| value.get(index)?.as_u64().filter(|side| (1..=MAX_BLOCK).contains(side));
    match (value.as_array().map(Vec::len), side(0), side(1)) {
        (Some(2), Some(rows), Some(columns)) => Ok(Some([rows, columns])),
        _ => Err(section.wrong(key, "two sizes")),
    }
}

/// A group size; −1 is one group.
pub(super) fn group_size(section: &Section<'_>) -> Result<Option<u64>, StoredError> {
    match section.get("group_size") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        Some(_) => section.size("group_size", MAX_BLOCK),
        None => Err(section.wrong("group_size", "a size, or -1")),
    }
}

pub(super) fn gptq(section: &Section<'_>) -> Result<Method, StoredError> {
    // What the quantizer was told; what came of it stands in the tensors.
    let keys = [
        "bits",
        "group_size",
        "desc_act",
        "sym",
        "checkpoint_format",
        "format",
        "damp_percent",
        "damp_auto_increment",
        "true_sequential",
        "static_groups",
        "lm_head",
        "is_marlin_format",
        "model_name_or_path",
        "model_file_base_name",
        "quantizer",
        "meta",
        "pack_dtype",
        "dynamic",
        "dataset",
        "tokenizer",
        "model_seqlen",
        "block_name_to_quantize",
        "use_cuda_fp16",
        "module_name_preceding_first_block",
        "batch_size",
        "pad_token_id",
        "use_exllama",
        "max_input_length",
        "exllama_config",
        "cache_block_outputs",
        "disable_exllama",
        "backend",
        "modules_in_block_to_quantize",
        "hyb_act",
        "rotation",
    ];
    section.only("gptq", &known(&keys))?;
    let bits = section.size("bits", 32)?.ok_or_else(|| section.wrong("bits", "2, 4 or 8"))?;
    if !matches!(bits, 2 | 4 | 8) {
        let format = format!("GPTQ (gptq) with {bits} bits");
        return Err(refused(&format, "2, 4 and 8 bits are read"));
    }
    let format = section.text("checkpoint_format")?.or(section.text("format")?);
    let is_v2 = match format.unwrap_or("gptq") {
        "gptq" => false,
        "gptq_v2" => true,
        other => {
            return Err(refused(
                &format!("GPTQ (gptq) in the layout {other}"),
                "gptq and gptq_v2 are read",
            ));
        }
    };
    if section.flag("is_marlin_format")? == Some(true) {
        return Err(refused("GPTQ (gptq) in the layout marlin", "gptq and gptq_v2 are read"));
    }
    if section.has("rotation") || section.flag("hyb_act")? == Some(true) {
        return Err(section.wrong("rotation", "none"));
    }
    if !matches!(section.text("pack_dtype")?, None | Some("int32" | "torch.int32")) {
        return Err(section.wrong("pack_dtype", "\"int32\""));
    }
    if let Some(dynamic) = section.section("dynamic")? {
        // "-:pattern" leaves modules alone, anything else gives them other parameters.
        if dynamic.keys().any(|(key, _)| !key.starts_with("-:")) {
            return Err(section.wrong("dynamic", "nothing but modules that are left out (-:…)"));
        }
    }
    let main = Gptq { bits: bits as u32, group_size: group_size(section)?, is_v2 };
    Ok(Method::Gptq(PerModule::same(main)))
}

pub(super) fn awq(section: &Section<'_>) -> Result<Method, StoredError> {
    let keys = [
        "bits",
        "w_bit",
        "q_group_size",
        "group_size",
        "version",
        "zero_point",
        "backend",
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "exllama_config",
    ];
    section.only("awq", &known(&keys))?;
    let version = section.text("version")?.unwrap_or("gemm").to_ascii_lowercase();
    if version != "gemm" {
        return Err(refused(&format!("AWQ (awq) in the layout {version}"), "gemm is read"));
    }
    if section.size("bits", 32)? != Some(4) {
        let bits = section.get("bits").map_or_else(|| "unknown".to_owned(), Value::to_string);
        return Err(refused(&format!("AWQ (awq) with {bits} bits"), "4 bits are read"));
    }
    if section.flag("zero_point")? == Some(false) {
        return Err(section.wrong("zero_point", "true"));
    }
    Ok(Method::Awq(PerModule::same(Awq { group_size: group_size(section)? })))
}

pub(super) fn mxfp4(section: &Section<'_>) -> Result<Method, StoredError> {
    section.only("mxfp4", &known(&[]))?;
    Ok(Method::Mxfp4)
}

pub(super) fn bitsandbytes(section: &Section<'_>) -> Result<Method, StoredError> {
    // How the program that made it would load it; what came of it stands beside each tensor.
    let is_known = |key: &str| {
        let key = key.trim_start_matches('_');
        ["load_in_", "bnb_4bit_", "llm_int8_"].iter().any(|start| key.starts_with(start))
    };
    let loading: Vec<&str> =
        section.keys().map(|(key, _)| key.as_str()).filter(|key| is_known(key)).collect();
    section.only("bitsandbytes", &[RUN_TIME, &loading].concat())?;
    Ok(Method::BitsAndBytes)
}

pub(super) fn hqq(section: &Section<'_>) -> Result<Method, StoredError> {
    // The parameters stand beside each tensor.
    section.only("hqq", &known(&["quant_config", "skip_modules"]))?;
    Ok(Method::Hqq)
}

pub(super) fn torchao(section: &Section<'_>) -> Result<Method, StoredError> {
    // Types and shapes of the tensors say what came of it.
    let keys = [
        "quant_type",
        "quant_type_kwargs",
        "include_input_output_embeddings",
        "untie_embedding_weights",
    ];
    section.only("torchao", &known(&keys))?;
    Ok(Method::TorchAo)
}

pub(super) fn modelopt(section: &Section<'_>) -> Result<Method, StoredError> {
    let keys = [
        "quant_algo",
        "group_size",
        "producer",
        "config_groups",
        "quantized_layers",
        "has_zero_point",
        "pre_quant_scale",
        "smoothquant_val",
    ];
    section.only("modelopt", &known(&keys))?;
    if section.flag("has_zero_point")? == Some(true) {
        return Err(section.wrong("has_zero_point", "false"));
    }
    let algorithm = |found: Option<&str>| match found {
        Some(
            "FP8"
            | "FP8_PER_CHANNEL_PER_TOKEN"
            | "NVFP4"
            | "NVFP4_AWQ"
            | "W4A16_NVFP4"
            | "W4A16_AWQ"
            | "W8A16"
            | "W8A8_SQ_PER_CHANNEL",
        ) => Ok(()),
        other => {
            let format = format!("modelopt {}", other.unwrap_or("without quant_algo"));
            let read = "FP8, NVFP4, W4A16_AWQ, W8A16 and W8A8_SQ_PER_CHANNEL are read";
            Err(refused(&format, read))
        }
    };
    match section.text("quant_algo")? {
        Some("MIXED_PRECISION") => {
            let layers = section.section("quantized_layers")?;
            let layers = layers.ok_or_else(|| section.wrong("quantized_layers", "an object"))?;
            for (_, layer) in layers.keys() {
                algorithm(layer["quant_algo"].as_str())?;
            }
        }
        other => algorithm(other)?,
    }
    Ok(Method::ModelOpt)
}

pub(super) fn mlx(section: &Section<'_>) -> Result<Method, StoredError> {
    let main = mlx_format(section, None)?;
    let mut overrides = BTreeMap::new();
    for (key, value) in section.keys() {
        let choice = match value {
            _ if ["group_size", "bits", "mode"].contains(&key.as_str()) => continue,
            Value::Bool(false) => None,
            Value::Object(_) => {
                let own = section.section(key)?.expect("an object has a section");
                own.only("mlx", &["group_size", "bits", "mode"])?;
                Some(mlx_format(&own, Some(main))?)
            }
            // Quantized like the rest.
            Value::Bool(true) => Some(main),
            _ => return Err(section.wrong(key, "an object with bits and group_size, or false")),
        };
        overrides.insert(key.clone(), choice);
    }
    Ok(Method::Mlx(Mlx { main, overrides }))
}

fn mlx_format(section: &Section<'_>, main: Option<MlxFormat>) -> Result<MlxFormat, StoredError> {
    let mode = match section.text("mode")? {
        None => main.map_or(MlxMode::Affine, |main| main.mode),
        Some("affine") => MlxMode::Affine,
        Some("mxfp4") => MlxMode::Mxfp4,
        Some("nvfp4") => MlxMode::Nvfp4,
        Some("mxfp8") => MlxMode::Mxfp8,
        Some(_) => return Err(section.wrong("mode", "affine, mxfp4, nvfp4 or mxfp8")),
    };
    let fixed = match mode {
        MlxMode::Affine => None,
        MlxMode::Mxfp4 => Some((4, 32)),
        MlxMode::Nvfp4 => Some((4, 16)),
        MlxMode::Mxfp8 => Some((8, 32)),
    };
    let bits = section.size("bits", 8)?.or(fixed.map(|(bits, _)| bits));
    let group_size = section.size("group_size", MAX_BLOCK)?.or(fixed.map(|(_, group)| group));
    let (Some(bits), Some(group_size)) = (bits, group_size) else {
        let key = if bits.is_none() { "bits" } else { "group_size" };
        return Err(section.wrong(key, "a number"));
    };
    let possible = match fixed {
        Some(fixed) => fixed == (bits, group_size),
        None => matches!(bits, 2..=6 | 8) && matches!(group_size, 16 | 32 | 64 | 128),
    };
    if !possible {
        return Err(section.wrong("bits", "bits and group size that MLX has for this mode"));
    }
    Ok(MlxFormat { mode, bits: bits as u32, group_size })
}
