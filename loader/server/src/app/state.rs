//! Health, readiness, metrics and statistics.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use shardpack_engine_api::EngineState;

use super::AppState;

/// Health of the engine, with the reason if it is not ready.
pub(super) async fn health(State(app): State<Arc<AppState>>) -> Response {
    #[derive(Serialize)]
    struct Health<'a> {
        state: &'static str,
        reason: Option<String>,
        model: &'a str,
        ranks: u32,
        active_requests: u32,
    }
    let engine = app.engine.status();
    let (state, reason) = app.state();
    let status = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let (model, ranks, active_requests) = (app.name(), engine.ranks, engine.active_requests);
    (status, Json(Health { state, reason, model, ranks, active_requests })).into_response()
}

/// Readiness probe: whether requests are accepted now.
pub(super) async fn ready(State(app): State<Arc<AppState>>) -> Response {
    match app.check_ready() {
        Ok(()) => "ready".into_response(),
        Err(error) => error.into_response(),
    }
}

/// Metrics for Prometheus.
pub(super) async fn metrics(State(app): State<Arc<AppState>>) -> Response {
    let text = app.metrics.text(&app.engine.status());
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Statistics that the web page shows.
pub(super) async fn stats(State(app): State<Arc<AppState>>) -> Response {
    let (state, reason) = app.state();
    let engine = app.engine.status();
    let (waiting, running) = app.metrics.queue();
    let name =
        |rank: u32| app.nodes.get(rank as usize).cloned().unwrap_or_else(|| format!("rank {rank}"));
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
        ];
        for (key, value) in facts {
            if let Some(value) = value {
                node[key] = value;
            }
        }
        node
    };
    let nodes: Vec<Value> = (0..engine.ranks).map(node).collect();
    let [drafted, accepted] = engine.drafts();
    let stats = json!({
        "state": state,
        "reason": reason,
        "model": app.name(),
        "context": app.model.max_positions(),
        "tokens_per_second": app.metrics.tokens_per_second(),
        "requests": {
            "waiting": waiting, "running": running, "most": app.limits.active_requests,
        },
        "adjusted_requests": app.metrics.adjusted_requests(),
        "unenforced_schemas": app.metrics.unenforced_requests(),
        "drafts": {"run": drafted, "accepted": accepted},
        "nodes": nodes,
    });
    Json(stats).into_response()
}

impl AppState {
    /// The state's name, and the reason where requests are not taken.
    fn state(&self) -> (&'static str, Option<String>) {
        match self.engine.status().state {
            _ if *self.draining.borrow() => {
                ("draining", Some("the server is shutting down".into()))
            }
            EngineState::Ready => ("ready", None),
            EngineState::Starting(reason) => ("starting", Some(reason)),
            EngineState::Failed(reason) => ("failed", Some(reason)),
        }
    }
}
