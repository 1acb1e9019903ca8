//! Routes of Ollama's API that list and describe models. Each of this server's has one
//! entry for each of its names.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::{
    json::{Json as OrderedJson, Object},
    model::DefaultSampling,
};

use super::{AppState, middleware::Caller, models::NamedView, pulls::asked};
use crate::{dates::rfc3339, dialect::parse_object, error::ApiError};

/// Clients compare it with the version that a feature came in: it is the last one whose features
/// are all here (0.12.11 log probabilities, 0.13.3 responses, 0.14.0 messages). shardpack's own
/// would be older than all of them.
const OLLAMA_VERSION: &str = "0.14.0";
/// How long a model stays, to clients that ask, where it stays as long as the server.
const STAY: Duration = Duration::from_hours(24);

impl NamedView {
    /// An entry of a list of models.
    fn ollama(&self, modified_at: &str) -> Value {
        let card = &self.view.card;
        json!({
            "name": self.name,
            "model": self.name,
            "modified_at": modified_at,
            "size": card.info.size_bytes,
            "digest": card.info.digest,
            "details": card.info.details(card.context),
        })
    }

    fn capabilities(&self) -> Vec<&'static str> {
        let card = &self.view.card;
        if card.is_embedding {
            return vec!["embedding"];
        }
        let all = [("completion", true), ("tools", card.has_tools), ("thinking", card.thinks)];
        all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
    }

    /// When it leaves memory if nobody asks for it.
    fn expires_at(&self) -> SystemTime {
        let left = self.view.idle_timeout.map(|stay| stay.saturating_sub(self.view.idle));
        SystemTime::now() + left.unwrap_or(STAY).min(STAY)
    }
}

impl AppState {
    /// The model that a body names.
    pub(super) fn named(&self, caller: &Caller, body: &Object) -> Result<NamedView, ApiError> {
        let required = || ApiError::param("model", "model is required");
        self.view(caller.key.as_ref(), asked(body).ok_or_else(required)?)
    }
}

/// Default sampling, as lines of a `Modelfile`.
fn parameters(sampling: &DefaultSampling) -> String {
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

pub(super) async fn tags(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let created_at = app.created_at();
    let entry = |view: &NamedView| {
        let mut entry = view.ollama(&created_at);
        entry["capabilities"] = json!(view.capabilities());
        entry
    };
    let views = app.named_views(caller.key.as_ref());
    let models: Vec<Value> = views.iter().map(entry).collect();
    Json(json!({"models": models})).into_response()
}

/// The models in memory, each under its first name.
pub(super) async fn ps(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let created_at = app.created_at();
    let views = app.named_views(caller.key.as_ref());
    let loaded =
        views.iter().filter(|it| it.view.served.is_some() && it.name == it.view.card.name());
    let entry = |view: &NamedView| {
        let mut model = view.ollama(&created_at);
        model["expires_at"] = rfc3339(view.expires_at()).into();
        model["size_vram"] = view.view.card.info.size_bytes.into();
        model["context_length"] = view.view.card.context.into();
        model
    };
    let models: Vec<Value> = loaded.map(entry).collect();
    Json(json!({"models": models})).into_response()
}

/// What a model is; template and sampling only of one that is loaded.
pub(super) async fn show(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = parse_object(&app.read_body(request).await?)?;
    let named = app.named(&caller, &body)?;
    let (name, card) = (&named.name, &named.view.card);
    let mut shown = json!({
        "modelfile": format!("# The model of a shardpack server\nFROM {name}\n"),
        "details": card.info.details(card.context),
        "model_info": card.info.keys(name, card.context),
        "capabilities": named.capabilities(),
        "modified_at": app.created_at(),
    });
    if let Some(served) = &named.view.served {
        let template: OrderedJson = served.model.template_source().into();
        shown["parameters"] = parameters(served.model.default_sampling()).into();
        shown["template"] = json!(template);
    }
    Ok(Json(shown).into_response())
}

pub(super) async fn version() -> Response {
    Json(json!({"version": OLLAMA_VERSION, "shardpack": env!("CARGO_PKG_VERSION")})).into_response()
}
