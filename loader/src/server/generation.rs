//! One answer in the making: the engine's tokens become pieces of text, up to the end or the first
//! stop text. Dropping it cancels the request.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, watch},
    time::{Instant, timeout_at},
};

use super::{
    error::{ApiError, ErrorKind},
    text::{Detokenizer, Matched, StopMatcher, Vocabulary},
};
use crate::engine::{EngineHandle, Event, FinishReason, GenerateRequest, RequestId};

/// A part of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Text that follows what came before; not empty.
    Text(String),
    /// The end; nothing follows.
    End(EndReason, AnswerUsage),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndReason {
    /// A stop token or a stop text.
    Stop,
    /// The most tokens asked for or possible.
    Length,
}

/// Tokens of one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AnswerUsage {
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: u32,
}

/// What every answer of a server shares.
pub(super) struct GenerationContext<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) vocabulary: &'a Arc<Vocabulary>,
    /// Turns true when running answers must end.
    pub(super) closing: watch::Receiver<bool>,
    /// Longest silence of the engine.
    pub(super) event_timeout: Duration,
}

/// A submitted request.
pub(super) struct Generation {
    engine: EngineHandle,
    id: RequestId,
    events: mpsc::UnboundedReceiver<Event>,
    closing: watch::Receiver<bool>,
    event_timeout: Duration,
    /// When the engine's silence becomes an error.
    deadline: Instant,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    usage: AnswerUsage,
    end: Option<EndReason>,
    /// Whether the engine knows no more of the request.
    is_over: bool,
    /// Its place among the running requests.
    _slot: OwnedSemaphorePermit,
}

impl Generation {
    /// Submits a request whose answer ends before the first of `stop`.
    pub(super) fn submit(
        context: GenerationContext<'_>,
        request: GenerateRequest,
        stop: Vec<String>,
        slot: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        // Unbounded, since the engine must never wait for a client; an answer's length bounds it.
        let (sender, events) = mpsc::unbounded_channel();
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let sink = Box::new(move |event| {
            // A client that has left takes no more events; its request is being cancelled.
            let _ = sender.send(event);
        });
        let submitted = context.engine.submit(request, sink);
        let id = submitted.map_err(|error| stopped(&error.to_string()))?;
        Ok(Self {
            engine: context.engine.clone(),
            id,
            events,
            closing: context.closing,
            event_timeout: context.event_timeout,
            deadline: Instant::now() + context.event_timeout,
            detokenizer: Detokenizer::new(context.vocabulary.clone()),
            stops: StopMatcher::new(stop),
            usage: AnswerUsage { prompt_tokens, completion_tokens: 0 },
            end: None,
            is_over: false,
            _slot: slot,
        })
    }

    /// The next piece. Nothing is lost when the future is dropped before it is ready.
    pub(super) async fn next(&mut self) -> Result<Piece, ApiError> {
        loop {
            if let Some(reason) = self.end {
                return Ok(Piece::End(reason, self.usage));
            }
            let text = match self.event().await? {
                Event::Token { token, .. } => {
                    self.usage.completion_tokens += 1;
                    let text = self.detokenizer.push(token);
                    self.take_until_stop(&text)
                }
                Event::Finished { reason, .. } => self.finish(reason)?,
                Event::Failed { message, retryable, .. } => {
                    self.is_over = true;
                    return Err(failed(message, retryable));
                }
            };
            if !text.is_empty() {
                return Ok(Piece::Text(text));
            }
        }
    }

    async fn event(&mut self) -> Result<Event, ApiError> {
        let closing = async {
            if self.closing.wait_for(|closing| *closing).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let event = tokio::select! {
            biased;
            () = closing => return Err(draining()),
            event = timeout_at(self.deadline, self.events.recv()) => event,
        };
        let seconds = self.event_timeout.as_secs();
        let event = event.map_err(|_| {
            let message = format!("the engine gave no answer for {seconds} seconds");
            ApiError::new(ErrorKind::Timeout, message).with_code("engine_timeout")
        })?;
        self.deadline = Instant::now() + self.event_timeout;
        event.ok_or_else(|| {
            self.is_over = true;
            stopped("the engine has stopped")
        })
    }

    fn finish(&mut self, reason: FinishReason) -> Result<String, ApiError> {
        self.is_over = true;
        let reason = match reason {
            FinishReason::Stop => EndReason::Stop,
            FinishReason::Length => EndReason::Length,
            FinishReason::Deadline => {
                let message = "the answer took longer than its time limit";
                return Err(ApiError::new(ErrorKind::Timeout, message).with_code("deadline"));
            }
            FinishReason::Cancelled => return Err(stopped("the engine has ended the request")),
        };
        let rest = self.detokenizer.finish();
        let mut text = self.take_until_stop(&rest);
        if self.end.is_none() {
            text.push_str(&self.stops.finish());
            self.end = Some(reason);
        }
        Ok(text)
    }

    fn take_until_stop(&mut self, text: &str) -> String {
        match self.stops.push(text) {
            Matched::Text(text) => text,
            Matched::Stop(text) => {
                self.end = Some(EndReason::Stop);
                self.cancel();
                text
            }
        }
    }

    fn cancel(&mut self) {
        if !self.is_over {
            self.is_over = true;
            self.engine.cancel(self.id);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The engine's own account of a failure. One that would come again is the request's.
fn failed(message: String, retryable: bool) -> ApiError {
    let kind = if retryable { ErrorKind::Unavailable } else { ErrorKind::Invalid };
    ApiError::new(kind, message).with_code("generation_failed")
}

fn stopped(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message).with_code("engine_stopped")
}

/// New requests while draining and running ones at its end are told the same.
pub(super) fn draining() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "the server is shutting down").with_code("draining")
}
