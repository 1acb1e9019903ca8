//! `/api/pull` and `/api/delete`: models of this machine's store, fetched and deleted for Ollama's
//! clients. The served model is there already, and stays.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use axum::{
    Extension, Json,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::json::{Json as OrderedJson, Object};
use tokio::sync::mpsc;

use super::{AppState, middleware::Caller, selection::blocking};
use crate::{
    dialect::parse_object,
    error::{ApiError, ErrorKind, Shape},
    keys::Scope,
    model_store::{ModelStore, ModelStoreError, PullReport, PullStatus},
    stream::Frames,
};

/// Lines between the fetching thread and the connection.
const LINES_AHEAD: usize = 16;
/// Shortest time between two lines about the same part.
const LINE_INTERVAL: Duration = Duration::from_millis(100);

/// The store, and whether a model is being fetched into it.
pub(super) struct Pulls {
    store: Arc<dyn ModelStore>,
    is_busy: Arc<AtomicBool>,
}

impl Pulls {
    pub(super) fn new(store: Arc<dyn ModelStore>) -> Self {
        Self { store, is_busy: Arc::default() }
    }
}

/// Held while a model is being fetched.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

pub(super) async fn pull(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = parse_object(&app.read_body(request).await?)?;
    let streams = body.get("stream") != Some(&OrderedJson::Bool(false));
    let Err(unserved) = app.named(&caller, &body) else { return Ok(there_already(streams)) };
    let (name, pulls) = app.stored(&body, &caller, unserved)?;
    let pull = pulls.begin(name)?;
    if streams {
        return Ok(lines_of_json(Body::from_stream(Frames(pull.lines))));
    }
    pull.outcome().await
}

/// The answer for a model that is served.
fn there_already(streams: bool) -> Response {
    if !streams {
        return Json(json!({"status": "success"})).into_response();
    }
    let statuses = ["pulling manifest", "verifying digest", "writing manifest", "success"];
    let line = |status: &str| format!("{}\n", json!({"status": status}));
    lines_of_json(Body::from(statuses.into_iter().map(line).collect::<String>()))
}

fn lines_of_json(body: Body) -> Response {
    let content_type = HeaderValue::from_static("application/x-ndjson");
    ([(header::CONTENT_TYPE, content_type)], body).into_response()
}

/// A model that is being fetched.
struct Pull {
    /// What happens, and the outcome at the end.
    lines: mpsc::Receiver<Bytes>,
    /// Why it failed, once it has.
    error: Arc<OnceLock<ApiError>>,
}

impl Pull {
    /// The last line, or the error.
    async fn outcome(mut self) -> Result<Response, ApiError> {
        let mut last = Bytes::new();
        while let Some(line) = self.lines.recv().await {
            last = line;
        }
        if let Some(error) = self.error.get() {
            return Err(error.clone());
        }
        let json = HeaderValue::from_static("application/json");
        Ok(([(header::CONTENT_TYPE, json)], last).into_response())
    }
}

pub(super) async fn delete(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let body = parse_object(&app.read_body(request).await?)?;
    let unserved = match app.named(&caller, &body).map(|view| view.name) {
        Err(error) => error,
        Ok(name) => {
            let message = format!(
                "model '{name}' is being served and cannot be deleted: stop the server first"
            );
            return Err(ApiError::new(ErrorKind::Invalid, message));
        }
    };
    let (name, pulls) = app.stored(&body, &caller, unserved)?;
    let store = Arc::clone(&pulls.store);
    let removed = blocking(move || store.remove(&name).map_err(|error| api_error(&error))).await;
    removed.map(|()| StatusCode::OK.into_response())
}

fn api_error(error: &ModelStoreError) -> ApiError {
    let kind = match error {
        ModelStoreError::NotFound(_) => ErrorKind::NotFound,
        ModelStoreError::Invalid(_) => ErrorKind::Invalid,
        ModelStoreError::Failed(_) => ErrorKind::Unavailable,
    };
    ApiError::new(kind, error.to_string())
}

impl AppState {
    /// The name of a model that is not served, and the store; `unserved` where there is none. Only
    /// keys of the scope `admin` change what is stored.
    fn stored(
        &self,
        body: &Object,
        caller: &Caller,
        unserved: ApiError,
    ) -> Result<(String, &Pulls), ApiError> {
        let (Some(name), Some(pulls)) = (asked(body), &self.pulls) else { return Err(unserved) };
        if let Some(key) = &caller.key {
            key.demand(Scope::Admin)?;
        }
        Ok((name.to_owned(), pulls))
    }
}

/// The name that a body asks for, by `model` or by `name` as older clients say.
pub(super) fn asked(body: &Object) -> Option<&str> {
    let text = |key: &str| body.get(key)?.as_str().filter(|name| !name.is_empty());
    let name = text("model").or_else(|| text("name"))?;
    Some(name.strip_suffix(":latest").unwrap_or(name))
}

impl Pulls {
    /// Fetches on a thread of its own: it takes minutes to hours. Its lines end with the outcome; a
    /// client that leaves ends it, and the next pull goes on from there.
    fn begin(&self, name: String) -> Result<Pull, ApiError> {
        if self.is_busy.swap(true, Ordering::Acquire) {
            let message = "another model is being fetched: try again when it is there";
            return Err(ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full"));
        }
        let busy = Busy(Arc::clone(&self.is_busy));
        let (sender, lines) = mpsc::channel(LINES_AHEAD);
        let (store, error) = (Arc::clone(&self.store), Arc::default());
        let failed: Arc<OnceLock<ApiError>> = Arc::clone(&error);
        let work = move || {
            let _busy = busy;
            let line = match store
                .pull(&name, report(sender.clone()))
                .map_err(|error| api_error(&error))
            {
                Ok(()) => json!({"status": "success"}),
                Err(error) => failed.get_or_init(|| error).shaped(Shape::Ollama),
            };
            // Whoever has left needs no outcome.
            let _ = sender.blocking_send(as_line(&line));
        };
        let thread = thread::Builder::new().name("pull".to_owned()).spawn(work);
        thread.map(|_| Pull { lines, error }).map_err(|error| {
            ApiError::new(ErrorKind::Internal, format!("cannot start a thread: {error}"))
        })
    }
}

/// Sends a line for what happens, seldom enough for clients that draw it.
fn report(sender: mpsc::Sender<Bytes>) -> PullReport {
    let last: Mutex<Option<(String, Instant)>> = Mutex::new(None);
    Arc::new(move |PullStatus { status, bytes }| {
        let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_done = bytes.is_some_and(|[total, completed]| total == completed);
        let recent =
            last.as_ref().filter(|(text, at)| *text == status && at.elapsed() < LINE_INTERVAL);
        if recent.is_some() && !is_done {
            return !sender.is_closed();
        }
        let mut line = json!({"status": status});
        if let Some([total, completed]) = bytes {
            // Clients draw a bar for each digest.
            line["digest"] = status.as_str().into();
            (line["total"], line["completed"]) = (total.into(), completed.into());
        }
        *last = Some((status, Instant::now()));
        sender.blocking_send(as_line(&line)).is_ok()
    })
}

fn as_line(value: &Value) -> Bytes {
    Bytes::from(format!("{value}\n"))
}
