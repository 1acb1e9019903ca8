//! `/v1/usage`: what keys have used. A key of the scope `admin` sees that of all, any other its own.

use std::{
    fmt::Write as _,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    Extension, Json,
    extract::State,
    http::{HeaderValue, Uri, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{AppState, middleware::Caller, selection::query_value};
use crate::{
    dates::{parse, rfc3339},
    error::ApiError,
    keys::Scope,
    ledger::{Period, Sums, UsageRow},
};

/// Answers one request.
pub(super) async fn usage(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let time = |name: &str, default: u64| {
        match query_value(&uri, name) {
        None => Ok(default),
        Some(text) => parse(&text).ok_or_else(|| {
            let message = format!(
                "{name}: {text:?} is no time: expected 2026-01-31, 2026-01-31T12:00:00Z or seconds since 1970"
            );
            ApiError::param(name, message)
        }),
    }
    };
    let (from, to) = (time("from", 0)?, time("to", u64::MAX)?);
    let period = match query_value(&uri, "by").as_deref() {
        None | Some("total") => Period::Total,
        Some("day") => Period::Day,
        Some("hour") => Period::Hour,
        Some(other) => {
            let message = format!("by: {other:?} is none of hour, day and total");
            return Err(ApiError::param("by", message));
        }
    };
    let only = caller.key.as_ref().filter(|key| !key.has(Scope::Admin)).map(|key| key.name());
    let rows = app.ledger.rows(from, to, period, only);
    match query_value(&uri, "format").as_deref() {
        None | Some("json") => Ok(Json(document(&rows)).into_response()),
        Some("csv") => {
            let kind = HeaderValue::from_static("text/csv; charset=utf-8");
            Ok(([(header::CONTENT_TYPE, kind)], csv(&rows)).into_response())
        }
        Some(other) => {
            let message = format!("format: {other:?} is none of json and csv");
            Err(ApiError::param("format", message))
        }
    }
}

fn begin(row: &UsageRow) -> Option<String> {
    row.begin.map(|seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)))
}

fn fields(sums: &Sums) -> Value {
    let mut fields = json!({
        "requests": sums.requests,
        "refused": sums.refused,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "completion_tokens": sums.completion_tokens,
        "generation_seconds": sums.generation_ms as f64 / 1000.0,
    });
    if sums.energy_mj > 0 {
        fields["energy_joules"] = json!(sums.energy_mj as f64 / 1000.0);
    }
    fields
}

fn document(rows: &[UsageRow]) -> Value {
    let row = |row: &UsageRow| {
        let mut shown = fields(&row.sums);
        shown["begin"] = json!(begin(row));
        shown["key"] = json!(row.key);
        shown["model"] = json!(row.model);
        shown
    };
    let total = rows.iter().fold(Sums::default(), |all, row| all.plus(row.sums));
    let data: Vec<Value> = rows.iter().map(row).collect();
    json!({ "object": "usage", "data": data, "total": fields(&total) })
}

fn csv(rows: &[UsageRow]) -> String {
    let mut text =
        "begin,key,model,requests,refused,prompt_tokens,cached_tokens,completion_tokens,\
                    generation_seconds,energy_joules\n"
            .to_owned();
    // A spreadsheet takes what begins so for a formula.
    let quoted = |name: &Option<String>| {
        let name = name.as_deref().unwrap_or_default();
        let guard = if name.starts_with(['=', '+', '-', '@']) { "'" } else { "" };
        if name.contains([',', '"', '\n', '\r']) || !guard.is_empty() {
            format!("\"{guard}{}\"", name.replace('"', "\"\""))
        } else {
            name.to_owned()
        }
    };
    for row in rows {
        let UsageRow { key, model, sums, .. } = row;
        let begin = begin(row).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{begin},{},{},{},{},{},{},{},{:.3},{:.3}",
            quoted(key),
            quoted(model),
            sums.requests,
            sums.refused,
            sums.prompt_tokens,
            sums.cached_tokens,
            sums.completion_tokens,
            sums.generation_ms as f64 / 1000.0,
            sums.energy_mj as f64 / 1000.0,
        );
    }
    text
}
