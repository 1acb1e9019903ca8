//! Routes of Ollama's API that list and describe models. This server has one, under its names.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::{Json as OrderedJson, Object};

use super::{AppState, pulls::asked};
use crate::{
    dialect::{parse_object, rfc3339},
    error::ApiError,
};

/// Clients compare it with the version that a feature came in: it is the last one whose features
/// are all here (0.12.11 log probabilities, 0.13.3 responses, 0.14.0 messages). shardpack's own
/// would be older than all of them.
const OLLAMA_VERSION: &str = "0.14.0";
/// How long the model stays, to clients that ask: as long as the server.
const STAY: Duration = Duration::from_hours(24);

impl AppState {
    /// An entry of a list of models.
    fn ollama(&self, name: &str) -> Value {
        json!({
            "name": name,
            "model": name,
            "modified_at": self.created_at(),
            "size": self.info.size_bytes,
            "digest": self.info.digest,
            "details": self.info.details(self.model.max_positions()),
        })
    }

    fn capabilities(&self) -> Vec<&'static str> {
        if self.model.embedding().is_some() {
            return vec!["embedding"];
        }
        let thinks = self.model.output().style().thinking.is_some();
        let all = [("completion", true), ("tools", self.model.has_tools()), ("thinking", thinks)];
        all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
    }

    /// The served model that a body names.
    pub(super) fn named(&self, body: &Object) -> Result<&str, ApiError> {
        let required = || ApiError::param("model", "model is required");
        self.known_name(Some(asked(body).ok_or_else(required)?))
    }

    /// Default sampling, as lines of a `Modelfile`.
    fn parameters(&self) -> String {
        let sampling = self.model.default_sampling();
        let line = |name: &str, value: String| format!("{name:<30} {value}");
        let lines = [
            line("temperature", sampling.temperature.to_string()),
            line("top_k", sampling.top_k.to_string()),
            line("top_p", sampling.top_p.to_string()),
            line("min_p", sampling.min_p.to_string()),
            line("repeat_penalty", sampling.repetition_penalty.to_string()),
        ];
        lines.join("\n")
    }
}

pub(super) async fn tags(State(app): State<Arc<AppState>>) -> Response {
    let entry = |name: &String| {
        let mut entry = app.ollama(name);
        entry["capabilities"] = json!(app.capabilities());
        entry
    };
    let models: Vec<Value> = app.names.iter().map(entry).collect();
    Json(json!({"models": models})).into_response()
}

pub(super) async fn ps(State(app): State<Arc<AppState>>) -> Response {
    let mut model = app.ollama(app.name());
    model["expires_at"] = rfc3339(SystemTime::now() + STAY).into();
    model["size_vram"] = app.info.size_bytes.into();
    model["context_length"] = app.model.max_positions().into();
    Json(json!({"models": [model]})).into_response()
}

pub(super) async fn show(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = parse_object(&app.read_body(request).await?)?;
    let name = app.named(&body)?;
    let template: OrderedJson = app.model.template_source().into();
    let context = app.model.max_positions();
    let shown = json!({
        "modelfile": format!("# The model of a shardpack server\nFROM {name}\n"),
        "parameters": app.parameters(),
        "template": template,
        "details": app.info.details(context),
        "model_info": app.info.keys(name, context),
        "capabilities": app.capabilities(),
        "modified_at": app.created_at(),
    });
    Ok(Json(shown).into_response())
}

pub(super) async fn version() -> Response {
    Json(json!({"version": OLLAMA_VERSION, "shardpack": env!("CARGO_PKG_VERSION")})).into_response()
}
