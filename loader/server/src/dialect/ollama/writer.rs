//! Ollama's answers: one JSON object, or one a line.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use shardpack_chat::{
    conversation::{EndReason, OutputDelta},
    json::Json,
};

use crate::{
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

/// A time as RFC 3339 has it, in UTC.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days to a date of the Gregorian calendar, whose eras have 146,097 days (Howard Hinnant,
    // "chrono-compatible low-level date algorithms").
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates() {
        let check = |seconds: u64, expected: &str| {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        };
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_400, "2000-02-29T00:00:00.000Z");
        check(1_798_761_599, "2026-12-31T23:59:59.000Z");
    }
}
