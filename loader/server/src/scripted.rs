//! An engine that replays answers from a file, for tests of clients, tool loops and load without a
//! capable model. The model's tokenizer and chat template are real.
//!
//! The file is JSON:
//!
//! ```json
//! {
//!   "step_ms": 0,
//!   "answers": [
//!     { "when": "weather in London", "text": "<tool_call>…</tool_call>" },
//!     { "text": "Hello.", "prefill_ms": 20 },
//!     { "tokens": [5, 7, 2], "finish": "length" },
//!     { "text": "half an ans", "fail": "rank 1 is gone", "retryable": true }
//!   ]
//! }
//! ```
//!
//! A request gets the answer whose `when` stands last in its prompt, as the template renders it
//! (so: what the last message says; of several with the same end, the longest); if there is
//! none, the next answer without `when`, in their order, from the first again after the last.
//! `text` is tokenized, markers of calls included; `tokens` are taken as they are. An answer ends
//! after its tokens with `finish` (`stop` by default, or `length`), at the request's own limits
//! and stop tokens, or with `fail`. `prefill_ms` passes before the first token and `step_ms`
//! between two; `repeat` says the tokens so many times. A member `set` names the package set whose
//! tokenizer and template are used, for `serve --engine scripted FILE`.
//! Tokens of prompts have probability 1, and embeddings count tokens.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    },
    time::{Duration, Instant},
};

use serde::Deserialize;
use shardpack_chat::{
    model::ChatModel,
    text::{Detokenizer, Vocabulary},
};
use shardpack_engine_api::{
    Command, EngineHandle, EngineState, Event, EventSink, FinishReason, GenerateRequest,
    PromptOutput, RequestId, TokenId, TokenLogprobs, Usage,
};

/// Most concurrent requests; others wait.
const RUNNING_MAX: usize = 256;
/// Most tokens of one answer, repetitions counted.
const TOKENS_MAX: usize = 1 << 24;
/// Most answers of one file.
const ANSWERS_MAX: usize = 1 << 16;
/// Width of the embeddings, which count tokens.
const EMBEDDING_WIDTH: usize = 64;
/// Interval at which an idle player checks whether a handle is left.
const IDLE: Duration = Duration::from_millis(200);

/// A script, ready to be played.
pub struct Script {
    answers: Vec<Answer>,
    step: Duration,
}

/// The script is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// Not JSON of that shape.
    #[error("not a script")]
    Json(#[from] serde_json::Error),
    /// An answer that cannot be played.
    #[error("answers[{index}]: {message}")]
    Answer {
        /// Which.
        index: usize,
        /// What is wrong with it.
        message: String,
    },
    /// No answers, or too many.
    #[error("a script has 1 to {ANSWERS_MAX} answers, this one has {0}")]
    Count(usize),
}

struct Answer {
    when: Option<String>,
    tokens: Arc<[TokenId]>,
    prefill: Duration,
    end: End,
}

#[derive(Clone)]
enum End {
    Finish(FinishReason),
    Fail { message: String, retryable: bool },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    step_ms: u64,
    /// The package set whose tokenizer and template are used.
    #[serde(default, rename = "set")]
    _set: serde::de::IgnoredAny,
    answers: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    when: Option<String>,
    text: Option<String>,
    tokens: Option<Vec<TokenId>>,
    repeat: Option<usize>,
    #[serde(default)]
    prefill_ms: u64,
    finish: Option<Finish>,
    fail: Option<String>,
    #[serde(default)]
    retryable: bool,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Finish {
    Stop,
    Length,
}

impl Script {
    /// Parses a script for a model, whose tokenizer its texts go through.
    pub fn parse(bytes: &[u8], model: &ChatModel) -> Result<Self, ScriptError> {
        let file: File = serde_json::from_slice(bytes)?;
        if file.answers.is_empty() || file.answers.len() > ANSWERS_MAX {
            return Err(ScriptError::Count(file.answers.len()));
        }
        let answer = |(index, entry)| {
            parse_answer(entry, model).map_err(|message| ScriptError::Answer { index, message })
        };
        let answers = file.answers.into_iter().enumerate().map(answer).collect::<Result<_, _>>()?;
        Ok(Self { answers, step: Duration::from_millis(file.step_ms) })
    }

    /// Plays until every handle is dropped; `handle` must be one of them and is dropped at once.
    pub fn play(self, model: &ChatModel, handle: EngineHandle, commands: &Receiver<Command>) {
        let mut player = Player {
            script: self,
            vocabulary: model.vocabulary().clone(),
            next: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
        };
        handle.update_status(|status| status.state = EngineState::Ready);
        let status = handle.status_writer();
        drop(handle);
        while player.take(commands) {
            player.step();
            let active_requests = (player.running.len() + player.waiting.len()) as u32;
            status.update(|status| status.active_requests = active_requests);
        }
    }
}

fn parse_answer(entry: Entry, model: &ChatModel) -> Result<Answer, String> {
    let tokens = match (entry.text, entry.tokens) {
        (Some(text), None) => model.encode(&text).map_err(|error| error.to_string())?,
        (None, Some(tokens)) => tokens,
        (None, None) if entry.fail.is_some() => Vec::new(),
        _ => return Err("expected either text or tokens".to_owned()),
    };
    let repeat = entry.repeat.unwrap_or(1);
    if tokens.len().checked_mul(repeat).is_none_or(|count| count > TOKENS_MAX) {
        return Err(format!("over {TOKENS_MAX} tokens"));
    }
    let end = match (entry.fail, entry.finish) {
        (Some(message), None) => End::Fail { message, retryable: entry.retryable },
        (Some(_), Some(_)) => return Err("expected either finish or fail".to_owned()),
        (None, Some(Finish::Length)) => End::Finish(FinishReason::Length),
        (None, Some(Finish::Stop) | None) => End::Finish(FinishReason::Stop),
    };
    let prefill = Duration::from_millis(entry.prefill_ms);
    Ok(Answer { when: entry.when, tokens: tokens.repeat(repeat).into(), prefill, end })
}

struct Player {
    script: Script,
    vocabulary: Arc<Vocabulary>,
    /// The next answer without `when`.
    next: usize,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
}

struct Running {
    id: RequestId,
    request: GenerateRequest,
    events: EventSink,
    tokens: Arc<[TokenId]>,
    end: End,
    said: usize,
    begins: Instant,
}

impl Player {
    /// Takes commands; waits for one when idle. False when no handle is left.
    fn take(&mut self, commands: &Receiver<Command>) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            match commands.recv_timeout(IDLE) {
                Ok(command) => self.command(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.command(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Submit { id, request, events } => {
                let (tokens, end, prefill) = if request.max_tokens == 0 {
                    (Arc::default(), End::Finish(FinishReason::Length), Duration::ZERO)
                } else {
                    let answer = self.choose(&request.prompt);
                    let answer = &self.script.answers[answer];
                    (answer.tokens.clone(), answer.end.clone(), answer.prefill)
                };
                let begins = Instant::now() + prefill;
                self.waiting.push_back(Running {
                    id,
                    request: *request,
                    events,
                    tokens,
                    end,
                    said: 0,
                    begins,
                });
            }
            Command::Cancel(id) => {
                self.running.retain(|running| running.id != id);
                self.waiting.retain(|running| running.id != id);
            }
        }
    }

    fn choose(&mut self, prompt: &[TokenId]) -> usize {
        let mut detokenizer = Detokenizer::new(self.vocabulary.clone());
        let mut text: String = prompt.iter().map(|&token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        let place = |(index, answer): (usize, &Answer)| {
            let when = answer.when.as_deref()?;
            Some((text.rfind(when)? + when.len(), when.len(), index))
        };
        if let Some((.., index)) = self.script.answers.iter().enumerate().filter_map(place).max() {
            return index;
        }
        let count = self.script.answers.len();
        let order = (self.next..count).chain(0..self.next);
        let index = order
            .into_iter()
            .find(|&index| self.script.answers[index].when.is_none())
            // Every answer has a `when` that does not match: use the last one.
            .unwrap_or(count - 1);
        self.next = (index + 1) % count;
        index
    }

    /// One step: a token for every running request.
    fn step(&mut self) {
        while self.running.len() < RUNNING_MAX
            && let Some(running) = self.waiting.pop_front()
        {
            self.running.push(running);
        }
        if self.running.is_empty() {
            return;
        }
        let now = Instant::now();
        for running in self.running.iter_mut().filter(|running| running.begins <= now) {
            running.read_prompt();
        }
        self.running.retain_mut(|running| running.begins > now || running.step());
        let is_waiting = self.running.iter().all(|running| running.begins > now);
        let pause = if is_waiting { Duration::from_millis(1) } else { self.script.step };
        if !pause.is_zero() && !self.running.is_empty() {
            std::thread::sleep(pause);
        }
    }
}

impl Running {
    /// Emits what is wanted of the prompt, once.
    fn read_prompt(&mut self) {
        let (request, prompt) = (self.id, &self.request.prompt);
        match std::mem::take(&mut self.request.prompt_output) {
            PromptOutput::Nothing => {}
            PromptOutput::Logprobs(count) => {
                let logprobs = prompt.iter().skip(1).map(|token| certain(*token, count)).collect();
                (self.events)(Event::PromptLogprobs { request, first: 1, logprobs });
            }
            PromptOutput::Embedding => {
                // Texts with the same tokens are alike, whatever the model.
                let mut values = vec![0.0; EMBEDDING_WIDTH];
                for token in prompt {
                    values[token.0 as usize % EMBEDDING_WIDTH] += 1.0;
                }
                (self.events)(Event::Embedding { request, values });
            }
        }
    }

    /// Emits the next token; false at the end.
    fn step(&mut self) -> bool {
        let request = self.id;
        let usage = Usage {
            prompt_tokens: self.request.prompt.len() as u32,
            completion_tokens: self.said as u32,
            ..Usage::default()
        };
        let finished = |reason| Event::Finished { request, reason, usage };
        let Some(&token) = self.tokens.get(self.said) else {
            (self.events)(match self.end.clone() {
                End::Finish(reason) => finished(reason),
                End::Fail { message, retryable } => Event::Failed { request, message, retryable },
            });
            return false;
        };
        let may_stop = self.said >= self.request.min_tokens as usize;
        if may_stop && self.request.stop_tokens.contains(&token) {
            (self.events)(finished(FinishReason::Stop));
            return false;
        }
        if self.said >= self.request.max_tokens as usize {
            (self.events)(finished(FinishReason::Length));
            return false;
        }
        self.said += 1;
        (self.events)(Event::Token { request, token, logprobs: self.logprobs() });
        true
    }

    /// Every scripted token has probability 1.
    fn logprobs(&self) -> Option<TokenLogprobs> {
        let token = self.tokens[self.said - 1];
        self.request.logprobs.map(|count| certain(token, count))
    }
}

/// A token of probability 1.
fn certain(token: TokenId, count: u32) -> TokenLogprobs {
    let top = if count > 0 { vec![(token, 0.0)] } else { Vec::new() };
    TokenLogprobs { logprob: 0.0, top }
}
