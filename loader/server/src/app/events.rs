//! `/events`: what happened since the server started. A key is told of its own models alone, and of the
//! files of the server only with the scope `admin` or `metrics`.

use std::sync::Arc;

use axum::{Extension, Json, extract::State, http::Uri};
use serde_json::{Value, json};

use super::{AppState, middleware::Caller, selection::query_value};
use crate::{dates::rfc3339, error::ApiError, events::ServerEvent, keys::Key};

/// Answers one request.
pub(super) async fn events(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let since = query_value(&uri, "since").map(|text| {
        text.parse().map_err(|_| {
            let message = format!("since: expected the number of an event, found {text:?}");
            ApiError::param("since", message)
        })
    });
    let key = caller.key.as_ref();
    // Before the events: one that comes meanwhile is read again.
    let last = app.events.last();
    let events = app.events.after(since.transpose()?.unwrap_or_default());
    let told: Vec<Value> = events
        .iter()
        .filter(|event| key.is_none_or(|key| app.may_know(key, event)))
        .map(document)
        .collect();
    Ok(Json(json!({"events": told, "last": last})))
}

fn document(event: &ServerEvent) -> Value {
    json!({
        "number": event.number, "time": rfc3339(event.time), "kind": event.kind,
        "model": event.model, "text": event.text, "fields": event.fields,
    })
}

impl AppState {
    fn may_know(&self, key: &Arc<Key>, event: &ServerEvent) -> bool {
        match &event.model {
            None => key.sees_server(),
            Some(model) => {
                let names = self.models.names();
                let own = names.iter().find(|names| names.contains(model));
                own.map_or_else(|| !key.is_restricted(), |names| key.may_use(names))
            }
        }
    }
}
