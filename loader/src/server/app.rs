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
    dialect::{Answer, Call, Dialect, Identity, Prompt, RawPrompt, Writer},
    error::{ApiError, ErrorKind},
    generation::{Generation, GenerationContext, Sequence, draining},
    inner::ChatRequest,
    model::{ChatModel, PromptError},
    output,
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
    /// Longest life of a request, from its body to its end.
    pub request_timeout: Duration,
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
            request_timeout: Duration::from_hours(4),
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
    generate(front, Dialect::Chat, request).await
}

/// The way of every request that is answered by the model.
async fn generate(
    front: Arc<Front>,
    dialect: Dialect,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    front.check_ready()?;
    let body = front.read_body(request).await?;
    let slot = front.slots.clone().try_acquire_owned().map_err(|_| {
        let limit = front.limits.active_requests;
        let message = format!("the server is busy with {limit} requests");
        ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
    })?;
    let prepared = front.clone().prepare(dialect, body).await?;
    let id = format!("{:016x}{:016x}", random_u64()?, random_u64()?);
    let headers = headers(&id, prepared.seed, &prepared.ignored);
    let identity = Identity {
        id,
        created: unix_seconds(),
        model: prepared.model,
        prompt_tokens: prepared.prompt_tokens,
        choices: prepared.sequences.len() as u32,
    };
    let choices = prepared.sequences.len();
    let writer = prepared.form.writer(identity);
    let context = GenerationContext {
        engine: &front.engine,
        vocabulary: front.model.vocabulary(),
        closing: front.closing.subscribe(),
        event_timeout: front.limits.event_timeout,
        request_timeout: front.limits.request_timeout,
    };
    let generation = Generation::submit(context, prepared.sequences, slot)?;
    let response = if prepared.stream {
        front.stream(generation, writer).await?
    } else {
        whole(generation, writer, choices).await?
    };
    Ok((headers, response).into_response())
}

/// A request that the engine can take.
struct Prepared {
    sequences: Vec<Sequence>,
    /// The model's name as the client knows it.
    model: String,
    seed: u64,
    prompt_tokens: u32,
    stream: bool,
    ignored: Vec<String>,
    form: super::dialect::Form,
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
    async fn prepare(self: Arc<Self>, dialect: Dialect, body: Bytes) -> Result<Prepared, ApiError> {
        let prepared = spawn_blocking(move || self.prepare_blocking(dialect, &body)).await;
        prepared.unwrap_or_else(|_| {
            let message = "the server failed on this request: this is a fault of the server";
            Err(ApiError::new(ErrorKind::Internal, message))
        })
    }

    fn prepare_blocking(&self, dialect: Dialect, body: &[u8]) -> Result<Prepared, ApiError> {
        let call = dialect.parse(body)?;
        let model = self.known_name(call.model.as_deref())?.to_owned();
        output::check(&call.request)?;
        let prompts = self.prompts(&call)?;
        let seed = match call.request.sampling.seed {
            Some(seed) => seed,
            None => random_u64()?,
        };
        let prompt_tokens = prompts.iter().map(Vec::len).sum::<usize>();
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let choices = call.request.sampling.choices.unwrap_or(1);
        let mut sequences = Vec::new();
        for prompt in prompts {
            for choice in 0..choices {
                // Each answer has randomness of its own; the first has the seed itself.
                let seed = seed.wrapping_add(u64::from(choice).wrapping_mul(SEED_STEP));
                sequences.push(self.sequence(&call.request, prompt.clone(), seed));
            }
        }
        let Call { stream, ignored, form, .. } = call;
        Ok(Prepared { sequences, model, seed, prompt_tokens, stream, ignored, form })
    }

    /// The prompts of a request, one for each of its texts.
    fn prompts(&self, call: &Call) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let check = |prompt| self.model.check_prompt(prompt);
        match &call.prompt {
            Prompt::Conversation => {
                let prompt = self.model.prompt(&call.request);
                Ok(vec![prompt.map_err(|error| prompt_error(&error, "messages"))?])
            }
            Prompt::Raw(prompts) => prompts
                .iter()
                .map(|prompt| match prompt {
                    RawPrompt::Text(text) => self.model.encode(text).and_then(check),
                    RawPrompt::Tokens(tokens) => check(tokens.clone()),
                })
                .map(|prompt| prompt.map_err(|error| prompt_error(&error, "prompt")))
                .collect(),
        }
    }

    fn sequence(&self, request: &ChatRequest, prompt: Vec<TokenId>, seed: u64) -> Sequence {
        let max_tokens = max_tokens(&prompt, request.limits.max_tokens, &self.model);
        let mut stop_tokens = request.limits.stop_tokens.clone();
        if !request.limits.ignore_stop_tokens {
            stop_tokens.extend(self.model.stop_tokens());
        }
        let asked = &request.sampling;
        let sampling = Sampling {
            temperature: asked.temperature.unwrap_or_else(|| self.model.default_temperature()),
            top_k: asked.top_k.unwrap_or(0),
            top_p: asked.top_p.unwrap_or(1.0),
            min_p: asked.min_p.unwrap_or(0.0),
            repetition_penalty: asked.repetition_penalty.unwrap_or(1.0),
            presence_penalty: asked.presence_penalty.unwrap_or(0.0),
            frequency_penalty: asked.frequency_penalty.unwrap_or(0.0),
            logit_bias: asked.logit_bias.clone(),
            seed,
        };
        let parser = output::parser(request);
        let stop = request.limits.stop.clone();
        let generate = GenerateRequest {
            prompt,
            max_tokens,
            min_tokens: request.limits.min_tokens.min(max_tokens),
            stop_tokens,
            sampling,
            logprobs: request.sampling.logprobs,
            constraint: None,
            timeout_ms: u64::try_from(self.limits.request_timeout.as_millis()).ok(),
        };
        Sequence { request: generate, parser, stop }
    }

    /// Waits a little for the first step, since an error before it can still have a status.
    async fn stream(
        &self,
        mut generation: Generation,
        writer: Box<dyn Writer>,
    ) -> Result<Response, ApiError> {
        let ServerLimits { keep_alive, write_timeout, .. } = self.limits;
        let first = timeout(keep_alive, generation.next()).await.ok().transpose()?.flatten();
        let options = StreamOptions { keep_alive, write_timeout };
        Ok(stream::respond(generation, first, writer, options))
    }
}

/// Between the seeds of a request's answers: an odd number with bits all over.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Answers with whole completions.
async fn whole(
    mut generation: Generation,
    mut writer: Box<dyn Writer>,
    choices: usize,
) -> Result<Response, ApiError> {
    let mut answers = vec![Answer::default(); choices];
    while let Some(step) = generation.next().await? {
        Answer::collect(&mut answers, step);
    }
    let body = writer.whole(answers);
    let json = HeaderValue::from_static("application/json");
    Ok(([(axum::http::header::CONTENT_TYPE, json)], body).into_response())
}

/// What was asked for, up to the model's last position; the prompt leaves room for one.
fn max_tokens(prompt: &[TokenId], asked: Option<u32>, model: &ChatModel) -> u32 {
    let used = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = model.max_positions().saturating_sub(used);
    asked.unwrap_or(room).min(room)
}

fn prompt_error(error: &PromptError, param: &str) -> ApiError {
    let api = ApiError::param(param, error.to_string());
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
