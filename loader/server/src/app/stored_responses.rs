//! Stored responses of the responses API: retrieve and delete.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{HeaderValue, Uri, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{AppState, middleware::Caller, selection::query_value};
use crate::error::{ApiError, ErrorKind};

fn unknown(id: &str) -> ApiError {
    let message = format!("response {id:?} is not stored: it may have expired");
    ApiError::new(ErrorKind::NotFound, message)
}

/// Returns a stored response.
pub(super) async fn show(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let body = app.store.body(&id, caller.owner(), Instant::now()).ok_or_else(|| unknown(&id))?;
    let json = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, json)], body.to_string()).into_response())
}

/// Most items of a page, as in the API.
const PAGE_MOST: usize = 100;
/// Items of a page where nobody says.
const PAGE: usize = 20;

/// Lists the input of a stored response in pages, the newest item first.
pub(super) async fn input_items(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let items =
        app.store.inputs(&id, caller.owner(), Instant::now()).ok_or_else(|| unknown(&id))?;
    let response = id.strip_prefix("resp_").unwrap_or(&id);
    let mut items: Vec<Value> = items.iter().enumerate().map(|it| listed(it, response)).collect();
    let asked = |name: &str| query_value(&uri, name);
    match asked("order").as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => {
            let message = format!("order: expected \"asc\" or \"desc\", found {other:?}");
            return Err(ApiError::param("order", message));
        }
    }
    let limit = asked("limit").map_or(Ok(PAGE), |limit| {
        let limit = limit.parse().ok().filter(|limit| (1..=PAGE_MOST).contains(limit));
        let message = || format!("limit: expected a number from 1 to {PAGE_MOST}");
        limit.ok_or_else(|| ApiError::param("limit", message()))
    })?;
    if let Some(after) = asked("after") {
        let place = items.iter().position(|item| item["id"] == after.as_str());
        let place = place.ok_or_else(|| {
            ApiError::param("after", format!("after: {after:?} is no item of this response"))
        })?;
        items.drain(..=place);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id_of = |item: Option<&Value>| item.map(|item| item["id"].clone());
    Ok(Json(json!({
        "object": "list", "first_id": id_of(items.first()), "last_id": id_of(items.last()),
        "has_more": has_more, "data": items,
    }))
    .into_response())
}

/// An item as a list shows it: with a type and an id, which clients need not send.
fn listed((index, item): (usize, &shardpack_chat::json::Json), response: &str) -> Value {
    let mut item: Value = serde_json::to_value(item).unwrap_or_default();
    if let Some(members) = item.as_object_mut() {
        members.entry("type").or_insert_with(|| "message".into());
        members.entry("id").or_insert_with(|| format!("in_{response}_{index}").into());
    }
    item
}

/// Cancels nothing: a response ends with its connection.
pub(super) async fn cancel(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if app.store.body(&id, caller.owner(), Instant::now()).is_none() {
        return Err(unknown(&id));
    }
    let message = format!(
        "response {id:?} does not run in the background and cannot be cancelled: close the connection of a running one"
    );
    Err(ApiError::new(ErrorKind::Invalid, message))
}

/// Deletes a stored response.
pub(super) async fn forget(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !app.store.remove(&id, caller.owner(), Instant::now()) {
        return Err(unknown(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
}
