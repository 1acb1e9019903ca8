//! Requests to the engine whose results are read whole, such as embeddings: a few at a time, with the
//! server's deadlines. Dropping it cancels what was submitted.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use shardpack_chat::conversation::EndReason;
use shardpack_engine_api::{
    EngineHandle, Event, FinishReason, GenerateRequest, RequestId, Tenant, TokenLogprobs,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    closing::Closing,
    error::{ApiError, ErrorKind},
    generation::{failed, next_event, overdue, stopped},
    metrics::{AnswerClock, Metrics},
    usage::AnswerUsage,
};

/// Requests of one batch that the engine has at a time: enough to fill its steps.
const SUBMITTED_MAX: usize = 32;

/// What the engine gave for one request.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// The prompt's embedding.
    pub(super) embedding: Vec<f32>,
    /// Log probabilities of the answer's tokens.
    pub(super) logprobs: Vec<TokenLogprobs>,
}

/// Runs requests.
pub(super) struct Batch<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) metrics: &'a Arc<Metrics>,
    /// Whose requests they are.
    pub(super) tenant: Tenant,
    /// Says when requests must end.
    pub(super) closing: watch::Receiver<Closing>,
    /// Longest time without an event from the engine.
    pub(super) event_timeout: Duration,
    /// Longest duration of all together.
    pub(super) request_timeout: Duration,
}

/// Requests that the engine has.
struct Submitted<'a> {
    engine: &'a EngineHandle,
    running: BTreeMap<usize, (RequestId, AnswerClock)>,
}

impl Drop for Submitted<'_> {
    fn drop(&mut self) {
        for (id, _) in self.running.values() {
            self.engine.cancel(*id);
        }
    }
}

impl Batch<'_> {
    /// The outcome of each request, in their order; the first failure ends all.
    pub(super) async fn run(
        mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Outcome>, ApiError> {
        let mut outcomes = vec![Outcome::default(); requests.len()];
        let lengths: Vec<usize> = requests.iter().map(|request| request.prompt.len()).collect();
        let (sender, mut events) = mpsc::unbounded_channel();
        let mut submitted = Submitted { engine: self.engine, running: BTreeMap::new() };
        let mut requests = requests.into_iter().enumerate();
        let deadline = Instant::now() + self.request_timeout;
        loop {
            while submitted.running.len() < SUBMITTED_MAX
                && let Some((index, request)) = requests.next()
            {
                let sender = sender.clone();
                let sink = Box::new(move |event| {
                    // Nobody listens after a failure; the request is being cancelled.
                    let _ = sender.send((index, event));
                });
                let request = GenerateRequest { tenant: self.tenant, ..request };
                let id = self.engine.submit(request, sink);
                let id = id.map_err(|error| stopped(&error.to_string()))?;
                let clock = AnswerClock::start(self.metrics.clone());
                submitted.running.insert(index, (id, clock));
            }
            if submitted.running.is_empty() {
                return Ok(outcomes);
            }
            let silence = Instant::now() + self.event_timeout;
            let (index, event) = self.next(&mut events, silence.min(deadline)).await?;
            match event {
                Event::Embedding { values, .. } => outcomes[index].embedding = values,
                Event::Token { logprobs, .. } => outcomes[index].logprobs.extend(logprobs),
                Event::PromptLogprobs { .. } => {}
                Event::Finished { reason, usage, .. } => {
                    let Some((_, mut clock)) = submitted.running.remove(&index) else { continue };
                    end(reason)?;
                    let usage = AnswerUsage {
                        prompt_tokens: u32::try_from(lengths[index]).unwrap_or(u32::MAX),
                        cached_tokens: usage.cached_tokens,
                        ..AnswerUsage::default()
                    };
                    clock.finished(EndReason::Length, usage, 0);
                }
                Event::Failed { message, retryable, .. } => {
                    submitted.running.remove(&index);
                    return Err(failed(message, retryable));
                }
            }
        }
    }

    async fn next(
        &mut self,
        events: &mut mpsc::UnboundedReceiver<(usize, Event)>,
        until: Instant,
    ) -> Result<(usize, Event), ApiError> {
        let event = next_event(&mut self.closing, events, until).await?;
        let late = |_| {
            let message = "the engine did not answer within the time that this server allows";
            ApiError::new(ErrorKind::Timeout, message).with_code("engine_timeout")
        };
        event.map_err(late)?.ok_or_else(|| stopped("the engine has stopped"))
    }
}

/// Whether a request ended by itself.
fn end(reason: FinishReason) -> Result<(), ApiError> {
    match reason {
        FinishReason::Stop | FinishReason::Length => Ok(()),
        FinishReason::Deadline => Err(overdue()),
        FinishReason::Cancelled => Err(stopped("the engine has ended the request")),
    }
}
