//! Model lists of the clients of `OpenAI`, Anthropic and LM Studio: every model, under its names.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::Uri,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::Json as OrderedJson;

use super::{AppState, middleware::Caller};
use crate::{
    dates::rfc3339, error::ApiError, keys::Key, model_host::MemoryShare, registry::ModelView,
};

/// A model under the name by which a client asked for it.
pub(super) struct NamedView {
    pub(super) name: String,
    pub(super) view: Arc<ModelView>,
}

impl AppState {
    /// Every model that a key may use, under each of its names.
    pub(super) fn named_views(&self, key: Option<&Arc<Key>>) -> Vec<NamedView> {
        let named = |view: ModelView| {
            let names = view.card.names.clone();
            let view = Arc::new(view);
            names.into_iter().map(move |name| NamedView { name, view: Arc::clone(&view) })
        };
        let may_use = |view: &ModelView| key.is_none_or(|key| key.may_use(&view.card.names));
        self.models.views().into_iter().filter(may_use).flat_map(named).collect()
    }

    /// The model of a name.
    pub(super) fn view(&self, key: Option<&Arc<Key>>, asked: &str) -> Result<NamedView, ApiError> {
        self.permitted(key.map(AsRef::as_ref), Some(asked))?;
        let name = self.models.known_name(Some(asked))?;
        let is_it = |view: &NamedView| view.name == name;
        // Names do not change while the server runs.
        let found = self.named_views(key).into_iter().find(is_it);
        found.ok_or_else(super::generate::failed)
    }

    fn entry(&self, NamedView { name, view }: &NamedView) -> Value {
        json!({
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "shardpack",
            // Longest sequence in tokens, under the name that vLLM gives it.
            "max_model_len": view.card.context,
            "state": view.state.name(),
            // What Anthropic's clients list.
            "type": "model",
            "display_name": name,
            "created_at": self.created_at(),
        })
    }

    /// A model with all that is known of its state.
    pub(super) fn detail(&self, named: &NamedView) -> Value {
        let NamedView { view, .. } = named;
        let mut entry = self.entry(named);
        entry["names"] = json!(view.card.names);
        if let Some(detail) = view.state.detail() {
            entry["state_detail"] = detail.into();
        }
        if let Some(progress) = &view.swap {
            entry["swap"] = progress.as_str().into();
        }
        entry["requests"] = json!({"running": view.running, "waiting": view.waiting});
        entry["digest"] = view.card.info.digest.as_str().into();
        entry["source"] = view.card.info.source();
        if let Some(served) = &view.served {
            entry["nodes"] = json!(served.nodes);
        }
        if !view.memory.is_empty() {
            entry["memory"] = self.memory(view);
        }
        if !self.models.has_host() {
            return entry;
        }
        entry["pinned"] = view.is_pinned.into();
        entry["priority"] = view.priority.into();
        entry["idle_seconds"] = view.idle.as_secs().into();
        entry["idle_timeout_seconds"] = json!(view.idle_timeout.map(|time| time.as_secs_f64()));
        entry
    }

    /// What a model takes of each machine, beside what there is.
    fn memory(&self, view: &ModelView) -> Value {
        let taken = self.models.taken();
        let share = |share: &MemoryShare| {
            let machine = self.models.machines().iter().find(|it| it.name == share.machine);
            json!({
                "machine": share.machine,
                "weights_bytes": share.weights_bytes,
                "cache_bytes": share.cache_bytes,
                "working_bytes": share.working_bytes,
                "total_bytes": share.total_bytes(),
                "machine_limit_bytes": machine.map(|machine| machine.limit_bytes),
                "machine_taken_bytes": taken.get(&share.machine),
            })
        };
        view.memory.iter().map(share).collect()
    }

    /// When the server started, which is all that is known.
    pub(super) fn created_at(&self) -> String {
        rfc3339(UNIX_EPOCH + Duration::from_secs(self.created))
    }
}

/// Default sampling, context and chat template, as llama.cpp's server has them.
pub(super) async fn props(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let served = app.of_query(caller.key.as_ref(), &uri).await?;
    let sampling = served.model.default_sampling();
    let template: OrderedJson = served.model.template_source().into();
    let context = served.model.max_positions();
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
        "model_alias": served.name(),
        "chat_template": template,
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("shardpack ", env!("CARGO_PKG_VERSION")),
    });
    Ok(Json(props).into_response())
}

/// A parameter as people write it: 0.8, not its nearest double.
fn shown(value: f32) -> Value {
    value.to_string().parse().unwrap_or(Value::Null)
}

pub(super) async fn models(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let views = app.named_views(caller.key.as_ref());
    let data: Vec<Value> = views.iter().map(|view| app.entry(view)).collect();
    let name = |view: Option<&NamedView>| view.map(|view| view.name.clone());
    let (first, last) = (name(views.first()), name(views.last()));
    let list = json!({
        "object": "list", "data": data, "has_more": false, "first_id": first, "last_id": last,
    });
    Json(list).into_response()
}

pub(super) async fn model(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.view(caller.key.as_ref(), &id).map(|view| Json(app.detail(&view)).into_response())
}

/// The models as LM Studio's own API lists them.
pub(super) async fn lm_studio_models(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let views = app.named_views(caller.key.as_ref());
    let data: Vec<Value> = views.iter().map(NamedView::lm_studio).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

pub(super) async fn lm_studio_model(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.view(caller.key.as_ref(), &id).map(|view| Json(view.lm_studio()).into_response())
}

impl NamedView {
    fn lm_studio(&self) -> Value {
        let (card, info) = (&self.view.card, &self.view.card.info);
        let publisher = info.repository.as_deref().and_then(|id| id.split_once('/'));
        let quantization = match info.bits {
            0 | 16 => info.dtype.clone(),
            bits => format!("{bits}bit"),
        };
        let is_loaded = self.view.served.is_some();
        let mut entry = json!({
            "id": self.name,
            "object": "model",
            "type": if card.is_embedding { "embeddings" } else { "llm" },
            "publisher": publisher.map_or("shardpack", |(publisher, _)| publisher),
            "arch": info.architecture(),
            "compatibility_type": "safetensors",
            "quantization": quantization,
            "state": if is_loaded { "loaded" } else { "not-loaded" },
            "max_context_length": card.context,
            "capabilities": if card.has_tools { json!(["tool_use"]) } else { json!([]) },
        });
        if is_loaded {
            entry["loaded_context_length"] = card.context.into();
        }
        entry
    }
}
