//! Speculative decoding through the server: the same answers with draft tokens, whether they come from
//! a prediction, from the prompt or from a draft model.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, copy_folder, data, fail, path, succeed},
    running::{Running, get, post, wait_until},
    sets::{kjv, kjv_for_two},
};

/// The choices of an answer, and its usage.
fn ask(server: &Running, body: &Value) -> (Value, Value) {
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), body);
    assert_eq!(status, 200, "{answer}");
    (answer["choices"].clone(), answer["usage"].clone())
}

fn counter(server: &Running, name: &str) -> f64 {
    let (_, metrics) = get(&format!("{}/metrics", server.url().trim_end_matches("/v1")));
    let line = metrics.lines().find(|line| line.starts_with(&format!("{name}_total{{")));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap()
}

#[test]
fn a_server_answers_the_same_with_speculative_decoding() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let [off, auto] =
        ["off", "auto"].map(|when| Running::serve(&set, &["--speculate", when, "--threads", "1"]));
    let body = |question: &str, more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": question}],
            "max_tokens": 60, "temperature": 0, "seed": 5, "logprobs": true, "top_logprobs": 3});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "maxLength": 40},
        "b": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 6, "maxItems": 9}},
        "required": ["a", "b"], "additionalProperties": false});
    for more in [
        json!({}),
        json!({"temperature": 0.9, "top_p": 0.9}),
        json!({"temperature": 1.2, "n": 3, "frequency_penalty": 0.4}),
        json!({"stop": ["the", "and"]}),
        json!({"logit_bias": {"7": -5, "9": 2}, "repetition_penalty": 0.7}),
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
    ] {
        let body = body("Genesis 1:1", more);
        let expected = ask(&off, &body);
        assert_eq!(ask(&auto, &body), expected, "{body}");
        let told = expected.0[0]["message"]["content"].as_str().unwrap().to_owned();
        let mut foretelling = body;
        foretelling["prediction"] = json!({"type": "content", "content": told});
        let (choices, usage) = ask(&auto, &foretelling);
        assert_eq!(choices, expected.0, "{foretelling}");
        assert_eq!(usage["completion_tokens"], expected.1["completion_tokens"]);
    }
    let said = ask(&off, &body("John 11:35", json!({}))).0[0]["message"]["content"].clone();
    let foretelling = json!({"prediction": {"type": "content", "content":
        [{"type": "text", "text": said}]}});
    let (_, usage) = ask(&auto, &body("John 11:35", foretelling));
    let details = &usage["completion_tokens_details"];
    // "Jesus wept." to the letter.
    assert_eq!(details["accepted_prediction_tokens"], usage["completion_tokens"], "{usage}");
    assert_eq!(details["rejected_prediction_tokens"], 0, "{usage}");
    // Ranks say once a second what they have done.
    wait_until("drafts are counted", || counter(&auto, "shardpack_accepted_draft_tokens") >= 20.0);
    assert!(counter(&off, "shardpack_draft_tokens") < 0.5);
    for (prediction, part) in [(json!({"type": "other"}), "other"), (json!({}), "content")] {
        let body = body("John 11:35", json!({"prediction": prediction}));
        let (status, answer) = post(&format!("{}/chat/completions", auto.url()), &body);
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(part), "{answer}");
    }
}

/// Writes a model that says what another says and takes longer: with further layers that add
/// nothing.
fn deepen(source: &Path, output: &Path, layers: usize) {
    copy_folder(source, output);
    let weights = output.join("model.safetensors");
    let file = fs::read(&weights).unwrap();
    let (size, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*size) as usize);
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let mut data = data.to_vec();
    let first: Vec<(String, Value)> = header
        .iter()
        .filter(|(name, _)| name.starts_with("model.layers.0."))
        .map(|(name, entry)| (name.clone(), entry.clone()))
        .collect();
    let name = |layer: usize| format!("model.layers.{layer}.");
    let known =
        (0..1000).take_while(|it| header.keys().any(|key| key.starts_with(&name(*it)))).count();
    for layer in known..known + layers {
        for (tensor, entry) in &first {
            let [from, to] = [0, 1].map(|at| entry["data_offsets"][at].as_u64().unwrap() as usize);
            let start = data.len();
            let adds = tensor.contains("o_proj") || tensor.contains("down_proj");
            data.extend_from_within(from..to);
            if adds {
                data[start..].fill(0);
            }
            let mut entry = entry.clone();
            entry["data_offsets"] = json!([start, data.len()]);
            header.insert(tensor.replace("model.layers.0.", &name(layer)), entry);
        }
    }
    let header = serde_json::to_vec(&header).unwrap();
    let size = (header.len() as u64).to_le_bytes();
    fs::write(&weights, [&size[..], &header, &data].concat()).unwrap();
    let path = output.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["num_hidden_layers"] = json!(known + layers);
    fs::write(path, config.to_string()).unwrap();
}

/// The draft model is the same model at fewer bits, without the layers that add nothing.
#[test]
fn a_server_answers_the_same_with_a_draft_model() {
    let folder = tempdir().unwrap();
    let deep = folder.path().join("deep");
    deepen(&data("kjv-4m"), &deep, 40);
    let sixteen = ["--bits", "16", "--nodes", "2"];
    let set = convert(path(&deep), &folder.path().join("set"), &sixteen);
    let draft = convert("kjv-4m", &folder.path().join("draft"), &["--bits", "4"]);
    let threads = ["--threads", "1"];
    let plain = Running::serve(&set, &[&threads[..], &["--speculate", "off"]].concat());
    let drafted = Running::serve(&set, &[&threads[..], &["--draft-model", path(&draft)]].concat());
    for (temperature, question) in
        [(0.0, "John 11:35"), (0.0, "Genesis 1:1"), (0.8, "Psalm 23:1"), (1.3, "Exodus 20:3")]
    {
        let body = json!({"messages": [{"role": "user", "content": question}], "max_tokens": 60,
            "temperature": temperature, "seed": 5, "logprobs": true, "top_logprobs": 3});
        assert_eq!(ask(&drafted, &body).0, ask(&plain, &body).0, "{question}");
    }
    // Ranks say once a second what they have done.
    wait_until("drafts are counted", || {
        counter(&drafted, "shardpack_accepted_draft_tokens") >= 1.0
    });
}

#[test]
fn unusable_draft_models_are_refused() {
    let folder = tempdir().unwrap();
    let set = |model: &str, name: &str, options: &[&str]| {
        convert(model, &folder.path().join(name), options)
    };
    let served = set("kjv-4m", "served", &[]);
    let sharded = set("kjv-4m", "sharded", &["--nodes", "2"]);
    let other = folder.path().join("of-others");
    copy_folder(&data("kjv-4m"), &other);
    turn_tokens(&other.join("tokenizer.json"));
    let other = set(path(&other), "other", &[]);
    let refused = |set: &Path, draft: &Path, code: i32, expected: &str, more: &[&str]| {
        let serve = ["serve", path(set), "--listen", "127.0.0.1:0", "--draft-model", path(draft)];
        let error = fail(code, &[&serve[..], more].concat());
        assert!(error.contains(expected), "{error}");
    };
    refused(&served, &sharded, 1, "sharded for 2 nodes", &[]);
    refused(&served, &folder.path().join("none"), 2, "no such folder", &[]);
    refused(&served, &other, 1, "its tokens are not the model's", &[]);
    refused(&served, &served, 2, "--speculate off disables it", &["--speculate", "off"]);
    refused(&served, &served, 2, "runs on another node", &["--nodes", "127.0.0.1:9"]);
}

/// Gives the usual tokens of a tokenizer each other's places.
fn turn_tokens(file: &Path) {
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let added: Vec<u64> = tokenizer["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token["id"].as_u64().unwrap())
        .collect();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let mut usual: Vec<u64> = vocabulary
        .values()
        .map(|id| id.as_u64().unwrap())
        .filter(|id| !added.contains(id))
        .collect();
    usual.sort_unstable();
    let turned: BTreeMap<u64, u64> =
        usual.iter().copied().zip(usual.iter().rev().copied()).collect();
    for id in vocabulary.values_mut() {
        if let Some(turned) = turned.get(&id.as_u64().unwrap()) {
            *id = json!(turned);
        }
    }
    fs::write(file, tokenizer.to_string()).unwrap();
}

#[test]
fn bench_reports_acceptance_rates() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let load = ["--contexts", "16", "--batches", "1", "--generate", "40", "--threads", "1"];
    let args = [&["bench", path(&set), "--json"][..], &load].concat();
    let plain: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(plain["drafts"], Value::Null);
    let args = [&args[..], &["--speculate", "auto"]].concat();
    let found: Value = serde_json::from_str(&succeed(&args)).unwrap();
    let drafts = found["drafts"].as_array().unwrap();
    let texts: Vec<_> = drafts.iter().map(|row| row["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["new", "likely", "foretold"]);
    assert!(drafts[2]["accepted_share"].as_f64().unwrap() > 0.9, "{found}");
    let table = succeed(&args.iter().copied().filter(|arg| *arg != "--json").collect::<Vec<_>>());
    assert!(table.contains("predicted") && table.contains("with drafts"), "{table}");
}
