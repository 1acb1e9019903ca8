//! Ollama's API beyond its answers: requests without a prompt, descriptions, log probabilities.

use serde_json::{Value, json};
use shardpack_chat::ChatModel;

use super::{
    STOP,
    scripted::{PATIENT, Reply, Scripted, Seen, Step, kjv, start, start_changed},
};
use crate::ModelInfo;

fn described() -> Scripted {
    let info = ModelInfo {
        digest: "ab".repeat(32),
        size_bytes: 4_321,
        family: "llama".to_owned(),
        repository: Some("org/verses".to_owned()),
        parameter_count: 4_200_000,
        bits: 4,
        dtype: "BF16".to_owned(),
        hidden_size: 256,
        layers: 4,
        heads: 8,
        kv_heads: 4,
        ffn_size: 768,
        vocab_size: 2048,
        ..ModelInfo::default()
    };
    let model = ChatModel::open(kjv()).unwrap();
    let limits = PATIENT;
    start_changed(vec![STOP], limits, model, |server| server.with_info(info))
}

fn lines(reply: &Reply) -> Vec<Value> {
    reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_request_without_a_prompt_loads_or_unloads_and_computes_nothing() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let check = |path: &str, more: Value, reason: &str| {
        let mut body = json!({"model": "kjv-4m:latest"});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        for stream in [json!(null), json!(true), json!(false)] {
            body["stream"] = stream;
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
            let mut found = reply.json();
            assert!(found["created_at"].take().as_str().unwrap().ends_with('Z'));
            let mut expected = json!({
                "model": "kjv-4m", "created_at": null, "done": true, "done_reason": reason,
            });
            if path == "/api/chat" {
                expected["message"] = json!({"role": "assistant", "content": ""});
            } else {
                expected["response"] = "".into();
            }
            assert_eq!(found, expected, "{path} {body}");
        }
    };
    for path in ["/api/generate", "/api/chat"] {
        check(path, json!({}), "load");
        check(path, json!({"prompt": "", "messages": []}), "load");
        check(path, json!({"keep_alive": "5m"}), "load");
        check(path, json!({"keep_alive": -1, "options": {"num_ctx": 4096}}), "load");
        check(path, json!({"keep_alive": 0}), "unload");
        check(path, json!({"keep_alive": "0s", "prompt": "", "messages": []}), "unload");
    }
    check("/api/generate", json!({"raw": true, "system": "", "suffix": ""}), "load");
    assert!(server.seen.try_recv().is_err(), "the engine has seen nothing");

    // With something to answer, the model's stay changes nothing; it stays anyway.
    let body = json!({"prompt": "John 11:35", "stream": false, "keep_alive": 0});
    assert_eq!(server.post("/api/generate", &body).json()["response"], "Jesus wept.");
    assert!(matches!(server.seen(), Seen::Submitted(_)));
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, body, words) in [
        ("/api/generate", json!({"model": "llama"}), "model 'llama' not found"),
        ("/api/chat", json!({"model": "llama:latest"}), "model 'llama' not found"),
        ("/api/chat", json!({"keep_alive": "soon"}), "keep_alive: expected a duration"),
        ("/api/generate", json!({"images": ["AAAA"]}), "images: images are not supported"),
        ("/api/generate", json!({"prompt": "a", "images": ["AAAA"]}), "images are not supported"),
        ("/api/generate", json!({"prompt": "a", "raw": true, "system": "b"}), "system: "),
        ("/api/chat", json!({"messages": messages, "think": "hard"}), "think: expected true"),
        ("/api/chat", json!({"messages": messages, "format": "xml"}), "format: expected"),
        ("/api/chat", json!({"messages": messages, "top_logprobs": 21}), "top_logprobs: "),
    ] {
        let reply = server.post(path, &body);
        let message = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(reply.status >= 400 && message.contains(words), "{path} {body}: {message}");
    }
}

#[test]
fn clients_in_go_send_what_nobody_set() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let body = json!({
        "model": "kjv-4m", "prompt": "John 11:35", "suffix": "", "system": "", "template": "",
        "stream": false, "options": null, "images": null,
    });
    let reply = server.post("/api/generate", &body);
    assert_eq!(reply.json()["response"], "Jesus wept.", "{}", reply.body);
    let body = json!({
        "messages": [{"role": "user", "content": "a", "images": []}], "stream": false,
        "options": {"num_gpu": 1, "typical_p": 0.7, "repeat_last_n": 64}, "truncate": true,
    });
    let reply = server.post("/api/chat", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let ignored = reply.header("x-shardpack-ignored-params").unwrap();
    assert_eq!(ignored, "options.typical_p, options.repeat_last_n, truncate");
}

#[test]
fn images_of_a_user_are_refused_whatever_their_form() {
    let server = start(vec![STOP]);
    let url = "data:image/png;base64,AA";
    for message in [
        json!({"role": "user", "content": "a", "images": ["AA"]}),
        json!({"role": "user", "content": "a", "images": "AA"}),
        json!({"role": "user", "content": "a", "images": [{"type": "png", "data": "AA"}]}),
        json!({"role": "system", "content": "a", "images": ["AA"]}),
        json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}),
    ] {
        let reply = server.post("/api/chat", &json!({"messages": [message]}));
        assert!(reply.status == 400 && reply.body.contains("image"), "{message}: {}", reply.body);
    }
}

#[test]
fn log_probabilities_are_ollamas() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let entry = |token: &str| json!({"token": token, "logprob": -0.5, "bytes": token.as_bytes()});
    for (path, mut body) in [
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a"}]})),
        ("/api/generate", json!({"prompt": "a"})),
    ] {
        body["logprobs"] = true.into();
        body["stream"] = false.into();
        let whole = server.post(path, &body).json();
        let all = whole["logprobs"].as_array().unwrap();
        assert_eq!(whole["eval_count"], all.len());
        assert_eq!(all[0], entry(all[0]["token"].as_str().unwrap()));
        body["top_logprobs"] = 2.into();
        body["stream"] = true.into();
        let lines = lines(&server.post(path, &body));
        let shown: Vec<&Value> =
            lines.iter().filter_map(|line| line["logprobs"].as_array()).flatten().collect();
        assert_eq!(shown.len(), all.len(), "{path}");
        let first = entry(all[0]["token"].as_str().unwrap());
        assert_eq!(shown[0]["top_logprobs"], json!([first, first]));
        let text: String = shown.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(text, "Jesus wept.");
        body["logprobs"] = false.into();
        assert!(!server.post(path, &body).body.contains("logprobs"), "{path}");
    }
}

#[test]
fn calls_have_ids_and_come_back_with_their_results() {
    let said = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 2}}\n</tool_call>";
    let server = start(vec![Step::Say(said), STOP]);
    let tools = json!([{"type": "function", "function": {"name": "f",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}]);
    let mut messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "tools": tools, "stream": false});
    let message = server.post("/api/chat", &body).json()["message"].clone();
    let calls = message["tool_calls"].as_array().unwrap();
    let found: Vec<(&Value, &Value)> = calls
        .iter()
        .map(|call| (&call["function"]["index"], &call["function"]["arguments"]))
        .collect();
    assert_eq!(found, [(&json!(0), &json!({"n": 1})), (&json!(1), &json!({"n": 2}))]);
    assert_eq!((&calls[0]["index"], &calls[1]["index"]), (&json!(0), &json!(1)));
    let ids: Vec<&Value> = calls.iter().map(|call| &call["id"]).collect();
    assert!(ids[0].is_string() && ids[0] != ids[1], "{ids:?}");
    let result = json!({"role": "tool", "tool_call_id": ids[0], "tool_name": "f", "content": "7"});
    let list = messages.as_array_mut().unwrap();
    list.extend([message.clone(), result]);
    let body = json!({"messages": messages, "tools": tools});
    let reply = server.post("/api/chat", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let streamed: Vec<Value> = lines(&reply)
        .iter()
        .filter_map(|line| line["message"]["tool_calls"][0]["function"].as_object().cloned())
        .map(Value::Object)
        .collect();
    assert_eq!(streamed[1]["index"], 1);
}

#[test]
fn the_model_is_described_as_ollama_describes_its_own() {
    let server = described();
    let details = json!({
        "parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"],
        "parameter_size": "4.20M", "quantization_level": "int4", "context_length": 4096,
        "embedding_length": 256,
    });
    let tags = server.get("/api/tags").json();
    let first = &tags["models"][0];
    assert_eq!((&first["name"], &first["model"]), (&json!("kjv-4m"), &json!("kjv-4m")));
    assert_eq!((&first["size"], &first["digest"]), (&json!(4321), &json!("ab".repeat(32))));
    assert_eq!((&first["details"], &tags["models"][1]["name"]), (&details, &json!("org/alias")));
    let running = &server.get("/api/ps").json()["models"][0];
    assert_eq!((&running["size_vram"], &running["details"]), (&json!(4321), &details));
    for body in [json!({"model": "kjv-4m"}), json!({"name": "kjv-4m:latest", "verbose": true})] {
        let shown = server.post("/api/show", &body).json();
        assert_eq!(shown["details"], details);
        assert_eq!(
            shown["model_info"],
            json!({
                "general.architecture": "llama", "general.basename": "kjv-4m",
                "general.type": "model", "general.parameter_count": 4_200_000,
                "general.source.huggingface.repository": "org/verses",
                "llama.context_length": 4096, "llama.embedding_length": 256,
                "llama.block_count": 4, "llama.attention.head_count": 8,
                "llama.attention.head_count_kv": 4, "llama.feed_forward_length": 768,
                "llama.vocab_size": 2048,
            })
        );
        assert!(
            shown["parameters"].as_str().unwrap().contains("top_k                          40")
        );
        assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    }
    assert_eq!(server.post("/api/show", &json!({})).json()["error"], "model is required");
    // Codex needs 0.13.4 of Ollama.
    let version = server.get("/api/version").json()["version"].as_str().unwrap().to_owned();
    let parts: Vec<u32> = version.split('.').map(|part| part.parse().unwrap()).collect();
    assert!(parts >= vec![0, 13, 4], "{version}");
}

#[test]
fn a_served_model_is_pulled_at_once_and_cannot_be_deleted() {
    let server = described();
    let reply = server.post("/api/pull", &json!({"model": "kjv-4m"}));
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(lines(&reply).last(), Some(&json!({"status": "success"})));
    let whole = server.post("/api/pull", &json!({"name": "kjv-4m:latest", "stream": false}));
    assert_eq!(whole.json(), json!({"status": "success"}));
    let other = server.post("/api/pull", &json!({"model": "llama"}));
    assert!(
        other.status == 404 && other.body.contains("model 'llama' not found"),
        "{}",
        other.body
    );
    let body = json!({"model": "kjv-4m"}).to_string();
    let reply = Reply::read(server.send("DELETE", "/api/delete", &body));
    assert!(reply.status == 400 && reply.body.contains("is being served"), "{}", reply.body);
}

#[test]
fn lm_studios_list_names_the_model_and_its_context() {
    let server = described();
    let list = server.get("/api/v0/models").json();
    let expected = json!({
        "id": "kjv-4m", "object": "model", "type": "llm", "publisher": "org", "arch": "llama",
        "compatibility_type": "safetensors", "quantization": "4bit", "state": "loaded",
        "max_context_length": 4096, "loaded_context_length": 4096, "capabilities": ["tool_use"],
    });
    assert_eq!((&list["object"], &list["data"][0]), (&json!("list"), &expected));
    assert_eq!(server.get("/api/v0/models/kjv-4m").json(), expected);
    assert_eq!(server.get("/api/v0/models/org/alias").json()["id"], "org/alias");
    let (status, message) = server.get("/api/v0/models/llama").error();
    assert!(status == 404 && message.contains("model_not_found"), "{message}");
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    for path in ["/api/v0/chat/completions", "/chat/completions"] {
        assert_eq!(server.post(path, &body).json()["object"], "chat.completion", "{path}");
    }
    assert_eq!(server.get("/models").json(), server.get("/v1/models").json());
}
