//! Middleware around every request: authentication, error format of the dialect, CORS, metrics and
//! the access log. Prompts and answers are not looked at.

use std::{sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::AppState;
use crate::{
    error::{ApiError, Shape},
    keys::{Key, Scope},
    routes::{Route, route_of},
};

/// Identity of a request, for its handler.
#[derive(Clone)]
pub(super) struct Caller {
    /// Request id, in headers and the access log.
    pub(super) id: String,
    /// The API key, where keys are required.
    pub(super) key: Option<Arc<Key>>,
}

impl Caller {
    /// Name of the API key.
    pub(super) fn owner(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.name())
    }
}

/// Runs a handler between authentication and logging.
pub(super) async fn handle_request(
    State(app): State<Arc<AppState>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let begun = Instant::now();
    let route = route_of(request.method(), request.uri().path());
    let shape = route.map_or_else(|| Shape::of_path(request.uri().path()), |route| route.shape);
    let origin = app.allowed_origin(request.headers());
    if let Some(origin) = &origin
        && request.method() == Method::OPTIONS
    {
        return preflight(origin);
    }
    let method = request.method().clone();
    let id = super::random_id().unwrap_or_default();
    let (response, key) = match app.authenticate(route, request.headers()) {
        Err(error) => (error.response(shape), None),
        Ok(key) => {
            let name = key.as_ref().map(|key| key.name().to_owned());
            request.extensions_mut().insert(Caller { id: id.clone(), key });
            (format_error(next.run(request).await, shape), name)
        }
    };
    let mut response = response;
    let code = response.extensions().get::<ApiError>().map(|error| error.code.unwrap_or("error"));
    app.metrics.responded(route.map_or("other", |route| route.path), response.status().as_u16());
    if let Some(code) = code {
        app.metrics.refused(code);
    }
    app.log(|| {
        json!({
            "request": id, "method": method.as_str(), "route": route.map(|route| route.path),
            "status": response.status().as_u16(), "code": code, "key": key,
            "ms": begun.elapsed().as_millis() as u64,
        })
    });
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        // Anthropic's clients read the second.
        headers.insert("x-request-id", value.clone());
        headers.insert("request-id", value);
    }
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// Rewrites a handler's error in the format of the request's dialect.
fn format_error(response: Response, shape: Shape) -> Response {
    if shape == Shape::OpenAi {
        return response;
    }
    match response.extensions().get::<ApiError>().cloned() {
        Some(error) => error.response(shape),
        None => response,
    }
}

fn preflight(origin: &HeaderValue) -> Response {
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone()),
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST, DELETE, OPTIONS"),
        ),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static(
                "authorization, content-type, x-api-key, anthropic-version, anthropic-beta",
            ),
        ),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600")),
        (header::VARY, HeaderValue::from_static("origin")),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

impl AppState {
    /// Authenticates a request. Without configured keys every request is allowed.
    fn authenticate(
        &self,
        route: Option<&'static Route>,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<Key>>, ApiError> {
        let Some(keys) = &self.keys else { return Ok(None) };
        let scope = match route.map(|route| route.scope) {
            // Unknown paths need a key too.
            None => Scope::Infer,
            Some(Some(scope)) => scope,
            Some(None) => return Ok(None),
        };
        keys.check(sent_key(headers), scope).map(Some)
    }

    /// The origin of a cross-origin request, if CORS allows it.
    fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let text = origin.to_str().ok()?;
        self.origins.iter().any(|allowed| allowed == text || allowed == "*").then(|| origin.clone())
    }
}

/// `Authorization: Bearer KEY`, or `x-api-key` as Anthropic's clients send it.
fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let own = headers.get(HeaderName::from_static("x-api-key"));
    bearer.or_else(|| own?.to_str().ok())
}
