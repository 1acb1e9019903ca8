//! `/v1/models/load`, `unload`, `swap` and `verify`, for keys of the scope `admin`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::Object;
use tokio::sync::oneshot;

use super::{AppState, middleware::Caller, pulls::asked};
use crate::{
    dialect::parse_object,
    error::{ApiError, ErrorKind},
    model_host::{CheckedPackage, HostError, PackageCheck},
};

/// Loads a model and answers once it is loaded. It goes on loading when the client leaves.
pub(super) async fn load(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let name = app.managed(&caller, &app.object(request).await?)?;
    app.models.load(&name, app.draining.subscribe()).await?;
    app.managed_detail(&caller, &name)
}

/// Unloads a model and answers once its memory is free. Its running requests get the server's drain
/// time to end.
pub(super) async fn unload(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let name = app.managed(&caller, &app.object(request).await?)?;
    app.models.unload(&name, app.draining.subscribe()).await?;
    app.managed_detail(&caller, &name)
}

/// Serves a model from another set and answers once the old one's memory is free.
pub(super) async fn swap(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = app.object(request).await?;
    let name = app.managed(&caller, &body)?;
    let required = || ApiError::param("set", "set: expected the name of a set of the store");
    let set = body.get("set").and_then(|set| set.as_str()).ok_or_else(required)?.to_owned();
    app.models.swap(&name, set, app.draining.subscribe()).await?;
    app.managed_detail(&caller, &name)
}

/// Verifies every byte of a model's packages.
pub(super) async fn verify(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let name = app.managed(&caller, &app.object(request).await?)?;
    let Some(checks) = &app.checks else {
        let message = "this server has no packages that could be verified";
        return Err(ApiError::new(ErrorKind::Invalid, message));
    };
    let packages = checks.run(app.models.key_of(&name)?).await?;
    let package = |package: &CheckedPackage| {
        let CheckedPackage { rank, place, read_bytes, findings } = package;
        json!({ "rank": rank, "place": place, "read_bytes": read_bytes, "findings": findings })
    };
    Ok(Json(json!({
        "object": "model.verification",
        "model": name,
        "ok": packages.iter().all(|package| package.findings.is_empty()),
        "packages": packages.iter().map(package).collect::<Vec<Value>>(),
    }))
    .into_response())
}

/// Who verifies packages, and whether that is being done.
pub(super) struct Checks {
    check: Arc<dyn PackageCheck>,
    is_busy: Arc<AtomicBool>,
}

/// Held while packages are being verified.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Checks {
    pub(super) fn new(check: Arc<dyn PackageCheck>) -> Self {
        Self { check, is_busy: Arc::default() }
    }

    /// Verifies on a thread of its own, which the server's end does not wait for: it may take an hour.
    async fn run(&self, key: String) -> Result<Vec<CheckedPackage>, ApiError> {
        if self.is_busy.swap(true, Ordering::Acquire) {
            let message = "packages are being verified already: try again when that is done";
            return Err(ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full"));
        }
        let busy = Busy(Arc::clone(&self.is_busy));
        let (check, (sender, checked)) = (Arc::clone(&self.check), oneshot::channel());
        let internal = |message: String| ApiError::new(ErrorKind::Internal, message);
        let work = move || {
            let outcome = check.check(&key);
            // Before it is told: whoever hears of it may ask for the next.
            drop(busy);
            // Whoever has left needs no outcome.
            let _ = sender.send(outcome);
        };
        thread::Builder::new()
            .name("verify".to_owned())
            .spawn(work)
            .map_err(|error| internal(format!("cannot start a thread: {error}")))?;
        let checked = checked.await.map_err(|_| internal("verifying has panicked".to_owned()))?;
        checked.map_err(|HostError(text)| ApiError::new(ErrorKind::Unavailable, text))
    }
}

impl AppState {
    async fn object(&self, request: Request<Body>) -> Result<Object, ApiError> {
        parse_object(&self.read_body(request).await?)
    }

    /// The model that a body names.
    fn managed(&self, caller: &Caller, body: &Object) -> Result<String, ApiError> {
        let required = || ApiError::param("model", "model: expected the name of a model");
        let asked = asked(body).ok_or_else(required)?;
        self.permitted(caller.key.as_deref(), Some(asked))?;
        self.models.known_name(Some(asked))
    }

    fn managed_detail(&self, caller: &Caller, name: &str) -> Result<Response, ApiError> {
        self.view(caller.key.as_ref(), name).map(|view| Json(self.detail(&view)).into_response())
    }
}
