//! The HTTP application: the state that all requests share, and the router.

mod bodies;
mod browser;
mod content_coding;
mod embeddings;
mod events;
mod generate;
mod management;
mod middleware;
mod models;
mod ollama;
mod page;
mod pulls;
mod rerank;
mod selection;
mod state;
mod stored_responses;
mod tokens;
mod usage;

pub(super) use middleware::Remote;

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Request},
    middleware::from_fn_with_state,
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, post},
};
use shardpack_chat::model::ChatModel;
use shardpack_engine_api::EngineHandle;
use tokio::{runtime::Handle, sync::watch};

use super::{
    closing::draining,
    error::{ApiError, ErrorKind},
    events::ServerEvents,
    fair::{Slots, Turns},
    keys::ApiKeys,
    ledger::Ledger,
    limits::ServerLimits,
    metrics::{FrontMetrics, Metrics},
    model_host::{HostOptions, MemoryShare, ModelCard, ModelHost, PackageCheck},
    model_info::ModelInfo,
    model_store::ModelStore,
    openapi,
    registry::{Need, Registry, check_engine},
    response_store::ResponseStore,
    routes::{ROUTES, Target},
    served_model::ServedModel,
    tls::Tls,
};

/// Receives the lines of the access log, one JSON object each.
pub type LogSink = Box<dyn Fn(&str) + Send + Sync>;

/// What a service manager is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceEvent {
    /// The server reads its keys and certificates again.
    Reloading,
    /// It has.
    Reloaded,
    /// It ends.
    Stopping,
    /// It answers requests.
    Alive,
}

/// Tells a service manager, and the interval at which it wants to hear that the server is alive.
type Service = (Box<dyn Fn(ServiceEvent) + Send + Sync>, Option<Duration>);
/// Requests that are parsed, rendered and tokenized at once; also how many parsed bodies are in memory.
pub(super) const READING_MOST: usize = 4;

/// Requests whose grammars are compiled at once.
const COMPILING_MOST: usize = 2;

/// An HTTP server: for one model over an engine, or for the models of a host.
pub struct Server {
    pub(super) app: Arc<AppState>,
}

/// The state that all requests share.
pub(super) struct AppState {
    /// What is served.
    pub(super) models: Arc<Registry>,
    /// The store of further models, if clients may change it.
    pulls: Option<pulls::Pulls>,
    /// Verifies packages, if that is possible.
    checks: Option<management::Checks>,
    pub(super) limits: ServerLimits,
    /// Seconds since 1970.
    created: u64,
    pub(super) slots: Arc<Slots>,
    /// Turns at parsing, rendering and tokenizing, and at compiling grammars.
    reading: Arc<Turns>,
    compiling: Arc<Turns>,
    /// Responses that later requests may continue (`previous_response_id`).
    store: Arc<ResponseStore>,
    /// API keys; absent: no authentication.
    pub(super) keys: Option<Arc<ApiKeys>>,
    /// What requests took.
    pub(super) ledger: Arc<Ledger>,
    /// Who is told of the server's life.
    service: Option<Service>,
    /// Origins allowed by CORS.
    pub(super) origins: Vec<String>,
    /// Names under which the server may be asked, besides those that nobody else can have.
    hosts: Vec<String>,
    /// What request bodies may take of memory.
    bodies: bodies::Budget,
    /// Counters of what no model is to be named for.
    pub(super) front: FrontMetrics,
    /// What happened since the start.
    pub(super) events: ServerEvents,
    log: Option<LogSink>,
    /// True when new requests are turned away.
    pub(super) draining: watch::Sender<bool>,
    /// Certificate and key; absent: plain HTTP.
    pub(super) tls: Option<Arc<Tls>>,
    /// Runtime that writes responses; absent: the one that reads requests.
    pub(super) writers: Option<Handle>,
}

impl Server {
    /// A server for `model` over `engine`. `names` are those that clients may ask for; there must
    /// be one, and the first is reported.
    #[must_use]
    pub fn new(
        model: ChatModel,
        engine: EngineHandle,
        names: Vec<String>,
        limits: ServerLimits,
    ) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        let front = FrontMetrics::new(Some(&names[0]));
        let metrics = Arc::new(Metrics::new(&names[0]));
        let card = ModelCard::of(&model, names, ModelInfo::default());
        let closing = watch::Sender::default();
        let nodes = Vec::new();
        let served = ServedModel { model, engine, card, nodes, metrics, limits, closing };
        Self::over(Registry::of_one(served), limits, front)
    }

    /// A server for the models of `host`, which are loaded and unloaded while it runs. There must
    /// be one, and the first is meant where a request names none.
    #[must_use]
    pub fn of_host(host: Arc<dyn ModelHost>, options: HostOptions, limits: ServerLimits) -> Self {
        Self::over(Registry::of_host(host, options, limits), limits, FrontMetrics::new(None))
    }

    fn over(models: Registry, limits: ServerLimits, front: FrontMetrics) -> Self {
        let app = AppState {
            models: Arc::new(models),
            pulls: None,
            checks: None,
            limits,
            created: unix_seconds(),
            slots: Slots::new(limits.active_requests),
            reading: Turns::new(READING_MOST, READING_MOST - 1),
            compiling: Turns::new(COMPILING_MOST, 1),
            store: Arc::default(),
            keys: None,
            ledger: Arc::default(),
            service: None,
            origins: Vec::new(),
            hosts: Vec::new(),
            bodies: bodies::Budget::default(),
            front,
            events: ServerEvents::default(),
            log: None,
            draining: watch::Sender::new(false),
            tls: None,
            writers: None,
        };
        Self { app: Arc::new(app) }
    }

    /// Tells of these events, and adds its own; to be said before its keys and its certificate.
    #[must_use]
    pub fn with_events(self, events: ServerEvents) -> Self {
        self.app.models.set_events(events.clone());
        self.change(|app| app.events = events)
    }

    /// Requires one of these API keys for every request.
    #[must_use]
    pub fn with_keys(self, keys: ApiKeys) -> Self {
        self.change(|app| app.keys = Some(Arc::new(keys.with_events(app.events.clone()))))
    }

    /// Counts what requests take in this ledger.
    #[must_use]
    pub fn with_ledger(self, ledger: Ledger) -> Self {
        self.change(|app| app.ledger = Arc::new(ledger))
    }

    /// Tells a service manager of the server's life; every `alive` that it answers, where that is given.
    #[must_use]
    pub fn with_service(
        self,
        alive: Option<Duration>,
        tell: impl Fn(ServiceEvent) + Send + Sync + 'static,
    ) -> Self {
        self.change(|app| app.service = Some((Box::new(tell), alive)))
    }

    /// Allows pages of these origins (CORS); `*` is any.
    #[must_use]
    pub fn with_origins(self, origins: Vec<String>) -> Self {
        self.change(|app| app.origins = origins)
    }

    /// Answers for these host names too, where there are no API keys.
    #[must_use]
    pub fn with_hosts(self, hosts: Vec<String>) -> Self {
        self.change(|app| app.hosts = hosts)
    }

    /// Describes the model of a server of one to clients that ask what it is.
    #[must_use]
    pub fn with_info(self, info: ModelInfo) -> Self {
        self.app.models.change_only(|served| served.card.info = info);
        self
    }

    /// Lets clients fetch models into this store and delete them.
    #[must_use]
    pub fn with_store(self, store: Arc<dyn ModelStore>) -> Self {
        self.change(|app| app.pulls = Some(pulls::Pulls::new(store)))
    }

    /// Lets clients have the packages of a model verified.
    #[must_use]
    pub fn with_check(self, check: Arc<dyn PackageCheck>) -> Self {
        self.change(|app| app.checks = Some(management::Checks::new(check)))
    }

    /// Says what the model of a server of one takes of each machine, as planned.
    #[must_use]
    pub fn with_memory(self, memory: Vec<MemoryShare>) -> Self {
        self.app.models.set_memory(memory);
        self
    }

    /// Names the nodes of a server of one model, in rank order.
    #[must_use]
    pub fn with_nodes(self, nodes: Vec<String>) -> Self {
        self.app.models.change_only(|served| served.nodes = nodes);
        self
    }

    /// Writes an access log: one line for each request, without prompts and answers.
    #[must_use]
    pub fn with_log(self, log: LogSink) -> Self {
        self.change(|app| app.log = Some(log))
    }

    /// Serves HTTPS.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        self.change(|app| app.tls = Some(Arc::new(tls.with_events(app.events.clone()))))
    }

    /// Writes responses on a runtime of their own.
    pub(super) fn with_writers(self, writers: Handle) -> Self {
        self.change(|app| app.writers = Some(writers))
    }

    fn change(mut self, change: impl FnOnce(&mut AppState)) -> Self {
        change(Arc::get_mut(&mut self.app).expect("not served yet"));
        self
    }

    /// The routes.
    pub(super) fn router(&self) -> Router {
        let router = ROUTES
            .iter()
            .fold(Router::new(), |router, route| router.route(route.path, handler(route.target)));
        router
            .fallback(unknown_address)
            .method_not_allowed_fallback(unknown_method)
            .layer(from_fn_with_state(self.app.clone(), middleware::handle_request))
            .with_state(self.app.clone())
    }
}

fn handler(target: Target) -> MethodRouter<Arc<AppState>> {
    match target {
        Target::Generate(dialect) => {
            post(move |state, caller, request| generate::generate(state, caller, dialect, request))
        }
        Target::Embed(dialect) => {
            post(move |state, caller, request| embeddings::embed(state, caller, dialect, request))
        }
        Target::Rerank => post(rerank::rerank),
        Target::Page => get(page::page),
        Target::OpenApi => get(openapi),
        Target::Health => get(state::health),
        Target::Live => get(async || "ok"),
        Target::Ready => get(state::ready),
        Target::Metrics => get(state::metrics),
        Target::Stats => get(state::stats),
        Target::Events => get(events::events),
        Target::Usage => get(usage::usage),
        Target::Props => get(models::props),
        Target::Models => get(models::models),
        Target::LoadModel => post(management::load),
        Target::UnloadModel => post(management::unload),
        Target::SwapModel => post(management::swap),
        Target::VerifyModel => post(management::verify),
        Target::Model => get(models::model),
        Target::CountTokens => post(tokens::count_tokens),
        Target::CountInputTokens => post(tokens::count_input_tokens),
        Target::Tokenize => post(tokens::tokenize),
        Target::Detokenize => post(tokens::detokenize),
        Target::TokenizerInfo => get(tokens::tokenizer_info),
        Target::ApplyTemplate => post(tokens::apply_template),
        Target::LmStudioModels => get(models::lm_studio_models),
        Target::LmStudioModel => get(models::lm_studio_model),
        Target::OllamaTags => get(ollama::tags),
        Target::OllamaShow => post(ollama::show),
        Target::OllamaPs => get(ollama::ps),
        Target::OllamaVersion => get(ollama::version),
        Target::OllamaPull => post(pulls::pull),
        Target::OllamaDelete => delete(pulls::delete),
        Target::ResponseInput => get(stored_responses::input_items),
        Target::ResponseCancel => post(stored_responses::cancel),
        Target::ResponseShow => get(stored_responses::show),
        Target::ResponseForget => delete(stored_responses::forget),
    }
}

async fn unknown_address(request: Request<Body>) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("unknown path {}", request.uri().path()))
}

async fn unknown_method(request: Request<Body>) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    ApiError::new(ErrorKind::MethodNotAllowed, format!("method {method} is not allowed on {path}"))
}

async fn openapi() -> Response {
    axum::Json(openapi::document()).into_response()
}

impl AppState {
    /// Writes a line of the log.
    pub(super) fn log(&self, line: impl FnOnce() -> serde_json::Value) {
        if let Some(log) = &self.log {
            log(&line().to_string());
        }
    }

    /// Tells the service manager, if there is one.
    pub(super) fn tell(&self, event: ServiceEvent) {
        if let Some((tell, _)) = &self.service {
            tell(event);
        }
    }

    /// The interval at which the service manager wants to hear that the server is alive.
    pub(super) fn alive_interval(&self) -> Option<Duration> {
        self.service.as_ref().and_then(|(_, alive)| *alive)
    }

    /// Counts and logs what was done to a request.
    fn note(&self, metrics: &Metrics, id: &str, notes: &Notes) {
        if !notes.adjusted.is_empty() {
            metrics.adjusted(&notes.adjusted);
            self.log(|| serde_json::json!({"request": id, "adjusted": notes.adjusted}));
        }
        if !notes.unenforced.is_empty() {
            metrics.unenforced();
            self.log(|| serde_json::json!({"request": id, "unenforced": notes.unenforced}));
        }
    }

    /// Whether a request is taken now, whichever model it asks for.
    fn check_ready(&self) -> Result<(), ApiError> {
        if *self.draining.borrow() {
            return Err(draining());
        }
        match self.models.only() {
            Some(served) => check_engine(&served, Need::Engine),
            None => Ok(()),
        }
    }
}

/// What was done to a request so that it could be answered.
#[derive(Debug, Default)]
struct Notes {
    /// Changes of a conversation that the model's template refuses as it came.
    adjusted: Vec<&'static str>,
    /// Places in schemas that are not enforced.
    unenforced: Vec<String>,
}

/// Headers with the seed that was used, the parameters that were ignored, and what was adjusted.
fn headers(seed: u64, ignored: &[String], notes: &Notes) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut insert = |name: &'static str, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    insert("x-shardpack-seed", &seed.to_string());
    let mut list = |name: &'static str, names: &[String], chars: usize| {
        if names.is_empty() {
            return;
        }
        // Names come from the client: only what may stand in a header.
        let plain = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
        let names: Vec<String> = names
            .iter()
            .take(HEADER_NAMES_MAX)
            .map(|name| name.chars().take(chars).map(plain).collect())
            .collect();
        insert(name, &names.join(", "));
    };
    list("x-shardpack-ignored-params", ignored, IGNORED_NAME_CHARS);
    let adjusted: Vec<String> = notes.adjusted.iter().map(|name| (*name).to_owned()).collect();
    list("x-shardpack-adjusted", &adjusted, IGNORED_NAME_CHARS);
    list("x-shardpack-unenforced", &notes.unenforced, PLACE_CHARS);
    headers
}

/// The header with the parameters that were ignored.
fn headers_of_ignored(ignored: &[String]) -> HeaderMap {
    let mut headers = headers(0, ignored, &Notes::default());
    headers.remove("x-shardpack-seed");
    headers
}

/// Most names in one header.
const HEADER_NAMES_MAX: usize = 32;
/// Characters of one place in a schema.
const PLACE_CHARS: usize = 128;
/// Characters of one name in the header of ignored parameters.
const IGNORED_NAME_CHARS: usize = 64;

/// Sixteen random bytes, in hex.
pub(super) fn random_id() -> Result<String, ApiError> {
    Ok(format!("{:016x}{:016x}", random_u64()?, random_u64()?))
}

fn random_u64() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|error| {
        let message = format!("cannot get random bytes from the system: {error}");
        ApiError::new(ErrorKind::Internal, message)
    })
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
