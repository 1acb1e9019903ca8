//! Embeddings and reranking.

use serde_json::{Value, json};
use shardpack_chat::model::ChatModel;
use shardpack_engine_api::{FinishReason, GenerateRequest, PromptOutput, TokenId};
use shardpack_formats::spec::{Embedding, Pooling};

use super::{
    super::*,
    scripted::{PATIENT, Reply, Scripted, Step, kjv, send, start, start_with},
};

const DONE: Step = Step::Finish(FinishReason::Length);

fn trained(normalize: bool) -> ChatModel {
    let embedding = Embedding { pooling: Pooling::Mean, dense: Vec::new(), normalize };
    ChatModel::open(kjv()).unwrap().with_embedding(Some(embedding))
}

fn server(normalize: bool, vector: &[f32]) -> Scripted {
    let script = vec![Step::Embed(vector.to_vec()), DONE];
    start_with(script, PATIENT, trained(normalize))
}

#[test]
fn embeddings_are_as_openai_has_them() {
    let server = server(false, &[3.0, 4.0, 0.5]);
    let body = json!({"model": "kjv-4m", "input": ["Jesus", "wept"], "user": "a", "odd": 1});
    let reply = server.post("/v1/embeddings", &body);
    let found = reply.json();
    let embedding =
        |index: u32| json!({"object": "embedding", "index": index, "embedding": [3.0, 4.0, 0.5]});
    let tokens = [server.submitted(), server.submitted()].map(|it: GenerateRequest| {
        assert_eq!((it.prompt_output, it.max_tokens), (PromptOutput::Embedding, 0));
        it.prompt.len()
    });
    let tokens = tokens.iter().sum::<usize>();
    let expected = json!({
        "object": "list", "data": [embedding(0), embedding(1)], "model": "kjv-4m",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    assert_eq!(found, expected);
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("odd"));
    assert_eq!(reply.header("x-shardpack-pooling"), None);

    // Tokens, as several SDKs send them, and the bytes of floats.
    let body = json!({"input": [[40, 41], [42]], "encoding_format": "base64"});
    let found = server.post("/v1/embeddings", &body).json();
    assert_eq!(found["data"][1]["embedding"], "AABAQAAAgEAAAAA/");
    assert_eq!(server.submitted().prompt, [TokenId(40), TokenId(41)]);
    assert_eq!(found["usage"]["total_tokens"], 3);

    // A part of a vector; of length one where the client or the model says so.
    let body = json!({"input": "a", "dimensions": 2});
    let vector =
        |body: &Value| server.post("/v1/embeddings", body).json()["data"][0]["embedding"].clone();
    assert_eq!(vector(&body), json!([3.0, 4.0]));
    let body = json!({"input": "a", "dimensions": 2, "normalize": true});
    assert_eq!(vector(&body), json!([0.6, 0.8]));
    let refused = [
        (json!({"input": "a", "dimensions": 4}), "dimensions: 4 of a vector of 3"),
        (json!({"input": "a", "dimensions": 0}), "dimensions: expected a positive number"),
        (json!({"input": []}), "input: expected 1 to 2048 of them"),
        (json!({}), "input: expected a string or an array"),
        (json!({"input": ""}), "input[0]: expected a text of at least one token"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format: expected"),
        (json!({"input": "a", "prompt_name": "query"}), "is none of the model's"),
        (json!({"input": [vec![5; 4097]]}), "input[0]: 4097 tokens are more than"),
    ];
    for (body, reason) in refused {
        let (status, message) = server.post("/v1/embeddings", &body).error();
        assert!(status == 400 && message.contains(reason), "{message}");
    }
    let body = json!({"input": [vec![5; 4097]], "truncate": true});
    assert_eq!(server.post("/v1/embeddings", &body).status, 200);
}

#[test]
fn a_models_own_normalisation_holds_for_parts() {
    let server = server(true, &[3.0, 4.0, 12.0]);
    let body = json!({"input": "a", "dimensions": 2});
    let found = server.post("/v1/embeddings", &body).json();
    assert_eq!(found["data"][0]["embedding"], json!([0.6, 0.8]));
    // It generates nothing.
    let (status, message) = server.chat("").error();
    assert!(status == 400 && message.contains("use /v1/embeddings"), "{message}");
    let shown = server.post("/api/show", &json!({"model": "kjv-4m"})).json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
}

#[test]
fn a_chat_model_says_how_it_pools() {
    let server = start(vec![Step::Embed(vec![0.0, 2.0]), DONE]);
    let reply = server.post("/v1/embeddings", &json!({"input": "a"}));
    assert_eq!(reply.json()["data"][0]["embedding"], json!([0.0, 1.0]));
    assert_eq!(reply.header("x-shardpack-pooling"), Some("last"));
}

#[test]
fn ollamas_clients_get_embeddings() {
    let server = server(false, &[0.0, 2.0]);
    let body = json!({"model": "kjv-4m:latest", "input": ["a", "b"], "keep_alive": "5m"});
    let mut found = server.post("/api/embed", &body).json();
    assert!(found["total_duration"].take().as_u64().unwrap() > 0);
    let expected = json!({"model": "kjv-4m", "embeddings": [[0.0, 1.0], [0.0, 1.0]],
        "total_duration": null, "load_duration": 0, "prompt_eval_count": 2});
    assert_eq!(found, expected);
    let found = server.post("/api/embeddings", &json!({"model": "kjv-4m", "prompt": "a"})).json();
    assert_eq!(found, json!({"embedding": [0.0, 2.0]}));
    // Probes, and what loads the model.
    for input in [json!({}), json!({"input": ""}), json!({"input": []})] {
        let found = server.post("/api/embed", &input).json();
        assert_eq!(found["embeddings"], json!([]), "{input}");
    }
    let found = server.post("/api/embeddings", &json!({"prompt": ""})).json();
    assert_eq!(found, json!({"embedding": []}));
    let reply = server.post("/api/embed", &json!({"model": "x", "input": "a"}));
    assert!(reply.status == 404 && reply.body.contains("not found"), "{}", reply.body);
}

#[test]
fn a_failure_ends_the_whole_request() {
    let script = vec![Step::Fail("rank 1 is gone", true)];
    let server = start_with(script, PATIENT, trained(true));
    let (status, message) = server.post("/v1/embeddings", &json!({"input": ["a", "b"]})).error();
    assert!(status == 503 && message.contains("rank 1 is gone"), "{message}");
}

#[test]
fn documents_are_ordered_by_similarity() {
    // The scripted engine's embeddings count tokens, so texts of the same words are alike.
    let model = trained(true);
    let (engine, commands) = EngineHandle::new(1);
    let script = crate::Script::parse(br#"{"answers": [{"text": "a"}]}"#, &model).unwrap();
    let again = ChatModel::open(kjv()).unwrap();
    let handle = engine.clone();
    std::thread::spawn(move || script.play(&again, handle, &commands));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::new(model, engine, vec!["e".to_owned()], PATIENT);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        let stopped = async {
            let _ = stopped.await;
        };
        crate::serve::run_until(listener, server, stopped).unwrap();
    });
    let post = |path: &str, body: &Value| -> Value {
        Reply::read(send(address, "", "POST", path, &body.to_string())).json()
    };
    let documents = ["And God said, Let there be light", "Jesus wept.", "Jesus saith unto him"];
    let body = json!({"query": "Jesus wept.", "documents": documents, "top_n": 2,
        "return_documents": true});
    let found = post("/v1/rerank", &body);
    let results = found["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    assert_eq!(
        (&results[0]["index"], &results[0]["document"]["text"]),
        (&json!(1), &json!("Jesus wept."))
    );
    assert!((results[0]["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{found}");
    assert!(results[1]["relevance_score"].as_f64() < results[0]["relevance_score"].as_f64());
    let found = post("/rerank", &json!({"query": "Jesus wept.", "texts": documents}));
    assert_eq!((found.as_array().unwrap().len(), &found[0]["index"]), (3, &json!(1)));
    let _ = stop.send(());
    thread.join().unwrap();
}

#[test]
fn a_chat_model_reranks_nothing() {
    let server = start(vec![DONE]);
    let body = json!({"query": "a", "documents": ["b"]});
    let (status, message) = server.post("/v1/rerank", &body).error();
    assert!(status == 400 && message.contains("neither judges"), "{message}");
}
