//! Running generations: the engine's tokens become output deltas (text, reasoning, tool calls), up
//! to the end or the first stop text. Dropping a generation cancels its requests.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use shardpack_chat::{
    conversation::{EndReason, OutputDelta, OutputParser},
    text::{Matched, StopMatcher, TokenBytes, Vocabulary},
};
use shardpack_engine_api::{
    EngineHandle, Event, FinishReason, GenerateRequest, PromptOutput, RequestId, TokenId,
    TokenLogprobs, Usage,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, error::Elapsed, timeout_at},
};

use super::{
    closing::Closing,
    error::{ApiError, ErrorKind},
    fair::SlotPermit,
    keys::KeySlot,
    ledger::Record,
    metrics::{AnswerClock, Metrics},
    registry::Share,
    usage::AnswerUsage,
};

/// An update of one choice of a response.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ChoiceUpdate {
    /// Index of the choice, from 0.
    pub(super) choice: u32,
    pub(super) kind: UpdateKind,
    /// Log probabilities of the tokens since this choice's last update, if requested.
    pub(super) logprobs: Vec<TokenLogprob>,
}

/// What an update holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum UpdateKind {
    /// The next piece of output.
    Delta(OutputDelta),
    /// The end; nothing follows.
    End(EndReason, AnswerUsage),
}

/// A token and its log probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TokenLogprob {
    pub(super) token: TokenId,
    pub(super) bytes: Vec<u8>,
    /// Absent for the first token of a prompt, which nothing predicts.
    pub(super) logprob: Option<f32>,
    /// The most likely tokens, most likely first.
    pub(super) top: Vec<TopToken>,
}

/// One of the most likely tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TopToken {
    pub(super) bytes: Vec<u8>,
    pub(super) logprob: f32,
}

/// What all generations of a model share.
pub(super) struct GenerationContext<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) vocabulary: &'a Arc<Vocabulary>,
    pub(super) metrics: &'a Arc<Metrics>,
    /// Says when running generations must end.
    pub(super) closing: watch::Receiver<Closing>,
    /// Longest time without an event from the engine.
    pub(super) event_timeout: Duration,
    /// Longest duration of a request.
    pub(super) request_timeout: Duration,
}

/// One sequence to generate, and the parser of its output.
pub(super) struct Sequence {
    pub(super) request: GenerateRequest,
    pub(super) parser: Box<dyn OutputParser>,
    /// Texts before which the answer ends.
    pub(super) stop: Vec<String>,
    /// The prompt's text, if the client wants it echoed.
    pub(super) echo: Option<String>,
}

/// A request's share of the concurrency limits, held until it ends.
pub(super) struct RequestSlot {
    /// Slots of the server's own limit.
    #[expect(dead_code, reason = "held, not read")]
    pub(super) permit: SlotPermit,
    /// The model's share of them; it is not unloaded as long as this is held.
    #[expect(dead_code, reason = "held, not read")]
    pub(super) share: Share,
    /// Slot of the request's API key.
    pub(super) key: Option<KeySlot>,
    /// What the request takes.
    pub(super) record: Arc<Record>,
}

impl RequestSlot {
    /// Notes what the engine says at a request's end.
    fn ended(&self, usage: &Usage) {
        self.record.cached(usage.cached_tokens);
        if let Some(key) = &self.key {
            key.spend_grammar(Duration::from_micros(usage.grammar_us));
        }
    }

    /// A token of an answer has come.
    fn token(&self) {
        self.record.completed(1);
        if let Some(key) = &self.key {
            key.spend(1);
        }
    }
}

/// Submitted requests.
pub(super) struct Generation {
    engine: EngineHandle,
    vocabulary: Arc<Vocabulary>,
    choices: Vec<Choice>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    ready: VecDeque<ChoiceUpdate>,
    closing: watch::Receiver<Closing>,
    event_timeout: Duration,
    /// When to time out without an event from the engine.
    silence: Instant,
    /// When the whole request has taken too long.
    deadline: Instant,
    slot: RequestSlot,
}

struct Choice {
    id: RequestId,
    bytes: TokenBytes,
    parser: Box<dyn OutputParser>,
    stops: StopMatcher,
    clock: AnswerClock,
    usage: AnswerUsage,
    logprobs: Vec<TokenLogprob>,
    echo: Option<String>,
    /// The prompt, if its log probabilities are echoed.
    prompt: Vec<TokenId>,
    is_thinking: bool,
    open_calls: u32,
    complete_calls: u32,
    /// Whether the end of this choice was handed out.
    is_done: bool,
    /// Whether the engine has finished the request.
    is_over: bool,
}

impl Generation {
    /// Submits requests; each answer ends before the first of its stop texts.
    pub(super) fn submit(
        context: GenerationContext<'_>,
        sequences: Vec<Sequence>,
        slot: RequestSlot,
    ) -> Result<Self, ApiError> {
        // Unbounded, since the engine must never wait for a client; an answer's length bounds it.
        let (sender, events) = mpsc::unbounded_channel();
        let now = Instant::now();
        let mut generation = Self {
            engine: context.engine.clone(),
            vocabulary: context.vocabulary.clone(),
            choices: Vec::with_capacity(sequences.len()),
            events,
            ready: VecDeque::new(),
            closing: context.closing,
            event_timeout: context.event_timeout,
            silence: now + context.event_timeout,
            deadline: now + context.request_timeout,
            slot,
        };
        for (index, Sequence { request, parser, stop, echo }) in sequences.into_iter().enumerate() {
            let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
            let is_scored = matches!(request.prompt_output, PromptOutput::Logprobs(_));
            let prompt = if is_scored { request.prompt.clone() } else { Vec::new() };
            let first = prompt.first().map(|token| unpredicted(context.vocabulary, *token));
            let sender = sender.clone();
            let sink = Box::new(move |event| {
                // A client that has left takes no more events; its request is being cancelled.
                let _ = sender.send((index, event));
            });
            let submitted = generation.engine.submit(request, sink);
            let id = submitted.map_err(|error| stopped(&error.to_string()))?;
            generation.choices.push(Choice {
                id,
                bytes: TokenBytes::new(context.vocabulary.clone()),
                parser,
                stops: StopMatcher::new(stop),
                clock: AnswerClock::start(context.metrics.clone()),
                usage: AnswerUsage { prompt_tokens, ..AnswerUsage::default() },
                logprobs: first.into_iter().collect(),
                echo,
                prompt,
                is_thinking: false,
                open_calls: 0,
                complete_calls: 0,
                is_done: false,
                is_over: false,
            });
        }
        Ok(generation)
    }

    /// The next update, or nothing when every choice has ended. Cancel safe: dropping the future
    /// loses nothing.
    pub(super) async fn next(&mut self) -> Result<Option<ChoiceUpdate>, ApiError> {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return Ok(Some(update));
            }
            if self.is_done() {
                return Ok(None);
            }
            let (index, event) = self.event().await?;
            self.take(index, event)?;
        }
    }

    /// What the request takes.
    pub(super) fn record(&self) -> &Arc<Record> {
        &self.slot.record
    }

    /// Whether every choice has ended and was handed out.
    pub(super) fn is_done(&self) -> bool {
        self.ready.is_empty() && self.choices.iter().all(|choice| choice.is_done)
    }

    /// The next update if there is one already; does not wait.
    pub(super) fn next_ready(&mut self) -> Result<Option<ChoiceUpdate>, ApiError> {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return Ok(Some(update));
            }
            let Ok((index, event)) = self.events.try_recv() else { return Ok(None) };
            self.take(index, event)?;
        }
    }

    fn take(&mut self, index: usize, event: Event) -> Result<(), ApiError> {
        let choice = &mut self.choices[index];
        if choice.is_done {
            return Ok(());
        }
        if let Event::PromptLogprobs { first, logprobs, .. } = event {
            let tokens = choice.prompt.get(first as usize..).unwrap_or_default();
            let entry = |(token, found): (&TokenId, &TokenLogprobs)| {
                token_logprob(&self.vocabulary, *token, found)
            };
            choice.logprobs.extend(tokens.iter().zip(&logprobs).map(entry));
            return Ok(());
        }
        let (updates, record) = (&mut self.ready, &self.slot.record);
        let mut emit = |kind, logprobs| {
            if let UpdateKind::End(reason, _) = &kind {
                record.ended(*reason);
            }
            updates.push_back(ChoiceUpdate { choice: index as u32, kind, logprobs });
        };
        if !matches!(event, Event::Failed { .. })
            && let Some(echo) = choice.echo.take().filter(|echo| !echo.is_empty())
        {
            let logprobs = std::mem::take(&mut choice.logprobs);
            emit(UpdateKind::Delta(OutputDelta::Content(echo)), logprobs);
        }
        match event {
            Event::Token { token, logprobs, .. } => {
                choice.usage.completion_tokens += 1;
                choice.clock.token();
                self.slot.token();
                let bytes = choice.bytes.next(token);
                if let Some(logprobs) = logprobs {
                    choice.logprobs.push(token_logprob(&self.vocabulary, token, &logprobs));
                }
                let deltas = choice.parser.push(token, &bytes);
                choice.pass(deltas, &mut emit);
                if choice.is_thinking {
                    choice.usage.reasoning_tokens += 1;
                }
            }
            // Only of requests that generate nothing.
            Event::PromptLogprobs { .. } | Event::Embedding { .. } => {}
            Event::Finished { reason, usage, .. } => {
                choice.is_over = true;
                choice.usage.cached_tokens = usage.cached_tokens;
                choice.usage.prediction_tokens = usage.prediction_tokens;
                self.slot.ended(&usage);
                let reason = match reason {
                    FinishReason::Stop => EndReason::Stop,
                    FinishReason::Length => EndReason::Length,
                    FinishReason::Deadline => return Err(overdue()),
                    FinishReason::Cancelled => {
                        return Err(stopped("the engine has ended the request"));
                    }
                };
                let deltas = choice.parser.finish();
                choice.pass(deltas, &mut emit);
                choice.end(reason, &mut emit);
            }
            Event::Failed { message, retryable, .. } => {
                choice.is_over = true;
                return Err(failed(message, retryable));
            }
        }
        if choice.is_done && !choice.is_over {
            choice.is_over = true;
            self.engine.cancel(choice.id);
        }
        Ok(())
    }

    async fn event(&mut self) -> Result<(usize, Event), ApiError> {
        let until = self.silence.min(self.deadline);
        let event = next_event(&mut self.closing, &mut self.events, until).await?;
        let event = event.map_err(|_| self.timed_out())?;
        self.silence = Instant::now() + self.event_timeout;
        event.ok_or_else(|| {
            for choice in &mut self.choices {
                choice.is_over = true;
            }
            stopped("the engine has stopped")
        })
    }

    fn timed_out(&self) -> ApiError {
        if self.deadline <= self.silence {
            return overdue();
        }
        let seconds = self.event_timeout.as_secs();
        let message = format!("no event from the engine for {seconds} seconds");
        ApiError::new(ErrorKind::Timeout, message).with_code("engine_timeout")
    }
}

/// The engine's next event, `None` if it has stopped; an error once requests must end.
pub(super) async fn next_event(
    closing: &mut watch::Receiver<Closing>,
    events: &mut mpsc::UnboundedReceiver<(usize, Event)>,
    until: Instant,
) -> Result<Result<Option<(usize, Event)>, Elapsed>, ApiError> {
    let closing = async {
        let found = closing.wait_for(|closing| *closing != Closing::No).await.map(|it| *it);
        match found {
            Ok(closing) => closing,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        closing = closing => Err(closing.error()),
        event = timeout_at(until, events.recv()) => Ok(event),
    }
}

/// A request that was not done in its time.
pub(super) fn overdue() -> ApiError {
    let message = "the request has taken longer than this server allows";
    ApiError::new(ErrorKind::Timeout, message).with_code("request_timeout")
}

impl Choice {
    /// Emits deltas. Stop texts are searched for in the content alone.
    fn pass(
        &mut self,
        deltas: Vec<OutputDelta>,
        emit: &mut impl FnMut(UpdateKind, Vec<TokenLogprob>),
    ) {
        for delta in deltas {
            if self.is_done {
                return;
            }
            match &delta {
                OutputDelta::Content(text) => {
                    self.is_thinking = false;
                    match self.stops.push(text) {
                        Matched::Text(text) => self.content(text, emit),
                        Matched::Stop(text, index) => {
                            self.content(text, emit);
                            self.end(EndReason::StopText(index), emit);
                        }
                    }
                    continue;
                }
                OutputDelta::Reasoning(_) => self.is_thinking = true,
                OutputDelta::ToolCallBegin { .. } => {
                    (self.is_thinking, self.open_calls) = (false, 1);
                }
                OutputDelta::ToolCallArguments { .. } => {}
                OutputDelta::ToolCallEnd { .. } => {
                    self.open_calls = 0;
                    self.complete_calls += 1;
                }
            }
            // Text that was held back comes first.
            let held = self.stops.finish();
            self.content(held, emit);
            emit(UpdateKind::Delta(delta), std::mem::take(&mut self.logprobs));
        }
    }

    fn content(&mut self, text: String, emit: &mut impl FnMut(UpdateKind, Vec<TokenLogprob>)) {
        if !text.is_empty() {
            emit(UpdateKind::Delta(OutputDelta::Content(text)), std::mem::take(&mut self.logprobs));
        }
    }

    fn end(&mut self, reason: EndReason, emit: &mut impl FnMut(UpdateKind, Vec<TokenLogprob>)) {
        if self.is_done {
            return;
        }
        if !matches!(reason, EndReason::StopText(_)) {
            let held = self.stops.finish();
            self.content(held, emit);
        }
        self.is_done = true;
        let has_calls = self.complete_calls > 0 && self.open_calls == 0;
        let reason = match reason {
            EndReason::Stop if has_calls => EndReason::ToolCalls,
            other => other,
        };
        self.clock.finished(reason, self.usage, self.complete_calls);
        emit(UpdateKind::End(reason, self.usage), std::mem::take(&mut self.logprobs));
    }
}

impl Generation {
    /// Counts what was computed and nobody has read.
    pub(super) fn drain(&mut self) {
        while let Ok((index, event)) = self.events.try_recv() {
            let is_done = self.choices.get(index).is_none_or(|choice| choice.is_done);
            match event {
                Event::Token { .. } if !is_done => self.slot.record.completed(1),
                Event::Finished { usage, .. } if !is_done => {
                    self.slot.record.cached(usage.cached_tokens);
                }
                _ => {}
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.drain();
        for choice in self.choices.iter().filter(|choice| !choice.is_over) {
            self.engine.cancel(choice.id);
        }
    }
}

fn token_logprob(vocabulary: &Vocabulary, token: TokenId, found: &TokenLogprobs) -> TokenLogprob {
    let alternative = |&(token, logprob): &(TokenId, f32)| TopToken {
        bytes: vocabulary.token_bytes(token),
        logprob,
    };
    TokenLogprob {
        token,
        bytes: vocabulary.token_bytes(token),
        logprob: Some(found.logprob),
        top: found.top.iter().map(alternative).collect(),
    }
}

/// The first token of a prompt.
fn unpredicted(vocabulary: &Vocabulary, token: TokenId) -> TokenLogprob {
    TokenLogprob { token, bytes: vocabulary.token_bytes(token), logprob: None, top: Vec::new() }
}

/// The engine's failure of a request: a client error unless a retry may succeed.
pub(super) fn failed(message: String, retryable: bool) -> ApiError {
    let kind = if retryable { ErrorKind::Unavailable } else { ErrorKind::Invalid };
    ApiError::new(kind, message).with_code("generation_failed")
}

pub(super) fn stopped(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message).with_code("engine_stopped")
}
