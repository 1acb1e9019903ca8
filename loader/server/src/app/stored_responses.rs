//! Stored responses of the responses API: retrieve and delete.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::{AppState, middleware::Caller};
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
