//! Model lists of every dialect: the one model, under its names.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json,
    body::Body,
    extract::{Path, State},
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::Json as OrderedJson;

use super::AppState;
use crate::{
    dialect::{parse_object, rfc3339},
    error::ApiError,
};

impl AppState {
    fn info(&self, id: &str) -> Value {
        json!({
            "id": id,
            "object": "model",
            "created": self.created,
            "owned_by": "shardpack",
            // Longest sequence in tokens, under the name that vLLM gives it.
            "max_model_len": self.model.max_positions(),
            // What Anthropic's clients list.
            "type": "model",
            "display_name": id,
            "created_at": self.created_at(),
        })
    }

    fn created_at(&self) -> String {
        rfc3339(UNIX_EPOCH + Duration::from_secs(self.created))
    }

    fn ollama(&self, name: &str) -> Value {
        json!({
            "name": name,
            "model": name,
            "modified_at": self.created_at(),
            "size": 0,
            "digest": "",
            "details": details(),
        })
    }
}

/// Default sampling, context and chat template, as llama.cpp's server has them.
pub(super) async fn props(State(app): State<Arc<AppState>>) -> Response {
    let sampling = app.model.default_sampling();
    let template: OrderedJson = app.model.template_source().into();
    let context = app.model.max_positions();
    let props = json!({
        "default_generation_settings": {
            "n_ctx": context,
            "params": {
                "temperature": shown(sampling.temperature),
                "top_k": sampling.top_k,
                "top_p": shown(sampling.top_p),
                "min_p": shown(sampling.min_p),
                "repeat_penalty": shown(sampling.repetition_penalty),
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
        },
        "sampling_from": if sampling.is_publishers { "model" } else { "llama.cpp" },
        "total_slots": app.limits.active_requests,
        "model_alias": app.name(),
        "chat_template": template,
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("shardpack ", env!("CARGO_PKG_VERSION")),
    });
    Json(props).into_response()
}

/// A parameter as people write it: 0.8, not its nearest double.
fn shown(value: f32) -> Value {
    value.to_string().parse().unwrap_or(Value::Null)
}

fn details() -> Value {
    json!({
        "parent_model": "", "format": "shardpack", "family": "", "families": [],
        "parameter_size": "", "quantization_level": "",
    })
}

pub(super) async fn models(State(app): State<Arc<AppState>>) -> Response {
    let data: Vec<Value> = app.names.iter().map(|name| app.info(name)).collect();
    let (first, last) = (app.names.first(), app.names.last());
    let list = json!({
        "object": "list", "data": data, "has_more": false, "first_id": first, "last_id": last,
    });
    Json(list).into_response()
}

pub(super) async fn model(
    State(app): State<Arc<AppState>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.known_name(Some(&id)).map(|name| Json(app.info(name)).into_response())
}

pub(super) async fn ollama_tags(State(app): State<Arc<AppState>>) -> Response {
    let models: Vec<Value> = app.names.iter().map(|name| app.ollama(name)).collect();
    Json(json!({"models": models})).into_response()
}

pub(super) async fn ollama_ps(State(app): State<Arc<AppState>>) -> Response {
    let mut model = app.ollama(app.name());
    // It stays as long as the server does: a day is as good as any promise.
    let until = SystemTime::now() + Duration::from_hours(24);
    model["expires_at"] = rfc3339(until).into();
    model["size_vram"] = 0.into();
    model["context_length"] = app.model.max_positions().into();
    Json(json!({"models": [model]})).into_response()
}

pub(super) async fn ollama_show(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = parse_object(&app.read_body(request).await?)?;
    let asked = ["model", "name"].into_iter().find_map(|key| body.get(key)?.as_str());
    let asked = asked.map(|name| name.strip_suffix(":latest").unwrap_or(name));
    let name = app.known_name(asked)?;
    let tools = app.model.has_tools();
    let capabilities: Vec<&str> = if app.model.embedding().is_some() {
        vec!["embedding"]
    } else {
        ["completion"].into_iter().chain(tools.then_some("tools")).collect()
    };
    let template: OrderedJson = app.model.template_source().into();
    let shown = json!({
        "modelfile": format!("FROM {name}\n"),
        "parameters": "",
        "template": template,
        "details": details(),
        "model_info": {
            "general.architecture": "shardpack",
            "shardpack.context_length": app.model.max_positions(),
        },
        "capabilities": capabilities,
        "modified_at": app.created_at(),
    });
    Ok(Json(shown).into_response())
}

pub(super) async fn ollama_version() -> Response {
    // Clients compare it with the version that a feature came in: shardpack's own would be older
    // than all of them.
    Json(json!({"version": "0.12.0", "shardpack": env!("CARGO_PKG_VERSION")})).into_response()
}
