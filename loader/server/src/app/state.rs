//! Health, readiness, metrics and statistics.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use axum::{
    Extension, Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use shardpack_engine_api::{EngineState, EngineStatus};

use super::{AppState, middleware::Caller};
use crate::{
    error::{ApiError, ErrorKind},
    keys::Scope,
    ledger::MachinePower,
    metrics::merged,
    registry::{ModelState, ModelView},
};

/// Health of the engine, with the reason if it is not ready; of a host's models the first is meant,
/// and the state of each is told.
pub(super) async fn health(State(app): State<Arc<AppState>>) -> Response {
    #[derive(Serialize)]
    struct Health {
        state: &'static str,
        reason: Option<String>,
        model: String,
        ranks: u32,
        active_requests: u32,
        #[serde(skip_serializing_if = "Map::is_empty")]
        models: Map<String, Value>,
    }
    let views = app.models.views();
    let (state, reason) = app.state(&views);
    let status = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let engines: Vec<EngineStatus> = views.iter().filter_map(engine).collect();
    let states = |view: &ModelView| (view.card.name().to_owned(), view.state.name().into());
    let health = Health {
        state,
        reason,
        model: views[0].card.name().to_owned(),
        ranks: engines.iter().map(|engine| engine.ranks).sum(),
        active_requests: engines.iter().map(|engine| engine.active_requests).sum(),
        models: if app.models.has_host() { views.iter().map(states).collect() } else { Map::new() },
    };
    (status, Json(health)).into_response()
}

/// Readiness probe: whether requests are accepted now.
pub(super) async fn ready(State(app): State<Arc<AppState>>) -> Response {
    if let Err(error) = app.check_ready() {
        return error.into_response();
    }
    match app.state(&app.models.views()) {
        (_, None) => "ready".into_response(),
        // Requests wait here; another server would answer them at once.
        ("recovering", Some(reason)) => {
            let message = format!("a lost rank is being replaced: {reason}");
            let error = ApiError::new(ErrorKind::Unavailable, message);
            error.with_code("recovering").into_response()
        }
        (_, Some(reason)) => {
            ApiError::new(ErrorKind::Unavailable, reason).with_code("starting").into_response()
        }
    }
}

/// Metrics for Prometheus.
pub(super) async fn metrics(State(app): State<Arc<AppState>>) -> Response {
    let views = app.models.views();
    app.front.set_usage(app.ledger.by_key());
    if let Some(keys) = &app.keys {
        app.front.set_keys(keys.all().len(), keys.reload_failed().is_some());
    }
    let models = views.iter().map(|view| view.metrics.text(engine(view).as_ref()));
    let texts: Vec<String> = std::iter::once(app.front.text()).chain(models).collect();
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], merged(&texts)).into_response()
}

/// Statistics that the web page shows: those of the first model, and a list of all.
pub(super) async fn stats(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
) -> Response {
    let all = app.models.views();
    let (state, reason) = app.state(&all);
    let may_use =
        |view: &ModelView| caller.key.as_ref().is_none_or(|key| key.may_use(&view.card.names));
    let views: Vec<ModelView> = all.into_iter().filter(may_use).collect();
    let mut stats = views.first().map_or_else(|| json!({}), |view| app.model_stats(view));
    stats["state"] = state.into();
    stats["reason"] = json!(reason);
    stats["last_event"] = app.events.last().into();
    if let Some(key) = &caller.key {
        stats["may_compute"] = key.has(Scope::Infer).into();
        stats["may_manage"] = key.has(Scope::Admin).into();
    }
    stats["models"] = views
        .iter()
        .map(|view| {
            let mut stats = app.model_stats(view);
            stats["state"] = view.state.name().into();
            stats["reason"] = json!(view.state.detail());
            stats
        })
        .collect();
    if let (Some(keys), Some(key)) = (&app.keys, &caller.key)
        && key.sees_server()
    {
        let now = Instant::now();
        stats["keys"] = keys.all().iter().map(|key| key.stats(now)).collect();
        stats["keys_reload_failed"] = json!(keys.reload_failed());
    }
    Json(stats).into_response()
}

/// The engine of a model that is loaded.
fn engine(view: &ModelView) -> Option<EngineStatus> {
    view.served.as_ref().map(|served| served.engine.status())
}

impl AppState {
    /// What power the machines draw that say so, and the models on each.
    pub(crate) fn powers(&self) -> Vec<MachinePower> {
        let mut machines: BTreeMap<String, MachinePower> = BTreeMap::new();
        for view in self.models.views() {
            let (Some(engine), Some(served)) = (engine(&view), &view.served) else { continue };
            for (rank, vitals) in engine.vitals.iter().enumerate() {
                let Some(milliwatts) = vitals.power_mw else { continue };
                // Ranks without a node of their own run here, on one machine.
                let node = served.nodes.get(rank).filter(|name| !name.starts_with("rank "));
                let machine = machines
                    .entry(node.cloned().unwrap_or_default())
                    .or_insert_with(|| MachinePower { milliwatts: 0, models: Vec::new() });
                machine.milliwatts = machine.milliwatts.max(milliwatts);
                if !machine.models.iter().any(|model| model == served.name()) {
                    machine.models.push(served.name().to_owned());
                }
            }
        }
        machines.into_values().collect()
    }

    fn model_stats(&self, view: &ModelView) -> Value {
        let engine = engine(view);
        let nodes = match (&engine, &view.served) {
            (Some(engine), Some(served)) => nodes(engine, &served.nodes),
            _ => Vec::new(),
        };
        let (waiting, running) = view.metrics.queue();
        let [prompt_tokens, cached_tokens] = view.metrics.prompt_tokens();
        let [drafted, accepted] = engine.as_ref().map(EngineStatus::drafts).unwrap_or_default();
        json!({
            "model": view.card.name(),
            "context": view.card.context,
            "tokens_per_second": view.metrics.tokens_per_second(),
            "requests": {
                "waiting": waiting + i64::from(view.waiting), "running": running,
                "most": self.limits.active_requests,
            },
            "adjusted_requests": view.metrics.adjusted_requests(),
            "unenforced_schemas": view.metrics.unenforced_requests(),
            "prompt_tokens": {"all": prompt_tokens, "cached": cached_tokens},
            "drafts": {"run": drafted, "accepted": accepted},
            "nodes": nodes,
            "links": engine.map(|engine| engine.links).unwrap_or_default(),
        })
    }

    /// The state's name, and the reason where requests are not taken. A host takes them once one of
    /// its models is loaded, or at once where requests load them.
    fn state(&self, views: &[ModelView]) -> (&'static str, Option<String>) {
        if *self.draining.borrow() {
            return ("draining", Some("the server is shutting down".into()));
        }
        let Some(served) = self.models.only() else {
            let is_loaded = |view: &ModelView| view.state == ModelState::Loaded;
            if self.models.loads_on_demand() || views.iter().any(is_loaded) {
                return ("ready", None);
            }
            let moving = |view: &&ModelView| {
                matches!(view.state, ModelState::Recovering(_) | ModelState::Loading(_))
            };
            let Some(view) = views.iter().find(moving) else {
                return ("failed", Some("no model is loaded".to_owned()));
            };
            let recovers = matches!(view.state, ModelState::Recovering(_));
            let progress = view.state.detail().unwrap_or_default();
            let reason = format!("{}: {progress}", view.card.name());
            return (if recovers { "recovering" } else { "starting" }, Some(reason));
        };
        match served.engine.status().state {
            EngineState::Ready => ("ready", None),
            EngineState::Recovering(reason) => ("recovering", Some(reason)),
            EngineState::Starting(reason) => ("starting", Some(reason)),
            EngineState::Failed(reason) => ("failed", Some(reason)),
        }
    }
}

fn nodes(engine: &EngineStatus, names: &[String]) -> Vec<Value> {
    let name =
        |rank: u32| names.get(rank as usize).cloned().unwrap_or_else(|| format!("rank {rank}"));
    let node = |rank: u32| {
        let mut node = json!({"rank": rank, "name": name(rank)});
        // Values that a rank did not report are left out.
        let vitals = engine.vitals.get(rank as usize).copied().unwrap_or_default();
        let of_thousand = |thousandths: u64| json!(thousandths as f64 / 1000.0);
        let facts = [
            ("memory_bytes", vitals.memory_bytes.map(Value::from)),
            ("step_ms", vitals.step_us.map(of_thousand)),
            ("allreduce_ms", vitals.sums_us.map(of_thousand)),
            ("power_watts", vitals.power_mw.map(of_thousand)),
            ("temperature_celsius", vitals.temperature_mc.map(of_thousand)),
            ("steps", vitals.steps.map(Value::from)),
            ("collectives", vitals.collectives.map(Value::from)),
            ("collective_bytes", vitals.collective_bytes.map(Value::from)),
            ("tokens", vitals.tokens.map(Value::from)),
        ];
        for (key, value) in facts {
            if let Some(value) = value {
                node[key] = value;
            }
        }
        node
    };
    (0..engine.ranks).map(node).collect()
}
