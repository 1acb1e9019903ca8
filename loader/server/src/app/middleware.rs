//! Middleware around every request: authentication, error format of the dialect, CORS, metrics and
//! the access log. Prompts and answers are not looked at.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::json;
use shardpack_engine_api::Tenant;

use super::{AppState, browser::check_host};
use crate::{
    error::{ApiError, Shape},
    keys::{Access, Key, KeySlot},
    ledger::{Opened, Record},
    routes::{Route, Target, route_of},
    tenant,
};

/// Identity of a request, for its handler.
#[derive(Clone)]
pub(super) struct Caller {
    /// Request id, in headers and the access log.
    pub(super) id: String,
    /// The API key, where keys are required.
    pub(super) key: Option<Arc<Key>>,
    /// What the request takes.
    pub(super) record: Arc<Record>,
    /// As whose request it counts where several share the engine: the key's, else the address's.
    pub(super) tenant: Tenant,
}

/// Where a connection comes from.
#[derive(Clone, Copy)]
pub(crate) struct Remote(pub(crate) SocketAddr);

impl Caller {
    /// Takes a slot of the API key, where keys are required.
    pub(super) fn begin(&self) -> Result<Option<KeySlot>, ApiError> {
        self.key.as_ref().map(|key| key.begin(Instant::now())).transpose()
    }

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
    let origin = app.allowed_origin(request.uri(), request.headers());
    if request.method() == Method::OPTIONS {
        if let Some(origin) = &origin {
            return preflight(origin, request.headers());
        }
        let methods = methods_of(request.uri().path());
        if !methods.is_empty() && !request.headers().contains_key(header::ORIGIN) {
            return options(&methods);
        }
    }
    let method = request.method().clone();
    let id = super::random_id().unwrap_or_default();
    let checked = check_host(request.headers())
        .and_then(|()| app.check_browser(&method, request.uri(), request.headers()));
    let known = checked.and_then(|()| app.authenticate(route, request.headers()));
    let name = known.as_ref().ok().and_then(Option::as_ref).map(|key| key.name().to_owned());
    let record = app.record(&id, route, name.as_deref(), &request);
    let (response, key) = match known {
        Err(error) => (error.response(shape), None),
        Ok(key) => {
            let record = record.clone().unwrap_or_else(|| Record::unkept(&app.ledger));
            let tenant = match (&key, request.extensions().get::<Remote>()) {
                (Some(key), _) => key.tenant(),
                (None, Some(Remote(address))) => tenant::of_address(address.ip()),
                (None, None) => Tenant::NOBODY,
            };
            request.extensions_mut().insert(Caller { id: id.clone(), key, record, tenant });
            (format_error(next.run(request).await, shape), name)
        }
    };
    let mut response = response;
    let code = response.extensions().get::<ApiError>().map(|error| error.code.unwrap_or("error"));
    if let Some(record) = record {
        record.responded(response.status().as_u16(), code);
    }
    app.front.responded(route.map_or("other", |route| route.path), response.status().as_u16());
    if let Some(code) = code {
        app.front.refused(code);
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
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }
    response
}

/// Headers that pages of other origins may read.
const EXPOSED: &str = "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, \
                       x-shardpack-seed, x-shardpack-ignored-params, x-shardpack-adjusted, \
                       x-shardpack-unenforced";

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

/// Answers what a browser asks before a request to another origin. SDKs send headers of their own,
/// so all are allowed that it names: none of them changes who may ask.
fn preflight(origin: &HeaderValue, asked: &HeaderMap) -> Response {
    let usual = HeaderValue::from_static(
        "authorization, content-type, x-api-key, api-key, anthropic-version, anthropic-beta",
    );
    let named = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone()),
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, HEAD, POST, DELETE, OPTIONS"),
        ),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, named.unwrap_or(usual)),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600")),
        (header::VARY, HeaderValue::from_static("origin, access-control-request-headers")),
    ];
    let mut response = (StatusCode::NO_CONTENT, headers).into_response();
    // A page of the internet that asks a machine of the local network.
    if asked.contains_key("access-control-request-private-network") {
        let allowed = HeaderValue::from_static("true");
        response.headers_mut().insert("access-control-allow-private-network", allowed);
    }
    response
}

/// Answers what a client asks about an address.
fn options(methods: &[&str]) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    if let Ok(methods) = HeaderValue::from_str(&methods.join(", ")) {
        response.headers_mut().insert(header::ALLOW, methods);
    }
    response
}

/// The methods of an address; none where it is not known.
fn methods_of(path: &str) -> Vec<&'static str> {
    let mut methods: Vec<&str> = [Method::GET, Method::HEAD, Method::POST, Method::DELETE]
        .iter()
        .filter(|method| route_of(method, path).is_some())
        .map(|method| match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            _ => "DELETE",
        })
        .collect();
    if !methods.is_empty() {
        methods.push("OPTIONS");
    }
    methods
}

/// The API of a route that computes.
fn dialect_of(route: &Route) -> Option<String> {
    match route.target {
        Target::Generate(dialect) => Some(format!("{dialect:?}").to_lowercase()),
        Target::Embed(_) => Some("embeddings".to_owned()),
        Target::Rerank => Some("rerank".to_owned()),
        Target::CountTokens
        | Target::CountInputTokens
        | Target::Tokenize
        | Target::Detokenize
        | Target::ApplyTemplate => Some("tokens".to_owned()),
        _ => None,
    }
}

impl AppState {
    /// Begins the record of a request; none of what is public, such as probes and the web page.
    fn record(
        &self,
        id: &str,
        route: Option<&'static Route>,
        key: Option<&str>,
        request: &Request<Body>,
    ) -> Option<Arc<Record>> {
        if route.is_some_and(|route| route.access == Access::Public) {
            return None;
        }
        let opened = Opened {
            id: id.to_owned(),
            key: key.map(str::to_owned),
            remote: request.extensions().get::<Remote>().map(|remote| remote.0.to_string()),
            route: route.map(|route| route.path),
            dialect: route.and_then(dialect_of),
        };
        Some(Record::open(&self.ledger, opened))
    }

    /// Authenticates a request. Without configured keys every request is allowed.
    fn authenticate(
        &self,
        route: Option<&'static Route>,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<Key>>, ApiError> {
        let Some(keys) = &self.keys else { return Ok(None) };
        // Unknown paths need a key too.
        let access = route.map_or(Access::Watch, |route| route.access);
        match access {
            Access::Public => Ok(None),
            _ => keys.check(sent_key(headers), access).map(Some),
        }
    }
}

/// `Authorization: Bearer KEY`, `x-api-key` as Anthropic's clients send it, or `api-key` as Azure's do.
fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim()).filter(|key| !key.is_empty())
    });
    let own = [X_API_KEY, API_KEY].into_iter().filter_map(|name| headers.get(name)?.to_str().ok());
    bearer.or_else(|| own.map(str::trim).find(|key| !key.is_empty()))
}

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");
