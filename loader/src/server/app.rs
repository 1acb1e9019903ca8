//! Routes, limits and the way of a request: read, prepare, submit, answer.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Serialize;
use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::timeout,
};

use super::{
    chat::{self, Answer, ChatCall, Writer},
    error::{ApiError, ErrorKind},
    generation::{EndReason, Generation, GenerationContext, Piece, draining},
    model::{ChatModel, PromptError},
    stream::{self, StreamOptions},
};
use crate::engine::{EngineHandle, EngineState, GenerateRequest, Sampling, TokenId};

/// What the server takes on, and how long it waits.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Bytes of a request's body: a million tokens of text twice over.
    pub body_bytes: usize,
    /// Requests between their body and their end; more are turned away.
    pub active_requests: u32,
    /// Time in which a body must arrive.
    pub body_timeout: Duration,
    /// Longest silence of the engine within a request; a long prompt on slow machines takes minutes.
    pub event_timeout: Duration,
    /// Longest silence towards a streaming client, and the time for which the status of a stream
    /// is held open for errors.
    pub keep_alive: Duration,
    /// Longest time in which a streaming client takes nothing.
    pub write_timeout: Duration,
    /// Time that running requests get when the server is asked to stop.
    pub drain_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            body_bytes: 8 << 20,
            active_requests: 256,
            body_timeout: Duration::from_secs(30),
            event_timeout: Duration::from_mins(10),
            keep_alive: Duration::from_secs(10),
            write_timeout: Duration::from_mins(1),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// A front: a model's text side over an engine.
pub struct Server {
    pub(super) front: Arc<Front>,
}

/// What all requests share.
pub(super) struct Front {
    model: ChatModel,
    engine: EngineHandle,
    /// Names under which the model is known; the first is its own.
    names: Vec<String>,
    pub(super) limits: ServerLimits,
    /// Seconds since 1970.
    created: u64,
    pub(super) slots: Arc<Semaphore>,
    /// True when new requests are turned away.
    pub(super) draining: watch::Sender<bool>,
    /// True when running requests must end.
    pub(super) closing: watch::Sender<bool>,
}

impl Server {
    /// A front for `model` over `engine`. `names` are those that clients may ask for; the first is
    /// reported and there must be one.
    #[must_use]
    pub fn new(
        model: ChatModel,
        engine: EngineHandle,
        names: Vec<String>,
        limits: ServerLimits,
    ) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        let slots = Arc::new(Semaphore::new(limits.active_requests as usize));
        let created = unix_seconds();
        let (draining, closing) = (watch::Sender::new(false), watch::Sender::new(false));
        let front = Front { model, engine, names, limits, created, slots, draining, closing };
        Self { front: Arc::new(front) }
    }

    /// The routes.
    pub(super) fn router(&self) -> Router {
        Router::new()
            .route("/health", get(health))
            .route("/v1/models", get(models))
            .route("/v1/models/{*id}", get(model))
            .route("/v1/chat/completions", post(chat_completions))
            .fallback(unknown_address)
            .method_not_allowed_fallback(unknown_method)
            .with_state(self.front.clone())
    }
}

async fn unknown_address(request: Request<Body>) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("nothing lives at {}", request.uri().path()))
}

async fn unknown_method(request: Request<Body>) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    ApiError::new(ErrorKind::MethodNotAllowed, format!("{path} has no method {method}"))
}

async fn health(State(front): State<Arc<Front>>) -> Response {
    #[derive(Serialize)]
    struct Health<'a> {
        state: &'static str,
        reason: Option<String>,
        model: &'a str,
        ranks: u32,
        active_requests: u32,
    }
    let engine = front.engine.status();
    let (state, reason) = match engine.state {
        _ if *front.draining.borrow() => ("draining", Some("the server is shutting down".into())),
        EngineState::Ready => ("ready", None),
        EngineState::Starting(reason) => ("starting", Some(reason)),
        EngineState::Failed(reason) => ("failed", Some(reason)),
    };
    let status = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let (model, ranks, active_requests) = (front.name(), engine.ranks, engine.active_requests);
    (status, Json(Health { state, reason, model, ranks, active_requests })).into_response()
}

#[derive(Serialize)]
struct ModelInfo<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Longest sequence in tokens, under the name that vLLM gives it.
    max_model_len: u32,
}

async fn models(State(front): State<Arc<Front>>) -> Response {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: Vec<ModelInfo<'a>>,
    }
    let data = front.names.iter().map(|name| front.info(name)).collect();
    Json(List { object: "list", data }).into_response()
}

async fn model(
    State(front): State<Arc<Front>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    front.known_name(Some(&id)).map(|name| Json(front.info(name)).into_response())
}

async fn chat_completions(
    State(front): State<Arc<Front>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    front.check_ready()?;
    let body = front.read_body(request).await?;
    let slot = front.slots.clone().try_acquire_owned().map_err(|_| {
        let limit = front.limits.active_requests;
        let message = format!("the server is busy with {limit} requests");
        ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
    })?;
    let Prepared { call, request, model, seed } = front.clone().prepare(body).await?;

    let id = completion_id()?;
    let headers = headers(&id, seed, &call.ignored);
    let writer = Writer { id, created: unix_seconds(), model };
    let context = GenerationContext {
        engine: &front.engine,
        vocabulary: front.model.vocabulary(),
        closing: front.closing.subscribe(),
        event_timeout: front.limits.event_timeout,
    };
    let generation = Generation::submit(context, request, call.request.limits.stop, slot)?;
    let response = if call.stream {
        front.stream(generation, writer, call.include_usage).await?
    } else {
        whole(generation, &writer).await?
    };
    Ok((headers, response).into_response())
}

/// A request that the engine can take.
struct Prepared {
    call: ChatCall,
    request: GenerateRequest,
    /// The model's name as the client knows it.
    model: String,
    seed: u64,
}

impl Front {
    fn name(&self) -> &str {
        &self.names[0]
    }

    fn info<'a>(&self, id: &'a str) -> ModelInfo<'a> {
        let max_model_len = self.model.max_positions();
        ModelInfo {
            id,
            object: "model",
            created: self.created,
            owned_by: "shardpack",
            max_model_len,
        }
    }

    fn known_name(&self, asked: Option<&str>) -> Result<&str, ApiError> {
        let Some(asked) = asked else { return Ok(self.name()) };
        self.names.iter().find(|name| *name == asked).map(String::as_str).ok_or_else(|| {
            let message = format!("model {asked:?} is not served: expected {:?}", self.names);
            let error = ApiError::new(ErrorKind::NotFound, message).with_code("model_not_found");
            ApiError { param: Some("model".to_owned()), ..error }
        })
    }

    fn check_ready(&self) -> Result<(), ApiError> {
        if *self.draining.borrow() {
            return Err(draining());
        }
        let unavailable = |message| ApiError::new(ErrorKind::Unavailable, message);
        match self.engine.status().state {
            EngineState::Ready => Ok(()),
            EngineState::Starting(reason) => {
                Err(unavailable(format!("the model is starting: {reason}")).with_code("starting"))
            }
            EngineState::Failed(reason) => {
                Err(unavailable(format!("the engine has failed: {reason}")).with_code("failed"))
            }
        }
    }

    async fn read_body(&self, request: Request<Body>) -> Result<Bytes, ApiError> {
        let limit = self.limits.body_bytes;
        let read = axum::body::to_bytes(request.into_body(), limit);
        match timeout(self.limits.body_timeout, read).await {
            Ok(Ok(body)) => Ok(body),
            // Either the limit or a broken connection, which hears no answer.
            Ok(Err(_)) => {
                let message = format!("the body is over {limit} bytes or was cut off");
                Err(ApiError::new(ErrorKind::TooLarge, message))
            }
            Err(_) => {
                let seconds = self.limits.body_timeout.as_secs();
                let message = format!("the body did not arrive within {seconds} seconds");
                Err(ApiError::new(ErrorKind::SlowClient, message))
            }
        }
    }

    /// Parses, renders and tokenizes away from the threads that serve connections.
    async fn prepare(self: Arc<Self>, body: Bytes) -> Result<Prepared, ApiError> {
        let prepared = spawn_blocking(move || self.prepare_blocking(&body)).await;
        prepared.unwrap_or_else(|_| {
            let message = "the server failed on this request: this is a fault of the server";
            Err(ApiError::new(ErrorKind::Internal, message))
        })
    }

    fn prepare_blocking(&self, body: &[u8]) -> Result<Prepared, ApiError> {
        let call = chat::parse(body)?;
        let model = self.known_name(call.model.as_deref())?.to_owned();
        let prompt = self.model.prompt(&call.request).map_err(|error| prompt_error(&error))?;
        let seed = match call.request.sampling.seed {
            Some(seed) => seed,
            None => random_u64()?,
        };
        let default = self.model.default_temperature();
        let temperature = call.request.sampling.temperature.unwrap_or(default);
        let max_tokens = max_tokens(&prompt, call.request.limits.max_tokens, &self.model);
        let stop_tokens = self.model.stop_tokens().to_vec();
        let sampling = Sampling { temperature, seed, ..Sampling::GREEDY };
        let request = GenerateRequest {
            stop_tokens,
            sampling,
            ..GenerateRequest::greedy(prompt, max_tokens)
        };
        Ok(Prepared { call, request, model, seed })
    }

    /// Waits a little for the first piece, since an error before it can still have a status.
    async fn stream(
        &self,
        mut generation: Generation,
        writer: Writer,
        include_usage: bool,
    ) -> Result<Response, ApiError> {
        let ServerLimits { keep_alive, write_timeout, .. } = self.limits;
        let first = timeout(keep_alive, generation.next()).await.ok().transpose()?;
        let options = StreamOptions { include_usage, keep_alive, write_timeout };
        Ok(stream::respond(generation, first, writer, options))
    }
}

/// Answers with a whole completion.
async fn whole(mut generation: Generation, writer: &Writer) -> Result<Response, ApiError> {
    let mut content = String::new();
    let (reason, usage): (EndReason, _) = loop {
        match generation.next().await? {
            Piece::Text(text) => content.push_str(&text),
            Piece::End(reason, usage) => break (reason, usage),
        }
    };
    let body = writer.completion(&Answer { content, reason, usage });
    let json = HeaderValue::from_static("application/json");
    Ok(([(axum::http::header::CONTENT_TYPE, json)], body).into_response())
}

/// What was asked for, up to the model's last position; the prompt leaves room for one.
fn max_tokens(prompt: &[TokenId], asked: Option<u32>, model: &ChatModel) -> u32 {
    let used = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = model.max_positions().saturating_sub(used);
    asked.unwrap_or(room).min(room)
}

fn prompt_error(error: &PromptError) -> ApiError {
    let api = ApiError::param("messages", error.to_string());
    match error {
        PromptError::TooLong { .. } => api.with_code("context_length_exceeded"),
        PromptError::NoTemplate => api.with_code("no_chat_template"),
        _ => api,
    }
}

/// Headers that tell what the server chose and left out.
fn headers(id: &str, seed: u64, ignored: &[String]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut insert = |name: &'static str, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    insert("x-request-id", id);
    insert("x-shardpack-seed", &seed.to_string());
    if !ignored.is_empty() {
        // Names come from the client: only what may stand in a header.
        let plain = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
        let names: Vec<String> = ignored
            .iter()
            .map(|name| name.chars().take(IGNORED_NAME_CHARS).map(plain).collect())
            .collect();
        insert("x-shardpack-ignored-params", &names.join(", "));
    }
    headers
}

/// Characters of one name in the header of ignored parameters.
const IGNORED_NAME_CHARS: usize = 64;

fn completion_id() -> Result<String, ApiError> {
    Ok(format!("chatcmpl-{:016x}{:016x}", random_u64()?, random_u64()?))
}

fn random_u64() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|error| {
        let message = format!("the machine gives no random numbers: {error}");
        ApiError::new(ErrorKind::Internal, message)
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
