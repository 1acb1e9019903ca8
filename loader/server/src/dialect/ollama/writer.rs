//! Ollama's answers: one JSON object, or one a line.

use std::time::{Instant, SystemTime};

use serde_json::{Value, json};
use shardpack_chat::{
    conversation::{EndReason, OutputDelta},
    json::Json,
};

use crate::{
    dates::rfc3339,
    dialect::{Answer, Identity, Writer, json_logprob, to_json},
    error::{ApiError, Shape},
    generation::{ChoiceUpdate, TokenLogprob, UpdateKind},
    registry::KeepAlive,
    usage::AnswerUsage,
};

/// Options of the Ollama's API writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(super) route: Route,
    /// How long the model is to stay afterwards.
    pub(in crate::dialect) keep_alive: Option<KeepAlive>,
}

/// Content type of lines of JSON.
pub(in crate::dialect) const LINES: &str = "application/x-ndjson";

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

impl Options {
    /// The parameter that the prompt comes from.
    pub(in crate::dialect) const fn prompt_param(self) -> &'static str {
        match self.route {
            Route::Chat => "messages",
            Route::Generate => "prompt",
        }
    }
}

/// Writes Ollama's answers.
pub(crate) struct OllamaWriter {
    identity: Identity,
    options: Options,
    begun: Instant,
    first: Option<Instant>,
    /// The call that grows: calls are written whole here.
    call: Option<Call>,
    /// Calls so far.
    calls: usize,
    /// Log probabilities of tokens that no line has shown yet.
    logprobs: Vec<TokenLogprob>,
    end: Option<(EndReason, AnswerUsage)>,
}

impl OllamaWriter {
    pub(crate) fn new(identity: Identity, options: Options) -> Self {
        Self {
            identity,
            options,
            begun: Instant::now(),
            first: None,
            call: None,
            calls: 0,
            logprobs: Vec::new(),
            end: None,
        }
    }

    fn line(&mut self, content: &str, thinking: &str, calls: &[Value], done: bool) -> Value {
        let mut line = line(self.options, &self.identity.model, content, done);
        let answer = match self.options.route {
            Route::Chat => &mut line["message"],
            Route::Generate => &mut line,
        };
        if !thinking.is_empty() {
            answer["thinking"] = thinking.into();
        }
        if !calls.is_empty() {
            answer["tool_calls"] = calls.into();
        }
        let logprobs = std::mem::take(&mut self.logprobs);
        if !logprobs.is_empty() {
            line["logprobs"] = logprobs.iter().map(logprob).collect();
        }
        line
    }

    fn finish(&self, line: &mut Value) {
        let (reason, usage) = self.end.unwrap_or((EndReason::Length, AnswerUsage::default()));
        let usage = self.identity.total(&[usage]);
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        let nanoseconds =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_nanos() as u64;
        line["done_reason"] = if reason == EndReason::Length { "length" } else { "stop" }.into();
        line["total_duration"] = nanoseconds(self.begun, now).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = usage.prompt_tokens.into();
        line["prompt_eval_duration"] = nanoseconds(self.begun, first).into();
        line["eval_count"] = usage.completion_tokens.into();
        line["eval_duration"] = nanoseconds(first, now).into();
    }

    fn push(value: &Value, out: &mut String) {
        out.push_str(&to_json(value));
        out.push('\n');
    }
}

/// A call whose arguments are not complete yet.
struct Call {
    id: String,
    name: String,
    arguments: String,
}

fn line(options: Options, model: &str, content: &str, done: bool) -> Value {
    let mut line = json!({"model": model, "created_at": rfc3339(SystemTime::now()), "done": done});
    match options.route {
        Route::Chat => line["message"] = json!({"role": "assistant", "content": content}),
        Route::Generate => line["response"] = content.into(),
    }
    line
}

/// The answer to a request without a prompt: no text, and why.
pub(in crate::dialect) fn without_prompt(options: Options, model: &str, reason: &str) -> String {
    let mut line = line(options, model, "", true);
    line["done_reason"] = reason.into();
    to_json(&line)
}

fn call(index: usize, id: &str, name: &str, arguments: &str) -> Value {
    let arguments = Json::parse(arguments.as_bytes()).unwrap_or_default();
    let function = json!({"index": index, "name": name, "arguments": arguments});
    // LiteLLM reads the index beside the function, and joins the calls of a stream without it.
    json!({"id": id, "index": index, "function": function})
}

fn logprob(token: &TokenLogprob) -> Value {
    let mut value = json_logprob(token);
    if token.top.is_empty() {
        let value = value.as_object_mut().expect("json_logprob makes an object");
        value.remove("top_logprobs");
    }
    value
}

impl Writer for OllamaWriter {
    fn content_type(&self) -> &'static str {
        LINES
    }

    /// Every line is an answer, so there is none without meaning.
    fn keep_alive(&self) -> &'static str {
        ""
    }

    fn begin(&mut self, _: &mut String) {}

    fn update(&mut self, update: ChoiceUpdate, out: &mut String) {
        self.first.get_or_insert_with(Instant::now);
        self.logprobs.extend(update.logprobs);
        match update.kind {
            UpdateKind::Delta(OutputDelta::Content(text)) => {
                Self::push(&self.line(&text, "", &[], false), out);
            }
            UpdateKind::Delta(OutputDelta::Reasoning(text)) => {
                Self::push(&self.line("", &text, &[], false), out);
            }
            UpdateKind::Delta(OutputDelta::ToolCallBegin { id, name, .. }) => {
                self.call = Some(Call { id, name, arguments: String::new() });
            }
            UpdateKind::Delta(OutputDelta::ToolCallArguments { fragment, .. }) => {
                if let Some(call) = &mut self.call {
                    call.arguments.push_str(&fragment);
                }
            }
            UpdateKind::Delta(OutputDelta::ToolCallEnd { .. }) => {
                if let Some(Call { id, name, arguments }) = self.call.take() {
                    let calls = [call(self.calls, &id, &name, &arguments)];
                    self.calls += 1;
                    Self::push(&self.line("", "", &calls, false), out);
                }
            }
            UpdateKind::End(reason, usage) => self.end = Some((reason, usage)),
        }
    }

    fn end(&mut self, out: &mut String) {
        let mut line = self.line("", "", &[], true);
        self.finish(&mut line);
        Self::push(&line, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        Self::push(&error.shaped(Shape::Ollama), out);
    }

    fn whole(&mut self, answers: Vec<Answer>) -> String {
        let answer = answers.into_iter().next().unwrap_or_default();
        self.end = Some((answer.reason(), answer.usage));
        let calls: Vec<Value> = answer
            .calls
            .iter()
            .filter(|call| call.is_complete)
            .enumerate()
            .map(|(index, found)| call(index, &found.id, &found.name, &found.arguments))
            .collect();
        self.logprobs = answer.logprobs;
        let mut line = self.line(&answer.content, &answer.reasoning, &calls, true);
        self.finish(&mut line);
        to_json(&line)
    }
}
