//! The memory that `plan` states is the memory that the engine uses.

use std::{fs, path::Path};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{data, fail, path, succeed},
    running::{Running, ask, post},
};

/// How far, in percent, the engine's memory may be from what was planned.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "resident size is read on Linux"))]
const TOLERATED_PERCENT: f64 = 5.0;

/// Layers of the test model `qwen3_next` that have linear attention.
const LINEAR_LAYERS: u64 = 3;

/// Writes a Llama of random weights, large enough that they and not the program decide: it has no
/// tokenizer, for which 10 MB of the program's share are planned.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "resident size is read on Linux"))]
pub(crate) fn write_model(folder: &Path) {
    let [hidden, inner, vocab, layers] = [1024, 4096, 16_384, 8];
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 64, "intermediate_size": inner, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "attention_bias": false, "mlp_bias": false,
    });
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocab, hidden]),
        ("model.norm".to_owned(), vec![hidden]),
        ("lm_head".to_owned(), vec![vocab, hidden]),
    ];
    for layer in 0..layers {
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        for module in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            shapes.push((name(&format!("self_attn.{module}")), vec![hidden, hidden]));
        }
        shapes.push((name("mlp.gate_proj"), vec![inner, hidden]));
        shapes.push((name("mlp.up_proj"), vec![inner, hidden]));
        shapes.push((name("mlp.down_proj"), vec![hidden, inner]));
        shapes.push((name("input_layernorm"), vec![hidden]));
        shapes.push((name("post_attention_layernorm"), vec![hidden]));
    }
    let mut state = 7_u64;
    let mut weight = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        // Of either sign, from 2^-7 to 2^-5.
        (state >> 48) as u16 & 0x807f | 0x3c00 | (state >> 40) as u16 & 0x0080
    };
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .map(|(_, shape)| {
            (0..shape.iter().product()).flat_map(|_: usize| weight().to_le_bytes()).collect()
        })
        .collect();
    let tensors = shapes.iter().zip(&bytes).map(|((name, shape), bytes)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap();
        (format!("{name}.weight"), view)
    });
    fs::create_dir_all(folder).unwrap();
    let file = folder.join("model.safetensors");
    fs::write(file, safetensors::serialize(tensors, None).unwrap()).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn the_engine_uses_the_planned_memory() {
    let folder = tempdir().unwrap();
    let (source, set) = (folder.path().join("source"), folder.path().join("set"));
    write_model(&source);
    succeed(&["convert", path(&source), "-o", path(&set), "--bits", "16"]);
    let args = ["--contexts", "128", "--batches", "1", "--generate", "4", "--threads", "2"];
    let said = succeed(&[&["bench", path(&set), "--json"], &args[..]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    let of = |name: &str| said[name].as_f64().unwrap();
    let percent = (of("peak_bytes") / of("planned_bytes") - 1.0) * 100.0;
    assert!(
        percent.abs() <= TOLERATED_PERCENT,
        "planned {}, at most {}: {percent:.1} %",
        of("planned_bytes"),
        of("peak_bytes")
    );
}

/// What the first node of a plan needs.
fn planned(model: &str, options: &[&str], what: &str) -> u64 {
    let source = data(model);
    let said = succeed(&[&["plan", path(&source), "--json"], options].concat());
    let plan: Value = serde_json::from_str(&said).unwrap();
    plan["ranks"][0][what].as_u64().unwrap()
}

#[test]
fn plan_counts_kv_pages_and_linear_attention_states() {
    let cache = |model: &str, options: &[&str]| {
        planned(model, &[&["--context", "300"], options].concat(), "cache_bytes")
    };
    // kjv-4m: 512 tokens' pages of keys and values in every layer.
    let config: Value =
        serde_json::from_slice(&fs::read(data("kjv-4m/config.json")).unwrap()).unwrap();
    let number = |name: &str| config[name].as_u64().unwrap();
    let heads = number("num_key_value_heads");
    let width = number("hidden_size") / number("num_attention_heads");
    let layers = number("num_hidden_layers");
    let rows = 2 * 512 * layers * heads;
    assert_eq!(cache("kjv-4m", &[]), rows * width * 4);
    assert_eq!(cache("kjv-4m", &["--kv-type", "bf16"]), rows * width * 2);
    assert_eq!(cache("kjv-4m", &["--kv-type", "q8"]), rows * (width + 4));
    // Without a context the engine takes 64 MiB for models as small, in whole pages.
    let all = planned("kjv-4m", &[], "cache_bytes");
    let page = 2 * 256 * layers * heads * width * 4;
    assert!(all <= 64 << 20 && all + page > 64 << 20 && all.is_multiple_of(page), "{all}");
    // A window shortens nothing: 256 tokens more take as much as the first 256.
    let at = |model: &str, context: &str| planned(model, &["--context", context], "cache_bytes");
    assert_eq!(at("models/gemma2", "500"), 2 * at("models/gemma2", "200"));
    // States of linear attention are there once. Each of these layers has 8 value heads of 16 × 16
    // and the last 3 inputs of its convolutions, 2 × 64 keys and 128 values wide.
    let (first, both) = (at("models/qwen3_next", "200"), at("models/qwen3_next", "500"));
    assert_eq!(2 * first - both, LINEAR_LAYERS * 4 * (8 * 16 * 16 + 3 * (2 * 64 + 128)));
}

#[test]
fn serve_keeps_the_kv_cache_within_kv_memory() {
    let folder = tempdir().unwrap();
    let (set, source) = (folder.path().join("set"), data("kjv-4m"));
    succeed(&["convert", path(&source), "-o", path(&set)]);
    // One page of 256 tokens in four layers.
    let server = Running::serve(&set, &["--threads", "1", "--kv-memory", "1m"]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let question = "And it came to pass ".repeat(100);
    let messages = json!([{ "role": "user", "content": question }]);
    let body = json!({ "messages": messages, "max_tokens": 4 });
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), &body);
    assert!(status != 200 && answer.to_string().contains("--kv-memory"), "{status} {answer}");
    assert_eq!(server.terminate(), Some(0));
    // A smaller type has room for more.
    let options = ["--threads", "1", "--kv-memory", "2m", "--kv-type", "q8"];
    let server = Running::serve(&set, &options);
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    drop(server);
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[1]").unwrap();
    let out = folder.path().join("out");
    let args = ["logits", path(&set), "--tokens", path(&ids), "-o", path(&out)];
    let said = fail(2, &[&args[..], &["--kv-memory", "1m"]].concat());
    assert!(said.contains("--kv-memory is for serving"), "{said}");
    let said = fail(2, &["serve", path(&set), "--engine", "mlx", "--kv-type", "q8"]);
    assert!(said.contains("--kv-type q8 needs --engine cpu"), "{said}");
}
