//! The dialects: each parses its requests, leniently, to a [`ParsedRequest`] of chat's
//! `conversation` types, and writes answers, strictly, through a [`Writer`].

mod answer;
mod chat;
mod completions;
mod embeddings;
mod fields;
mod messages;
mod ollama;
mod params;
mod rerank;
mod responses;
mod tools;

use std::sync::Arc;

use answer::json_logprob;
pub(super) use answer::{Answer, AnswerCall};
pub(super) use embeddings::{EmbeddingAnswer, EmbeddingDialect, EmbeddingRequest, PromptChoice};
pub(super) use fields::Fields;
pub(super) use params::parse_token;
pub(super) use rerank::RerankRequest;

use super::{
    error::{ApiError, CONTEXT_LENGTH_EXCEEDED},
    generation::ChoiceUpdate,
    registry::KeepAlive,
    response_store::ResponseStore,
    usage::AnswerUsage,
};
use crate::error::ErrorKind;
use shardpack_chat::{
    conversation::{ChatRequest, ReasoningOption},
    json::{Json, Object},
};
use shardpack_engine_api::TokenId;

/// An API that clients speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dialect {
    /// `OpenAI` chat completions.
    Chat,
    /// `OpenAI` completions.
    Completions,
    /// `OpenAI` responses.
    Responses,
    /// Summaries of conversations in the place of responses.
    Compaction,
    /// Anthropic messages.
    Messages,
    /// Ollama's conversations.
    OllamaChat,
    /// Ollama's prompts.
    OllamaGenerate,
}

/// Looks up the items of a stored response by its id.
pub(super) type StoredItems<'a> = &'a dyn Fn(&str) -> Option<Arc<[Json]>>;

/// A parsed API request: the prompt, and how the response is to be written.
#[derive(Debug)]
pub(super) struct ParsedRequest {
    pub(super) request: ChatRequest,
    pub(super) prompt: Prompt,
    /// The model asked for; absent: whichever is served.
    pub(super) model: Option<String>,
    pub(super) stream: bool,
    /// Parameters that were ignored, to be reported to the client.
    pub(super) ignored: Vec<String>,
    pub(super) writer_options: WriterOptions,
}

/// Where the prompt comes from.
#[derive(Debug, PartialEq)]
pub(super) enum Prompt {
    /// The conversation, as the model's template renders it.
    Conversation,
    /// Texts or tokens as they are; one answer (or `n`) for each.
    Raw(Vec<RawPrompt>),
    /// Nothing: the model is to be in memory.
    Load,
    /// Nothing: the model is to leave memory.
    Unload,
}

/// A prompt that bypasses the chat template.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawPrompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// Options of a dialect's response writer.
#[derive(Debug)]
pub(super) enum WriterOptions {
    /// Chat completions.
    Chat(chat::Options),
    /// Completions.
    Completions(completions::Options),
    /// Responses.
    Responses(Box<responses::Options>),
    /// Messages.
    Messages(messages::Options),
    /// Ollama's lines.
    Ollama(ollama::Options),
}

/// Fields that every chunk of a response repeats.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// Unique; dialects put their own prefix before it.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The model's name as the client knows it.
    pub(super) model: String,
    /// Tokens of all prompts.
    pub(super) prompt_tokens: u32,
    /// Number of choices.
    pub(super) choices: u32,
}

impl Identity {
    /// Token usage of all choices together.
    #[must_use]
    pub(super) fn total(&self, answers: &[AnswerUsage]) -> AnswerUsage {
        let sum = |of: fn(&AnswerUsage) -> u32| answers.iter().map(of).fold(0, u32::saturating_add);
        AnswerUsage {
            prompt_tokens: self.prompt_tokens,
            // The choices of one conversation share its prompt.
            cached_tokens: sum(|usage| usage.cached_tokens).min(self.prompt_tokens),
            completion_tokens: sum(|usage| usage.completion_tokens),
            reasoning_tokens: sum(|usage| usage.reasoning_tokens),
            prediction_tokens: [
                sum(|usage| usage.prediction_tokens[0]),
                sum(|usage| usage.prediction_tokens[1]),
            ],
        }
    }
}

/// Content type of server-sent events.
const EVENTS: &str = "text/event-stream";
/// A comment among them, which every client skips.
const COMMENT: &str = ": keep-alive\n\n";

/// Writes a response in a dialect. Appends only whole frames to `out`.
pub(super) trait Writer: Send {
    /// Content type of a stream.
    fn content_type(&self) -> &'static str {
        EVENTS
    }

    /// A keep-alive frame, for proxies and clients that close silent connections.
    fn keep_alive(&self) -> &'static str {
        COMMENT
    }

    /// Writes what comes before the first update.
    fn begin(&mut self, out: &mut String);

    /// Writes an update.
    fn update(&mut self, update: ChoiceUpdate, out: &mut String);

    /// Writes what comes after the last update.
    fn end(&mut self, out: &mut String);

    /// Writes an error after the stream has begun; nothing follows.
    fn fail(&mut self, error: &ApiError, out: &mut String);

    /// The body of a response that is not streamed.
    fn whole(&mut self, answers: Vec<Answer>) -> String;

    /// Why answers make no response, if they do not; asked before [`Self::whole`].
    fn refused(&self, _: &[Answer]) -> Option<ApiError> {
        None
    }
}

impl Dialect {
    /// Parses a body that continues no earlier response.
    pub(super) fn parse(self, body: &[u8]) -> Result<ParsedRequest, ApiError> {
        self.parse_after(body, &|_| None)
    }

    /// Parses a body; `earlier` looks up the response that it continues.
    pub(super) fn parse_after(
        self,
        body: &[u8],
        earlier: StoredItems<'_>,
    ) -> Result<ParsedRequest, ApiError> {
        match self {
            Self::Chat => parse_chat_or_responses(parse_object(body)?, earlier),
            Self::Completions => completions::parse(body),
            Self::Responses => responses::parse(parse_object(body)?, earlier),
            Self::Compaction => responses::parse_compact(parse_object(body)?, earlier),
            Self::Messages => messages::parse(parse_object(body)?),
            Self::OllamaChat => ollama::parse_chat(body),
            Self::OllamaGenerate => ollama::parse_generate(body),
        }
    }

    /// Parses a body for token counting, where parameters of generation may be missing.
    pub(super) fn parse_counted(self, body: &[u8]) -> Result<ParsedRequest, ApiError> {
        match self {
            Self::Messages => {
                let mut body = parse_object(body)?;
                if body.get("max_tokens").is_none() {
                    body.set("max_tokens", Json::Number(1.into()));
                }
                messages::parse(body)
            }
            other => other.parse(body),
        }
    }
}

impl WriterOptions {
    /// Content type of a stream, and what keeps it open before there is a writer.
    pub(super) const fn stream_form(&self) -> [&'static str; 2] {
        match self {
            // Every line is an answer.
            Self::Ollama(_) => [ollama::LINES, ""],
            _ => [EVENTS, COMMENT],
        }
    }

    /// How long the model is to stay afterwards, where the client says so.
    pub(super) const fn stay(&self) -> Option<KeepAlive> {
        match self {
            Self::Ollama(options) => options.keep_alive,
            _ => None,
        }
    }

    /// The writer of one request's answers.
    pub(super) fn writer(self, identity: Identity) -> Box<dyn Writer> {
        match self {
            Self::Chat(options) => Box::new(chat::ChatWriter::new(identity, options)),
            Self::Completions(options) => {
                Box::new(completions::CompletionsWriter::new(identity, options))
            }
            Self::Responses(options) => {
                Box::new(responses::ResponsesWriter::new(identity, options))
            }
            Self::Messages(options) => Box::new(messages::MessagesWriter::new(identity, options)),
            Self::Ollama(options) => Box::new(ollama::OllamaWriter::new(identity, options)),
        }
    }

    /// Whether an error that is known before the first byte still goes into the stream: Codex
    /// compacts the conversation and retries when a response fails with `context_length_exceeded`
    /// in the stream, but gives up on an HTTP error.
    pub(super) fn tells_in_stream(&self, error: &ApiError) -> bool {
        matches!(self, Self::Responses(_)) && error.code == Some(CONTEXT_LENGTH_EXCEEDED)
    }

    /// The whole answer to a request without a prompt.
    pub(super) fn without_prompt(&self, prompt: &Prompt, model: &str) -> Option<String> {
        let reason = match prompt {
            Prompt::Load => "load",
            Prompt::Unload => "unload",
            Prompt::Conversation | Prompt::Raw(_) => return None,
        };
        match self {
            Self::Ollama(options) => Some(ollama::without_prompt(*options, model, reason)),
            _ => None,
        }
    }

    /// Whether completions echo their prompt.
    pub(super) fn echoes(&self) -> bool {
        matches!(self, Self::Completions(options) if options.echo)
    }

    /// Stores the response, unless the client said `store: false`.
    pub(super) fn store_in(&mut self, store: &Arc<ResponseStore>, owner: Option<&str>) {
        if let Self::Responses(options) = self {
            options.store_in(store, owner);
        }
    }

    /// The parameter that a reasoning option comes from.
    pub(super) const fn reasoning_param(&self, option: ReasoningOption) -> &'static str {
        use ReasoningOption::{Budget, Effort, Switch};
        match (self, option) {
            (Self::Ollama(_), _) => "think",
            (Self::Messages(_), Switch) => "thinking",
            (Self::Messages(_), Effort) => "output_config.effort",
            (Self::Responses(_), Effort | Switch) => "reasoning.effort",
            (_, Effort) => "reasoning_effort",
            (_, Switch) => "enable_thinking",
            (_, Budget) => "thinking.budget_tokens",
        }
    }

    /// The parameter that the prompt comes from.
    pub(super) fn prompt_param(&self) -> &'static str {
        match self {
            Self::Chat(_) | Self::Messages(_) => "messages",
            Self::Completions(_) => "prompt",
            Self::Responses(_) => "input",
            Self::Ollama(options) => options.prompt_param(),
        }
    }
}

/// One editor sends requests of the responses API to chat completions and expects chunks back.
fn parse_chat_or_responses(
    body: Object,
    earlier: StoredItems<'_>,
) -> Result<ParsedRequest, ApiError> {
    if body.get("messages").is_some() || body.get("input").is_none() {
        return chat::parse(body);
    }
    let parsed = responses::parse(body, earlier)?;
    Ok(ParsedRequest {
        writer_options: WriterOptions::Chat(chat::Options {
            include_usage: true,
            customs: std::collections::BTreeSet::new(),
        }),
        ..parsed
    })
}

/// A request's body as an object.
pub(super) fn parse_object(body: &[u8]) -> Result<Object, ApiError> {
    let body = Json::parse(body).map_err(|error| {
        ApiError::new(ErrorKind::Invalid, format!("the body is not JSON: {error}"))
    })?;
    match body {
        Json::Object(object) => Ok(object),
        other => {
            let message = format!("the body is a JSON object, not {}", other.kind());
            Err(ApiError::new(ErrorKind::Invalid, message))
        }
    }
}

/// Serializes strings, integers and finite floats, which cannot fail.
fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are always JSON")
}

/// The free text within the arguments of a custom tool, as much as there is of one that is cut off;
/// what is not of that form is the text.
fn custom_input(arguments: &str) -> String {
    let input = |json: &str| {
        let value: serde_json::Value = serde_json::from_str(json).ok()?;
        Some(value.get("input")?.as_str()?.to_owned())
    };
    // Without the beginning of an escape, which is two characters of UTF-16 at most.
    let shorter = (0..=11).filter_map(|less| arguments.get(..arguments.len().checked_sub(less)?));
    let mut closed = shorter.map(|part| format!("{part}\"}}"));
    input(arguments)
        .or_else(|| closed.find_map(|json| input(&json)))
        .unwrap_or_else(|| arguments.to_owned())
}

/// Appends a server-sent event without a name.
fn push_data(value: &impl serde::Serialize, out: &mut String) {
    out.push_str("data: ");
    out.push_str(&to_json(value));
    out.push_str("\n\n");
}

#[cfg(test)]
mod tests;
