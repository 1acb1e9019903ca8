//! Keys that tools leave in configurations and no forward pass reads: fine-tuning, conversion and
//! serving programs, and the libraries of browsers. Knows no family.

/// Keys by their whole name.
const KEYS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "_hf_peft_config_loaded",
    "_pre_quantization_dtype",
    "adapter_path",
    "attn_implementation",
    "base_model",
    "base_model_name",
    "base_model_name_or_path",
    "cache_dir",
    "dataset",
    "deepspeed",
    "device_map",
    "flash_attn",
    "fsdp",
    "hf_device_map",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "license",
    "llama_pro",
    "local_files_only",
    "lora_parameters",
    "max_seq_length",
    "merge_method",
    "mergekit_config",
    "model_max_length",
    "model_name",
    "model_name_or_path",
    "neftune_noise_alpha",
    "optimum_version",
    "pretrained_model_name_or_path",
    "save_dtype",
    "tokenizer_model_max_length",
    "tokenizer_name",
    "tokenizer_padding_side",
    "tokenizer_path",
    "torch_compile",
    "training_args",
    "trust_remote_code",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_liger_kernel",
    "xformers",
];

/// Beginnings of the names of a tool's own keys.
const PREFIXES: &[&str] = &[
    "_unsloth",
    "axolotl_",
    "deepspeed_",
    "llamafactory_",
    "lmdeploy_",
    "mergekit_",
    "mlc_",
    "neuron_",
    "ollama_",
    "openvino_",
    "optimum_",
    "ort_",
    "sglang_",
    "tgi_",
    "transformers.js",
    "transformers_js",
    "trl_",
    "unsloth_",
    "vllm_",
    "wandb_",
];

/// Whether a key belongs to a tool and not to the model.
pub(crate) fn is_inert(key: &str) -> bool {
    KEYS.contains(&key) || PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_tools_are_known_and_those_of_models_are_not() {
        for key in ["model_name", "transformers.js_config", "unsloth_training", "is_llama_config"] {
            assert!(is_inert(key), "{key}");
        }
        for key in ["attention_sinks", "model_type", "rope_factor", "num_experts", "mup_scale"] {
            assert!(!is_inert(key), "{key}");
        }
    }
}
