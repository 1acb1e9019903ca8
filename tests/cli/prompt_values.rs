//! What prompts give besides tokens: log probabilities and embeddings, through server and ranks.

use std::fs;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, data, path, succeed},
    running::{Running, post},
};

fn floats(file: &std::path::Path, name: &str) -> Vec<f32> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// An echoed prompt's log probabilities are those of the logits that `shardpack logits` writes.
#[test]
fn echoed_prompts_have_the_log_probabilities_of_their_logits() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2", "--bits", "16"]);
    let tokens: Vec<u32> = (0..90).map(|index| 30 + index * 17 % 400).collect();
    let (ids, out) = (folder.path().join("ids.json"), folder.path().join("logits.safetensors"));
    fs::write(&ids, json!(tokens).to_string()).unwrap();
    succeed(&["logits", path(&set), "--tokens", path(&ids), "-o", path(&out)]);
    let logits = floats(&out, "logits");
    let vocab = logits.len() / tokens.len();
    let server = Running::serve(&set, &[]);
    let body = json!({"prompt": tokens, "echo": true, "logprobs": 2, "max_tokens": 0});
    let (status, answer) = post(&format!("{}/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    let found = &answer["choices"][0]["logprobs"];
    assert_eq!(found["token_logprobs"][0], Value::Null);
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    for (index, token) in tokens.iter().enumerate().skip(1) {
        let row = &logits[(index - 1) * vocab..index * vocab];
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let expected = f64::from(row[*token as usize]) - sum.ln();
        let found = found["token_logprobs"][index].as_f64().unwrap();
        assert!((found - expected).abs() < 1e-4, "token {index}: {found}, expected {expected}");
    }
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn an_embedding_model_serves_vectors_and_refuses_to_chat() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("model");
    let model = data("embeddings/embedding_gemma");
    for part in ["", "1_Pooling", "2_Dense", "3_Dense"] {
        fs::create_dir_all(source.join(part)).unwrap();
        for entry in fs::read_dir(model.join(part)).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                fs::copy(entry.path(), source.join(part).join(entry.file_name())).unwrap();
            }
        }
    }
    // Requests of this test are token ids, so any tokenizer will do.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(data("kjv-4m").join(name), source.join(name)).unwrap();
    }
    let set = folder.path().join("set");
    let options = ["--nodes", "2", "--bits", "16", "--name", "gemma"];
    let args = ["convert", path(&source), "--output", path(&set)];
    succeed(&[&args[..], &options[..]].concat());
    // The same model for three nodes, without its source.
    let three = folder.path().join("three");
    succeed(&["reshard", path(&set), "--output", path(&three), "--nodes", "3"]);
    let server = Running::serve(&three, &[]);
    let expected = source.join("expected.safetensors");
    let tokens: Vec<u32> =
        floats(&expected, "tokens_b").iter().map(|value| value.to_bits()).collect();
    let body = json!({"model": "gemma", "input": [tokens, [5]]});
    let (status, answer) = post(&format!("{}/embeddings", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    let found = answer["data"][0]["embedding"].as_array().unwrap();
    for (found, expected) in found.iter().zip(floats(&expected, "embedding_b")) {
        let difference = (found.as_f64().unwrap() - f64::from(expected)).abs();
        assert!(difference < 5e-5, "{found}, expected {expected}");
    }
    assert_eq!(answer["usage"]["prompt_tokens"], tokens.len() + 1);
    let message = json!([{ "role": "user", "content": "John 3:16" }]);
    let url = format!("{}/chat/completions", server.url());
    let (status, answer) = post(&url, &json!({ "messages": message }));
    assert!(status == 400 && answer.to_string().contains("makes embeddings"), "{answer}");
    assert_eq!(server.terminate(), Some(0));
}
