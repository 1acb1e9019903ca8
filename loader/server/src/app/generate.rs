//! Generation requests: read the body, parse and tokenize it, submit it to the engine, respond.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, Request, header},
    response::{IntoResponse, Response},
};
use shardpack_chat::{
    conversation::{ChatRequest, SamplingRequest},
    model::{ChatModel, DefaultSampling, PromptError},
    output,
    text::Detokenizer,
};
use shardpack_engine_api::{GenerateRequest, PromptOutput, Sampling, TokenId};
use tokio::{
    runtime::Handle,
    task::{JoinSet, spawn_blocking},
    time::timeout,
};

use super::{AppState, Notes, ServerLimits, headers, middleware::Caller, random_u64, unix_seconds};
use crate::{
    dialect::{Answer, Dialect, Identity, ParsedRequest, Prompt, RawPrompt, Writer, WriterOptions},
    error::{ApiError, CONTEXT_LENGTH_EXCEEDED, ErrorKind},
    generation::{Generation, GenerationContext, RequestSlot, Sequence},
    stream::{self, StreamOptions},
};

/// Answers one request.
pub(super) async fn generate(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    dialect: Dialect,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let body = app.read_body(request).await?;
    let key = caller.key.as_ref().map(|key| key.begin(Instant::now())).transpose()?;
    // One slot until the number of choices is known.
    let mut permit = app.slots.clone().try_acquire_owned().map_err(|_| app.busy())?;
    let owner = caller.owner().map(str::to_owned);
    let mut prepared = app.clone().prepare(dialect, body, owner).await?;
    prepared.writer_options.store_in(&app.store, caller.owner());
    let choices = prepared.sequences.len();
    let more = u32::try_from(choices.saturating_sub(1)).unwrap_or(u32::MAX);
    if more > 0 {
        let more = app.slots.clone().try_acquire_many_owned(more).map_err(|_| app.busy())?;
        permit.merge(more);
    }
    if let Some(key) = &key {
        key.spend(prepared.prompt_tokens);
    }
    app.metrics.ignored(prepared.ignored.len());
    let headers = headers(prepared.seed, &prepared.ignored, &prepared.notes);
    app.note(&caller.id, &prepared.notes);
    if let Some(body) = prepared.without_prompt {
        return Ok((headers, json_body(body)).into_response());
    }
    let identity = Identity {
        id: caller.id,
        created: unix_seconds(),
        model: prepared.model,
        prompt_tokens: prepared.prompt_tokens,
        choices: choices as u32,
    };
    let writer = prepared.writer_options.writer(identity);
    if let Some(error) = prepared.refusal {
        app.metrics.refused(error.code.unwrap_or_default());
        return Ok((headers, stream::refuse(writer, &error)).into_response());
    }
    let context = GenerationContext {
        engine: &app.engine,
        vocabulary: app.model.vocabulary(),
        metrics: &app.metrics,
        closing: app.closing.subscribe(),
        event_timeout: app.limits.event_timeout,
        request_timeout: app.limits.request_timeout,
    };
    let slot = RequestSlot { permit, key };
    let generation = Generation::submit(context, prepared.sequences, slot)?;
    let response = if prepared.stream {
        app.stream(generation, writer).await?
    } else {
        app.whole(generation, writer, choices).await?
    };
    Ok((headers, response).into_response())
}

/// Tokenized prompts, and names of what was changed in the conversation.
type Prompts = (Vec<Vec<TokenId>>, Vec<&'static str>);

/// A request that was parsed, rendered and tokenized.
struct PreparedRequest {
    sequences: Vec<Sequence>,
    /// The model's name as the client knows it.
    model: String,
    seed: u64,
    prompt_tokens: u32,
    stream: bool,
    ignored: Vec<String>,
    notes: Notes,
    writer_options: WriterOptions,
    /// Error that this dialect's clients expect inside the stream; there are no sequences then.
    refusal: Option<ApiError>,
    /// The answer to a request without a prompt; there are no sequences then.
    without_prompt: Option<String>,
}

impl AppState {
    pub(super) fn busy(&self) -> ApiError {
        let limit = self.limits.active_requests;
        let message = format!("the server is busy with {limit} requests");
        ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
    }

    /// Parses, renders and tokenizes away from the threads that serve connections.
    async fn prepare(
        self: Arc<Self>,
        dialect: Dialect,
        body: Bytes,
        owner: Option<String>,
    ) -> Result<PreparedRequest, ApiError> {
        self.blocking(move |app| app.prepare_blocking(dialect, &body, owner.as_deref())).await
    }

    /// Runs blocking work away from the threads that serve connections.
    pub(super) async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        spawn_blocking(move || work(&self)).await.unwrap_or_else(|_| Err(failed()))
    }

    fn prepare_blocking(
        &self,
        dialect: Dialect,
        body: &[u8],
        owner: Option<&str>,
    ) -> Result<PreparedRequest, ApiError> {
        let earlier = |id: &str| self.store.items(id, owner, Instant::now());
        let parsed = dialect.parse_after(body, &earlier)?;
        let model = self.known_name(parsed.model.as_deref())?.to_owned();
        if self.model.embedding().is_some() {
            let message = "this model makes embeddings and generates no text: use /v1/embeddings,                            or serve a chat model";
            return Err(ApiError::param("model", message).with_code("unsupported_value"));
        }
        let (prompts, adjusted, refusal) = match self.prompts(&parsed) {
            Ok((prompts, adjusted)) => (prompts, adjusted, None),
            Err(error) if parsed.stream && parsed.writer_options.tells_in_stream(&error) => {
                (Vec::new(), Vec::new(), Some(error))
            }
            Err(error) => return Err(error),
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
            return Err(ApiError::param("n", message));
        }
        let ParsedRequest { request, stream, mut ignored, writer_options, prompt: asked, .. } =
            parsed;
        if asked == Prompt::Conversation {
            let unheard = self.model.unheard_reasoning(&request.reasoning);
            let names = unheard.into_iter().map(|option| writer_options.reasoning_param(option));
            ignored.extend(names.map(str::to_owned));
        }
        let without_prompt = writer_options.without_prompt(&asked, &model);
        let is_raw = asked != Prompt::Conversation;
        let mut sequences = Vec::with_capacity(answers);
        for prompt in prompts {
            let echo = writer_options.echoes().then(|| self.text(&prompt));
            let scored = request.sampling.logprobs.filter(|_| echo.is_some());
            let prompt_output = scored.map_or(PromptOutput::Nothing, PromptOutput::Logprobs);
            for choice in 0..choices {
                // Each choice has its own seed; the first has the request's.
                let seed = seed.wrapping_add(u64::from(choice).wrapping_mul(SEED_STEP));
                let (mut sequence, unenforced) =
                    self.sequence(&request, prompt.clone(), seed, is_raw)?;
                notes.unenforced = unenforced;
                sequence.request.prompt_output = prompt_output;
                sequences.push(Sequence { echo: echo.clone(), ..sequence });
            }
        }
        Ok(PreparedRequest {
            sequences,
            model,
            seed,
            prompt_tokens,
            stream,
            ignored,
            notes,
            writer_options,
            refusal,
            without_prompt,
        })
    }

    /// The tokenized prompts of a request, and what was changed in its conversation.
    pub(super) fn prompts(&self, parsed: &ParsedRequest) -> Result<Prompts, ApiError> {
        let check = |prompt| self.model.check_prompt(prompt);
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
                    RawPrompt::Text(text) => self.model.encode(text).and_then(check),
                    RawPrompt::Tokens(tokens) => check(tokens.clone()),
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
    ) -> Result<(Sequence, Vec<String>), ApiError> {
        let max_tokens = max_tokens(&prompt, request.limits.max_tokens, &self.model);
        let mut stop_tokens = request.limits.stop_tokens.clone();
        if !request.limits.ignore_stop_tokens {
            stop_tokens.extend(self.model.stop_tokens());
        }
        let sampling = self.sampling(&request.sampling, seed);
        let output = output::plan(&self.model, request, &prompt, &stop_tokens, is_raw)?;
        let parser = output.parser(random_u64()?);
        let stop = request.limits.stop.clone();
        let prediction = match &request.prediction {
            Some(text) => self.model.encode(text).map_err(|_| refused_prediction())?,
            None => Vec::new(),
        };
        let request = GenerateRequest {
            prompt,
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
    fn text(&self, tokens: &[TokenId]) -> String {
        let mut detokenizer = Detokenizer::new(self.model.vocabulary().clone());
        let mut text: String = tokens.iter().map(|&token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        text
    }

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

fn json_body(body: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], body).into_response()
}

fn refused_prediction() -> ApiError {
    ApiError::param(
        "prediction.content",
        "prediction.content: the model's tokenizer cannot encode it",
    )
}

fn failed() -> ApiError {
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
    Ok(writer.whole(answers))
}

/// `max_tokens` of the request, at most what the context length leaves after the prompt.
fn max_tokens(prompt: &[TokenId], asked: Option<u32>, model: &ChatModel) -> u32 {
    let used = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = model.max_positions().saturating_sub(used);
    asked.unwrap_or(room).min(room)
}

/// The error for a prompt; clients recognise a prompt that is too long by their dialect's words.
pub(super) fn prompt_error(error: &PromptError, writer_options: &WriterOptions) -> ApiError {
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
        PromptError::NoTemplate => api.with_code("no_chat_template"),
        _ => api,
    }
}
