//! The dialects: each parses its requests, leniently, to a [`ParsedRequest`] in the inner form, and writes
//! answers, strictly, through a [`Writer`].

mod answer;
mod chat;
mod completions;
mod fields;
mod messages;
mod ollama;
mod params;
mod responses;
mod tools;

use std::sync::Arc;

pub(super) use answer::{Answer, AnswerCall};
pub(super) use fields::Fields;
pub(super) use ollama::rfc3339;
pub(super) use params::parse_token;

use super::{
    error::{ApiError, CONTEXT_LENGTH_EXCEEDED},
    generation::{AnswerUsage, ChoiceUpdate},
    response_store::ResponseStore,
};
use crate::error::ErrorKind;
use shardpack_chat::{
    conversation::ChatRequest,
    json::{Json, Object},
};
use shardpack_engine_api::TokenId;

/// How a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dialect {
    /// `OpenAI` chat completions.
    Chat,
    /// `OpenAI` completions.
    Completions,
    /// `OpenAI` responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// Ollama's conversations.
    OllamaChat,
    /// Ollama's prompts.
    OllamaGenerate,
}

/// The items of an earlier response by its id, if it was kept.
pub(super) type Earlier<'a> = &'a dyn Fn(&str) -> Option<Arc<[Json]>>;

/// A parsed request: what to continue, and how the answer is to be written.
#[derive(Debug)]
pub(super) struct ParsedRequest {
    pub(super) request: ChatRequest,
    pub(super) prompt: Prompt,
    /// The model asked for; absent: whichever is served.
    pub(super) model: Option<String>,
    pub(super) stream: bool,
    /// Parameters without effect, for the client to be told.
    pub(super) ignored: Vec<String>,
    pub(super) writer_options: WriterOptions,
}

/// What is continued.
#[derive(Debug, PartialEq)]
pub(super) enum Prompt {
    /// The conversation, as the model's template renders it.
    Conversation,
    /// Texts or tokens as they are; one answer (or `n`) for each.
    Raw(Vec<RawPrompt>),
}

/// A prompt that no template sees.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawPrompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// How an answer is written, beyond what is the same for all.
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

/// What is the same in every part of an answer.
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
    /// Number of answers.
    pub(super) choices: u32,
}

impl Identity {
    /// What all answers of a request cost together.
    #[must_use]
    pub(super) fn total(&self, answers: &[AnswerUsage]) -> AnswerUsage {
        let sum = |of: fn(&AnswerUsage) -> u32| answers.iter().map(of).fold(0, u32::saturating_add);
        AnswerUsage {
            prompt_tokens: self.prompt_tokens,
            // Answers to one conversation share its prompt.
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

/// Writes one request's answers. What is appended to `out` is whole frames.
pub(super) trait Writer: Send {
    /// The type of a stream.
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }

    /// A frame without meaning, for connections that would be thought dead.
    fn keep_alive(&self) -> &'static str {
        ": keep-alive\n\n"
    }

    /// What comes before the first step.
    fn begin(&mut self, out: &mut String);

    /// The next step of a stream.
    fn update(&mut self, update: ChoiceUpdate, out: &mut String);

    /// What comes after the last step.
    fn end(&mut self, out: &mut String);

    /// A failure after the stream has begun; nothing follows.
    fn fail(&mut self, error: &ApiError, out: &mut String);

    /// All answers at once, as the body of a response.
    fn whole(&mut self, answers: Vec<Answer>) -> String;
}

impl Dialect {
    /// Parses a body of which nothing went before.
    pub(super) fn parse(self, body: &[u8]) -> Result<ParsedRequest, ApiError> {
        self.parse_after(body, &|_| None)
    }

    /// Parses a body; `earlier` knows the items of responses that it may go on from.
    pub(super) fn parse_after(
        self,
        body: &[u8],
        earlier: Earlier<'_>,
    ) -> Result<ParsedRequest, ApiError> {
        match self {
            Self::Chat => parse_chat_or_responses(parse_object(body)?, earlier),
            Self::Completions => completions::parse(body),
            Self::Responses => responses::parse(parse_object(body)?, earlier),
            Self::Messages => messages::parse(parse_object(body)?),
            Self::OllamaChat => ollama::parse_chat(body),
            Self::OllamaGenerate => ollama::parse_generate(body),
        }
    }

    /// Parses a body that is only to be counted, so that nothing about the answer has to be in it.
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

    /// Whether clients find an error that is known before the first byte in the stream only: Codex
    /// makes room and asks again when a response fails for its length, and gives up on a status.
    pub(super) fn tells_in_stream(&self, error: &ApiError) -> bool {
        matches!(self, Self::Responses(_)) && error.code == Some(CONTEXT_LENGTH_EXCEEDED)
    }

    /// Whether answers begin with their prompt.
    pub(super) fn echoes(&self) -> bool {
        matches!(self, Self::Completions(options) if options.echo)
    }

    /// Keeps the answer where later requests find it, if its client did not forbid it.
    pub(super) fn keep_on(&mut self, store: &Arc<ResponseStore>, owner: Option<&str>) {
        if let Self::Responses(options) = self {
            options.keep_on(store, owner);
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

/// One editor sends its responses to the route of chat completions, and wants chunks back.
fn parse_chat_or_responses(body: Object, earlier: Earlier<'_>) -> Result<ParsedRequest, ApiError> {
    if body.get("messages").is_some() || body.get("input").is_none() {
        return chat::parse(body);
    }
    let parsed = responses::parse(body, earlier)?;
    Ok(ParsedRequest {
        writer_options: WriterOptions::Chat(chat::Options { include_usage: true }),
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

/// JSON of what is always JSON: strings, integers, finite floats.
fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers are always JSON")
}

/// Appends a server-sent event without a name.
fn push_data(value: &impl serde::Serialize, out: &mut String) {
    out.push_str("data: ");
    out.push_str(&to_json(value));
    out.push_str("\n\n");
}

#[cfg(test)]
mod tests;
