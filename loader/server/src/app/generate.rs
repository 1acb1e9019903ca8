//! Generation requests: read the body, parse and tokenize it, submit it to the engine, respond.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderValue, Request, header},
    response::{IntoResponse, Response},
};
use shardpack_chat::{
    conversation::{ChatRequest, SamplingRequest},
    model::{ChatModel, DefaultSampling, PromptError},
    output::{self, OutputPlanError},
    prompt::PromptFailure,
    prompt_side::PromptSideError,
    sandbox::for_tenant,
    text::Detokenizer,
    tools::CompileBudget,
};
use shardpack_engine_api::{GenerateRequest, PromptOutput, Sampling, Tenant, TokenId};
use tokio::{runtime::Handle, task::JoinSet, time::timeout};

use super::{AppState, Notes, ServerLimits, headers, middleware::Caller, random_u64, unix_seconds};
use crate::{
    background,
    dialect::{Answer, Dialect, Identity, ParsedRequest, Prompt, RawPrompt, Writer, WriterOptions},
    error::{ApiError, CONTEXT_LENGTH_EXCEEDED, ErrorKind},
    fair::SlotPermit,
    generation::{Generation, GenerationContext, RequestSlot, Sequence},
    keys::{Key, KeySlot, Scope},
    registry::{Entered, Found, Need, Waiting},
    served_model::ServedModel,
    stream::{self, StreamOptions},
    tasks,
};

/// Answers one request.
pub(super) async fn generate(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    dialect: Dialect,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let key = caller.begin()?;
    let body = app.read_charged(request, key.as_ref()).await?;
    caller.record.body(body.len());
    // One slot until the number of choices is known; only now, so that slow senders have none.
    let permit = app.slots.try_take(caller.tenant, 1).ok_or_else(|| app.busy())?;
    let (reader, owner) = (Arc::clone(&app), caller.key.clone());
    let read = move || reader.read_generation(dialect, &body, owner.as_deref());
    let read = app.reading(caller.tenant, read).await?;
    let admitted = Admitted { permit, key };
    let (parsed, entered, prepared) = match read {
        Read::Whole(parsed, entered, prepared) => (parsed, entered, prepared),
        Read::Compiles(parsed, entered) => app
            .compile(caller.tenant, admitted.key.as_ref(), parsed, entered)
            .await
            .map_err(|(_, error)| error)?,
        Read::Residency(parsed) => return app.reside(&caller, parsed).await,
        Read::Waits(parsed, waiting) if parsed.stream => {
            return app.stream_later(caller, *parsed, waiting, admitted).await;
        }
        Read::Waits(parsed, waiting) => {
            let entered = app.enter(waiting).await?;
            let prepared =
                app.prepare(caller.tenant, admitted.key.as_ref(), *parsed, entered).await;
            prepared.map_err(|(_, error)| error)?
        }
    };
    app.answer(caller, *parsed, entered, *prepared, admitted).await
}

/// What a request was given before its model was known.
struct Admitted {
    permit: SlotPermit,
    key: Option<KeySlot>,
}

/// A request that was read.
enum Read {
    /// Its model is loaded.
    Whole(Box<ParsedRequest>, Entered, Box<PreparedRequest>),
    /// The same, but its grammar has to be compiled.
    Compiles(Box<ParsedRequest>, Entered),
    /// Its model has to be loaded.
    Waits(Box<ParsedRequest>, Waiting),
    /// It asks for nothing but that its model be in memory, or out of it.
    Residency(Box<ParsedRequest>),
}

/// A submitted request and the writer of its answers.
type Submitted = (Generation, Box<dyn Writer>);

/// Tokenized prompts, and names of what was changed in the conversation.
type Prompts = (Vec<Vec<TokenId>>, Vec<&'static str>);

/// A request that was rendered and tokenized.
struct PreparedRequest {
    sequences: Vec<Sequence>,
    seed: u64,
    prompt_tokens: u32,
    ignored: Vec<String>,
    notes: Notes,
    /// Error that this dialect's clients expect inside the stream; there are no sequences then.
    refusal: Option<ApiError>,
    /// The answer to a request without a prompt; there are no sequences then.
    without_prompt: Option<String>,
}

/// Why a request is not prepared.
enum PrepareError {
    Api(ApiError),
    /// Its grammar has to be compiled first.
    Uncompiled,
}

impl From<ApiError> for PrepareError {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<OutputPlanError> for PrepareError {
    fn from(error: OutputPlanError) -> Self {
        match error {
            OutputPlanError::Uncompiled => Self::Uncompiled,
            error => Self::Api(error.into()),
        }
    }
}

/// A request that was prepared for its model, or why it was not.
type Prepared =
    Result<(Box<ParsedRequest>, Entered, Box<PreparedRequest>), (Box<ParsedRequest>, ApiError)>;

/// How long a request waits for its turn to have its grammar compiled.
const COMPILE_TURN_TIMEOUT: Duration = Duration::from_mins(1);

impl AppState {
    pub(super) fn busy(&self) -> ApiError {
        let limit = self.limits.active_requests;
        let message = format!("the server is busy with {limit} requests");
        ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
    }

    /// Parses a request, and renders and tokenizes it where its model is loaded.
    fn read_generation(
        self: &Arc<Self>,
        dialect: Dialect,
        body: &[u8],
        key: Option<&Key>,
    ) -> Result<Read, ApiError> {
        let owner = key.map(Key::name);
        let earlier = |id: &str| self.store.items(id, owner, Instant::now());
        let parsed = Box::new(dialect.parse_after(body, &earlier)?);
        if matches!(parsed.prompt, Prompt::Load | Prompt::Unload) && self.models.has_host() {
            return Ok(Read::Residency(parsed));
        }
        let found = self.find(key, parsed.model.as_deref(), Need::Engine)?;
        if let Some(keep_alive) = parsed.writer_options.stay() {
            let asked = self.permitted(key, parsed.model.as_deref())?;
            let name = self.models.known_name(asked.as_deref())?;
            self.models.keep_alive(&name, keep_alive);
        }
        Ok(match found {
            Found::Entered(entered) => match entered.prepare(&parsed, None) {
                Ok(prepared) => Read::Whole(parsed, entered, Box::new(prepared)),
                Err(PrepareError::Uncompiled) => Read::Compiles(parsed, entered),
                Err(PrepareError::Api(error)) => return Err(error),
            },
            Found::Waits(waiting) => Read::Waits(parsed, waiting),
        })
    }

    /// Renders and tokenizes a request whose model has been loaded.
    async fn prepare(
        &self,
        tenant: Tenant,
        key: Option<&KeySlot>,
        parsed: ParsedRequest,
        entered: Entered,
    ) -> Prepared {
        let parsed = Box::new(parsed);
        let turn = self.reading.take(tenant.id).await;
        let prepared = tasks::blocking(move || {
            let _turn = turn;
            let prepared = for_tenant(tenant.id, || entered.prepare(&parsed, None));
            (parsed, entered, prepared)
        });
        // A panic ends the connection.
        let prepared = prepared.await;
        let (parsed, entered, prepared) =
            prepared.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        match prepared {
            Ok(prepared) => Ok((parsed, entered, Box::new(prepared))),
            Err(PrepareError::Uncompiled) => self.compile(tenant, key, parsed, entered).await,
            Err(PrepareError::Api(error)) => Err((parsed, error)),
        }
    }

    /// Prepares a request whose grammar has to be compiled: in its tenant's turn, and on a thread of low
    /// priority, so that nobody else waits.
    async fn compile(
        &self,
        tenant: Tenant,
        key: Option<&KeySlot>,
        parsed: Box<ParsedRequest>,
        entered: Entered,
    ) -> Prepared {
        if let Some(Err(error)) = key.map(KeySlot::check_grammar) {
            return Err((parsed, error));
        }
        let Ok(turn) = timeout(COMPILE_TURN_TIMEOUT, self.compiling.take(tenant.id)).await else {
            let message = "other grammars have been compiled for a minute: try again later";
            let error = ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full");
            return Err((parsed, error));
        };
        let prepared = background::run(move || {
            let _turn = turn;
            let budget = CompileBudget::default();
            let prepared = for_tenant(tenant.id, || entered.prepare(&parsed, Some(&budget)));
            (parsed, entered, prepared, budget.spent())
        });
        let prepared = prepared.await.expect("a panic ends the connection");
        let (parsed, entered, prepared, spent) = prepared;
        // Refused grammars have cost as much.
        if let Some(key) = key {
            key.spend_grammar(spent);
        }
        match prepared {
            Ok(prepared) => Ok((parsed, entered, Box::new(prepared))),
            Err(PrepareError::Api(error)) => Err((parsed, error)),
            Err(PrepareError::Uncompiled) => {
                Err((parsed, ApiError::from(OutputPlanError::Uncompiled)))
            }
        }
    }

    /// Responds to a request whose model is there.
    async fn answer(
        &self,
        caller: Caller,
        parsed: ParsedRequest,
        entered: Entered,
        mut prepared: PreparedRequest,
        admitted: Admitted,
    ) -> Result<Response, ApiError> {
        let headers = headers(prepared.seed, &prepared.ignored, &prepared.notes);
        let (stream, choices) = (parsed.stream, prepared.sequences.len());
        if let Some(body) = prepared.without_prompt.take() {
            self.count(&caller.id, &entered, &prepared);
            return Ok((headers, json_body(body)).into_response());
        }
        if let Some(error) = prepared.refusal.take() {
            self.count(&caller.id, &entered, &prepared);
            self.front.refused(error.code.unwrap_or_default());
            caller.record.streamed(Some(&error));
            let identity = identity(&caller, &entered.name, &prepared);
            let writer = self.writer(&caller, parsed.writer_options, identity);
            return Ok((headers, stream::refuse(writer, &error)).into_response());
        }
        let begun = self.submit(&caller, parsed.writer_options, entered, prepared, admitted);
        let (generation, writer) = begun.map_err(|(error, _)| error)?;
        let response = if stream {
            self.stream(generation, writer).await?
        } else {
            self.whole(generation, writer, choices).await?
        };
        Ok((headers, response).into_response())
    }

    /// Submits a request; an error leaves the writer that tells it.
    fn submit(
        &self,
        caller: &Caller,
        writer_options: WriterOptions,
        entered: Entered,
        prepared: PreparedRequest,
        admitted: Admitted,
    ) -> Result<Submitted, (ApiError, Box<dyn Writer>)> {
        let Admitted { mut permit, key } = admitted;
        let identity = identity(caller, &entered.name, &prepared);
        let writer = self.writer(caller, writer_options, identity);
        let Entered { served, mut share, .. } = entered;
        let more = u32::try_from(prepared.sequences.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let mut grow = || {
            if more > 0 {
                if !permit.grow(more) {
                    return Err(self.busy());
                }
                share.grow(more)?;
            }
            Ok(())
        };
        if let Err(error) = grow() {
            return Err((error, writer));
        }
        if let Some(key) = &key {
            key.spend(prepared.prompt_tokens);
        }
        caller.record.submitted(served.name(), prepared.prompt_tokens);
        self.note(&served.metrics, &caller.id, &prepared.notes);
        served.metrics.ignored(prepared.ignored.len());
        let context = GenerationContext {
            engine: &served.engine,
            vocabulary: served.model.vocabulary(),
            metrics: &served.metrics,
            closing: served.closing.subscribe(),
            event_timeout: self.limits.event_timeout,
            request_timeout: self.limits.request_timeout,
        };
        let record = Arc::clone(&caller.record);
        let slot = RequestSlot { permit, share, key, record };
        let mut sequences = prepared.sequences;
        for sequence in &mut sequences {
            sequence.request.tenant = caller.tenant;
        }
        match Generation::submit(context, sequences, slot) {
            Ok(generation) => Ok((generation, writer)),
            Err(error) => Err((error, writer)),
        }
    }

    fn count(&self, id: &str, entered: &Entered, prepared: &PreparedRequest) {
        entered.served.metrics.ignored(prepared.ignored.len());
        self.note(&entered.served.metrics, id, &prepared.notes);
    }

    fn writer(
        &self,
        caller: &Caller,
        mut options: WriterOptions,
        identity: Identity,
    ) -> Box<dyn Writer> {
        options.store_in(&self.store, caller.owner());
        options.writer(identity)
    }

    /// Streams the answer of a model that has to be loaded first. The stream begins before it is:
    /// what is wrong with the request for this model is told within.
    async fn stream_later(
        self: Arc<Self>,
        caller: Caller,
        parsed: ParsedRequest,
        waiting: Waiting,
        admitted: Admitted,
    ) -> Result<Response, ApiError> {
        let ServerLimits { keep_alive, write_timeout, .. } = self.limits;
        let mut entering = Box::pin({
            let app = Arc::clone(&self);
            async move { app.enter(waiting).await }
        });
        // An error that comes soon still has an HTTP status.
        if let Ok(entered) = timeout(keep_alive, &mut entering).await {
            let prepared =
                self.prepare(caller.tenant, admitted.key.as_ref(), parsed, entered?).await;
            let (parsed, entered, prepared) = prepared.map_err(|(_, error)| error)?;
            return self.answer(caller, *parsed, entered, *prepared, admitted).await;
        }
        caller.record.streams();
        let options = StreamOptions { keep_alive, write_timeout };
        let form = parsed.writer_options.stream_form();
        let writers = self.writers();
        let begin = async move {
            let entered = match entering.await {
                Ok(entered) => entered,
                Err(error) => return Err(self.told(&caller, parsed, error)),
            };
            match self.prepare(caller.tenant, admitted.key.as_ref(), parsed, entered).await {
                Ok((parsed, entered, mut prepared)) => match prepared.refusal.take() {
                    Some(error) => Err(self.told(&caller, *parsed, error)),
                    None => {
                        self.submit(&caller, parsed.writer_options, entered, *prepared, admitted)
                    }
                },
                Err((parsed, error)) => Err(self.told(&caller, *parsed, error)),
            }
        };
        Ok(stream::respond_later(begin, form, options, &writers))
    }

    /// An error and the writer that tells it.
    fn told(
        &self,
        caller: &Caller,
        parsed: ParsedRequest,
        error: ApiError,
    ) -> (ApiError, Box<dyn Writer>) {
        self.front.refused(error.code.unwrap_or("error"));
        caller.record.streamed(Some(&error));
        let identity = Identity {
            id: caller.id.clone(),
            created: unix_seconds(),
            model: parsed.model.clone().unwrap_or_default(),
            prompt_tokens: 0,
            choices: 1,
        };
        let writer = self.writer(caller, parsed.writer_options, identity);
        (error, writer)
    }

    /// Loads or unloads a model for a client that has no prompt. What others use is unloaded only
    /// for keys of the scope `admin`, and so is loaded what no request loads.
    async fn reside(
        &self,
        caller: &Caller,
        parsed: Box<ParsedRequest>,
    ) -> Result<Response, ApiError> {
        let asked = self.permitted(caller.key.as_deref(), parsed.model.as_deref())?;
        let name = self.models.known_name(asked.as_deref())?;
        let is_load = parsed.prompt == Prompt::Load;
        if let Some(key) = &caller.key
            && !(is_load && self.models.loads_on_demand())
        {
            key.demand(Scope::Admin)?;
        }
        let stops = self.draining.subscribe();
        if is_load {
            if let Some(keep_alive) = parsed.writer_options.stay() {
                self.models.keep_alive(&name, keep_alive);
            }
            self.models.load(&name, stops).await?;
        } else {
            self.models.unload(&name, stops).await?;
        }
        let body = parsed.writer_options.without_prompt(&parsed.prompt, &name);
        Ok(json_body(body.unwrap_or_default()))
    }
}

impl Entered {
    fn prepare(
        &self,
        parsed: &ParsedRequest,
        budget: Option<&CompileBudget>,
    ) -> Result<PreparedRequest, PrepareError> {
        self.served.prepare(parsed, &self.name, budget)
    }
}

impl ServedModel {
    /// Renders and tokenizes a request, by the name under which the client knows this model. Without a
    /// budget only grammars are used that were compiled before.
    fn prepare(
        &self,
        parsed: &ParsedRequest,
        name: &str,
        budget: Option<&CompileBudget>,
    ) -> Result<PreparedRequest, PrepareError> {
        if self.model.embedding().is_some() {
            let message = "this model makes embeddings and generates no text: use /v1/embeddings,                            or serve a chat model";
            return Err(ApiError::param("model", message).with_code("unsupported_value").into());
        }
        let (prompts, adjusted, refusal) = match self.prompts(parsed) {
            Ok((prompts, adjusted)) => (prompts, adjusted, None),
            Err(error) if parsed.stream && parsed.writer_options.tells_in_stream(&error) => {
                (Vec::new(), Vec::new(), Some(error))
            }
            Err(error) => return Err(error.into()),
        };
        let mut notes = Notes { adjusted, unenforced: Vec::new() };
        let seed = match parsed.request.sampling.seed {
            Some(seed) => seed,
            None => random_u64()?,
        };
        let prompt_tokens = prompts.iter().map(Vec::len).sum::<usize>();
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let choices = parsed.request.sampling.choices.unwrap_or(1);
        let answers = prompts.len().saturating_mul(choices as usize);
        if answers > self.limits.active_requests as usize {
            let most = self.limits.active_requests;
            let message = format!("n: {answers} answers in one request: at most {most}");
            return Err(ApiError::param("n", message).into());
        }
        let ParsedRequest { request, writer_options, prompt: asked, .. } = parsed;
        let mut ignored = parsed.ignored.clone();
        if *asked == Prompt::Conversation {
            let unheard = self.model.unheard_reasoning(&request.reasoning);
            let names = unheard.into_iter().map(|option| writer_options.reasoning_param(option));
            ignored.extend(names.map(str::to_owned));
        }
        let without_prompt = writer_options.without_prompt(asked, name);
        let is_raw = *asked != Prompt::Conversation;
        let mut sequences = Vec::with_capacity(answers);
        for prompt in prompts {
            let echo = writer_options.echoes().then(|| self.text(&prompt));
            let scored = request.sampling.logprobs.filter(|_| echo.is_some());
            let prompt_output = scored.map_or(PromptOutput::Nothing, PromptOutput::Logprobs);
            for choice in 0..choices {
                // Each choice has its own seed; the first has the request's.
                let seed = seed.wrapping_add(u64::from(choice).wrapping_mul(SEED_STEP));
                let (mut sequence, unenforced) =
                    self.sequence(request, prompt.clone(), seed, is_raw, budget)?;
                notes.unenforced = unenforced;
                sequence.request.prompt_output = prompt_output;
                sequences.push(Sequence { echo: echo.clone(), ..sequence });
            }
        }
        Ok(PreparedRequest {
            sequences,
            seed,
            prompt_tokens,
            ignored,
            notes,
            refusal,
            without_prompt,
        })
    }

    /// The tokenized prompts of a request, and what was changed in its conversation.
    pub(super) fn prompts(&self, parsed: &ParsedRequest) -> Result<Prompts, ApiError> {
        match &parsed.prompt {
            Prompt::Conversation => {
                let prompt = self.model.prompt(&parsed.request);
                let (prompt, adjusted) =
                    prompt.map_err(|error| prompt_error(&error, &parsed.writer_options))?;
                Ok((vec![prompt], adjusted))
            }
            Prompt::Load | Prompt::Unload => Ok((Vec::new(), Vec::new())),
            Prompt::Raw(prompts) => prompts
                .iter()
                .map(|prompt| match prompt {
                    RawPrompt::Text(text) => self.model.encode_text_prompt(text),
                    RawPrompt::Tokens(tokens) => self.model.check_prompt(tokens.clone()),
                })
                .map(|prompt| prompt.map_err(|error| prompt_error(&error, &parsed.writer_options)))
                .collect::<Result<_, _>>()
                .map(|prompts| (prompts, Vec::new())),
        }
    }

    fn sequence(
        &self,
        request: &ChatRequest,
        prompt: Vec<TokenId>,
        seed: u64,
        is_raw: bool,
        budget: Option<&CompileBudget>,
    ) -> Result<(Sequence, Vec<String>), PrepareError> {
        let max_tokens = max_tokens(&prompt, request.limits.max_tokens, &self.model);
        let mut stop_tokens = request.limits.stop_tokens.clone();
        if !request.limits.ignore_stop_tokens {
            stop_tokens.extend(self.model.stop_tokens());
        }
        let sampling = self.sampling(&request.sampling, seed);
        let output = output::plan(&self.model, request, &prompt, &stop_tokens, is_raw, budget)?;
        let parser = output.parser(random_u64()?);
        let stop = request.limits.stop.clone();
        let prediction = match &request.prediction {
            Some(text) => self.model.encode(text).map_err(|error| {
                made_none(&error, PREDICTION).unwrap_or_else(refused_prediction)
            })?,
            None => Vec::new(),
        };
        let request = GenerateRequest {
            tenant: Tenant::NOBODY,
            prompt,
            generated: Vec::new(),
            max_tokens,
            min_tokens: request.limits.min_tokens.min(max_tokens),
            stop_tokens,
            sampling,
            logprobs: request.sampling.logprobs,
            prompt_output: PromptOutput::Nothing,
            constraint: output.constraint,
            prediction,
            timeout_ms: self.timeout_ms(),
        };
        Ok((Sequence { request, parser, stop, echo: None }, output.unenforced))
    }

    /// What the request says of sampling, else the model's defaults. A greedy request needs none.
    fn sampling(&self, asked: &SamplingRequest, seed: u64) -> Sampling {
        let defaults = self.model.default_sampling();
        let temperature = asked.temperature.unwrap_or(defaults.temperature);
        let off = DefaultSampling::OFF;
        let defaults = if temperature > 0.0 { defaults } else { &off };
        Sampling {
            temperature,
            top_k: asked.top_k.unwrap_or(defaults.top_k),
            top_p: asked.top_p.unwrap_or(defaults.top_p),
            min_p: asked.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: asked.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: asked.presence_penalty.unwrap_or(0.0),
            frequency_penalty: asked.frequency_penalty.unwrap_or(0.0),
            logit_bias: asked.logit_bias.clone(),
            seed,
        }
    }

    /// Tokens as text.
    pub(super) fn text(&self, tokens: &[TokenId]) -> String {
        let mut detokenizer = Detokenizer::new(self.model.vocabulary().clone());
        let mut text: String = tokens.iter().map(|&token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        text
    }
}

impl AppState {
    /// Responds with a stream. Waits a little for the first update, since an error before it can
    /// still have an HTTP status.
    async fn stream(
        &self,
        mut generation: Generation,
        writer: Box<dyn Writer>,
    ) -> Result<Response, ApiError> {
        let ServerLimits { keep_alive, write_timeout, .. } = self.limits;
        let first = timeout(keep_alive, generation.next()).await.ok().transpose()?.flatten();
        let options = StreamOptions { keep_alive, write_timeout };
        generation.record().streams();
        Ok(stream::respond(generation, first, writer, options, &self.writers()))
    }

    /// Responds without streaming.
    async fn whole(
        &self,
        generation: Generation,
        writer: Box<dyn Writer>,
        choices: usize,
    ) -> Result<Response, ApiError> {
        // Dropped with the request when its client leaves, and the generation with it.
        let mut task = JoinSet::new();
        task.spawn_on(collect(generation, writer, choices), &self.writers());
        let body = task.join_next().await.and_then(Result::ok).ok_or_else(failed)??;
        Ok(json_body(body))
    }

    fn writers(&self) -> Handle {
        self.writers.clone().unwrap_or_else(Handle::current)
    }
}

fn identity(caller: &Caller, name: &str, prepared: &PreparedRequest) -> Identity {
    Identity {
        id: caller.id.clone(),
        created: unix_seconds(),
        model: name.to_owned(),
        prompt_tokens: prepared.prompt_tokens,
        choices: u32::try_from(prepared.sequences.len()).unwrap_or(u32::MAX),
    }
}

fn json_body(body: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], body).into_response()
}

/// The parameter of a predicted output.
const PREDICTION: &str = "prediction.content";

fn refused_prediction() -> ApiError {
    ApiError::param(PREDICTION, "prediction.content: the model's tokenizer cannot encode it")
}

pub(super) fn failed() -> ApiError {
    let message = "internal server error: a bug in the server, not in the request";
    ApiError::new(ErrorKind::Internal, message)
}

/// Distance between the seeds of a request's choices: odd, with well-mixed bits.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

async fn collect(
    mut generation: Generation,
    mut writer: Box<dyn Writer>,
    choices: usize,
) -> Result<String, ApiError> {
    let mut answers = vec![Answer::default(); choices];
    while let Some(update) = generation.next().await? {
        Answer::collect(&mut answers, update);
    }
    match writer.refused(&answers) {
        Some(error) => Err(error),
        None => Ok(writer.whole(answers)),
    }
}

/// `max_tokens` of the request, at most what the context length leaves after the prompt.
fn max_tokens(prompt: &[TokenId], asked: Option<u32>, model: &ChatModel) -> u32 {
    let used = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = model.max_positions().saturating_sub(used);
    asked.unwrap_or(room).min(room)
}

/// The error for a prompt; clients recognise a prompt that is too long by their dialect's words.
pub(super) fn prompt_error(error: &PromptError, writer_options: &WriterOptions) -> ApiError {
    if let Some(api) = made_none(error, writer_options.prompt_param()) {
        return api;
    }
    let api = ApiError::param(writer_options.prompt_param(), error.to_string());
    match error {
        PromptError::TooLong { max_positions, prompt_tokens } => {
            let message = match writer_options {
                WriterOptions::Messages(_) => {
                    format!("prompt is too long: {prompt_tokens} tokens > {max_positions} maximum")
                }
                _ => api.message,
            };
            let api = ApiError::param(writer_options.prompt_param(), message);
            api.with_code(CONTEXT_LENGTH_EXCEEDED)
        }
        PromptError::Made(PromptSideError::Failed(PromptFailure::NoTemplate)) => {
            api.with_code("no_chat_template")
        }
        _ => api,
    }
}

/// The error for a prompt that template and tokenizer did not make, because they ended or took more
/// than they may. What is wrong may be the package: other requests of the model tell.
pub(super) fn made_none(error: &PromptError, param: &str) -> Option<ApiError> {
    let PromptError::Made(PromptSideError::Sandbox(error)) = error else { return None };
    let message = match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    let code = if error.is_expense() { "prompt_too_expensive" } else { "template_failed" };
    let api = match error.retry_after() {
        Some(wait) => ApiError {
            retry_after_ms: u64::try_from(wait.as_millis()).ok(),
            ..ApiError::new(ErrorKind::Unavailable, message)
        },
        None => ApiError::param(param, message),
    };
    Some(api.with_code(code))
}
