//! One request: who asked for what, what it took so far, and how it ended.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use serde_json::{Map, Value};
use shardpack_chat::conversation::EndReason;

use super::{Ledger, Sums};
use crate::error::ApiError;

/// What is known of a request when it comes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opened {
    pub(crate) id: String,
    pub(crate) key: Option<String>,
    pub(crate) remote: Option<String>,
    pub(crate) route: Option<&'static str>,
    /// Of the API, where the route is one that computes; only such requests are counted.
    pub(crate) dialect: Option<String>,
}

/// A request.
pub(crate) struct Record {
    ledger: Arc<Ledger>,
    opened: Opened,
    begun: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    model: Option<String>,
    body_bytes: u64,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    finish: Option<&'static str>,
    submitted: Option<Instant>,
    /// What was counted already.
    posted: Sums,
    /// Whether what makes the response tells its end.
    streams: bool,
    is_finished: bool,
}

impl State {
    fn sums(&self) -> Sums {
        let ms = self.submitted.map_or(0, |at| at.elapsed().as_millis() as u64);
        Sums {
            requests: u64::from(self.submitted.is_some()),
            refused: 0,
            prompt_tokens: self.prompt_tokens.into(),
            // The choices of one conversation share its prompt.
            cached_tokens: self.cached_tokens.min(self.prompt_tokens).into(),
            completion_tokens: self.completion_tokens.into(),
            generation_ms: ms,
            energy_mj: 0,
        }
    }
}

impl Record {
    pub(crate) fn open(ledger: &Arc<Ledger>, opened: Opened) -> Arc<Self> {
        let (ledger, state) = (Arc::clone(ledger), Mutex::default());
        Arc::new(Self { ledger, opened, begun: Instant::now(), state })
    }

    /// Of a request that is neither counted nor told to the audit log.
    pub(crate) fn unkept(ledger: &Arc<Ledger>) -> Arc<Self> {
        let record = Self::open(ledger, Opened::default());
        record.state().is_finished = true;
        record
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body has come.
    pub(crate) fn body(&self, bytes: usize) {
        self.state().body_bytes = bytes as u64;
    }

    /// The engine is about to get the request.
    pub(crate) fn submitted(self: &Arc<Self>, model: &str, prompt_tokens: u32) {
        let mut state = self.state();
        state.model = Some(model.to_owned());
        state.prompt_tokens = state.prompt_tokens.saturating_add(prompt_tokens);
        state.submitted.get_or_insert_with(Instant::now);
        drop(state);
        self.ledger.watch(self);
    }

    /// Tokens of answers have come.
    pub(crate) fn completed(&self, tokens: u32) {
        self.state().completion_tokens += tokens;
    }

    /// An answer's cached tokens are known.
    pub(crate) fn cached(&self, tokens: u32) {
        let mut state = self.state();
        state.cached_tokens = state.cached_tokens.saturating_add(tokens);
    }

    /// An answer has ended.
    pub(crate) fn ended(&self, reason: EndReason) {
        self.state().finish = Some(match reason {
            EndReason::Stop | EndReason::StopText(_) => "stop",
            EndReason::Length => "length",
            EndReason::ToolCalls => "tool_calls",
        });
    }

    /// Its end is told by what streams the response.
    pub(crate) fn streams(&self) {
        self.state().streams = true;
    }

    /// The response is complete, unless it streams.
    pub(crate) fn responded(&self, status: u16, code: Option<&str>) {
        if !self.state().streams || status != 200 {
            self.finish(Some(status), code);
        }
    }

    /// The stream is complete.
    pub(crate) fn streamed(&self, error: Option<&ApiError>) {
        self.finish(Some(200), error.map(|error| error.code.unwrap_or("error")));
    }

    /// Counts what it took since this was called last.
    pub(super) fn post(&self) {
        if self.opened.dialect.is_none() {
            return;
        }
        let mut state = self.state();
        if state.is_finished {
            return;
        }
        let sums = state.sums();
        self.post_sums(&mut state, sums);
    }

    fn post_sums(&self, state: &mut State, sums: Sums) {
        let more = sums.with(state.posted, u64::saturating_sub);
        if more == Sums::default() {
            return;
        }
        state.posted = sums;
        self.ledger.add(self.opened.key.as_deref(), state.model.as_deref(), more);
    }

    fn finish(&self, status: Option<u16>, code: Option<&str>) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_finished, true) {
            return;
        }
        if self.opened.dialect.is_some() {
            let mut sums = state.sums();
            let is_refused = state.submitted.is_none() && status.is_none_or(|status| status >= 400);
            (sums.requests, sums.refused) = (u64::from(!is_refused), u64::from(is_refused));
            self.post_sums(&mut state, sums);
        }
        self.ledger.audit(|| self.line(&state, status, code));
    }

    fn line(&self, state: &State, status: Option<u16>, code: Option<&str>) -> Map<String, Value> {
        let Opened { id, key, remote, route, dialect } = &self.opened;
        let fields = [
            ("request", id.as_str().into()),
            ("key", key.as_deref().into()),
            ("remote", remote.as_deref().into()),
            ("route", (*route).into()),
            ("dialect", dialect.as_deref().into()),
            ("model", state.model.as_deref().into()),
            ("body_bytes", state.body_bytes.into()),
            ("prompt_tokens", state.prompt_tokens.into()),
            ("cached_tokens", state.cached_tokens.min(state.prompt_tokens).into()),
            ("completion_tokens", state.completion_tokens.into()),
            ("status", status.into()),
            ("finish", state.finish.into()),
            ("code", code.into()),
            ("ms", (self.begun.elapsed().as_millis() as u64).into()),
        ];
        fields.into_iter().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // Nobody waits for it any more.
        self.finish(None, Some("client_left"));
    }
}
