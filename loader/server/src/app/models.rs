//! Model lists of the clients of `OpenAI`, Anthropic and LM Studio: the one model, under its names.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::Json as OrderedJson;

use super::AppState;
use crate::{dialect::rfc3339, error::ApiError};

impl AppState {
    fn entry(&self, id: &str) -> Value {
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

    /// When the server started, which is all that is known.
    pub(super) fn created_at(&self) -> String {
        rfc3339(UNIX_EPOCH + Duration::from_secs(self.created))
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

pub(super) async fn models(State(app): State<Arc<AppState>>) -> Response {
    let data: Vec<Value> = app.names.iter().map(|name| app.entry(name)).collect();
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
    app.known_name(Some(&id)).map(|name| Json(app.entry(name)).into_response())
}

/// The models as LM Studio's own API lists them.
pub(super) async fn lm_studio_models(State(app): State<Arc<AppState>>) -> Response {
    let data: Vec<Value> = app.names.iter().map(|name| app.lm_studio(name)).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

pub(super) async fn lm_studio_model(
    State(app): State<Arc<AppState>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.known_name(Some(&id)).map(|name| Json(app.lm_studio(name)).into_response())
}

impl AppState {
    fn lm_studio(&self, name: &str) -> Value {
        let publisher = self.info.repository.as_deref().and_then(|id| id.split_once('/'));
        let quantization = match self.info.bits {
            0 | 16 => self.info.dtype.clone(),
            bits => format!("{bits}bit"),
        };
        let context = self.model.max_positions();
        json!({
            "id": name,
            "object": "model",
            "type": if self.model.embedding().is_some() { "embeddings" } else { "llm" },
            "publisher": publisher.map_or("shardpack", |(publisher, _)| publisher),
            "arch": self.info.architecture(),
            "compatibility_type": "safetensors",
            "quantization": quantization,
            "state": "loaded",
            "max_context_length": context,
            "loaded_context_length": context,
            "capabilities": if self.model.has_tools() { json!(["tool_use"]) } else { json!([]) },
        })
    }
}
