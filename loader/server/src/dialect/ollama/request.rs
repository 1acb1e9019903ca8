//! Parses Ollama's requests.

use std::time::Duration;

use shardpack_chat::{
    conversation::{ChatRequest, Limits, Reasoning, ResponseFormat, SamplingRequest},
    json::{Json, Object},
};

use super::{Options, Route, keep_alive::parse_keep_alive};
use crate::{
    dialect::{
        ParsedRequest, Prompt, RawPrompt, WriterOptions,
        fields::{Fields, mismatch},
        params::{
            Neutral, leftover, parse_limits, parse_logprobs_count, parse_messages, parse_sampling,
            refuse_unsupported,
        },
        parse_object,
        tools::parse_tools,
    },
    error::ApiError,
    registry::KeepAlive,
};

/// Options that say how Ollama itself is to run.
const OF_THE_RUNNER: [&str; 15] = [
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_keep",
    "use_mmap",
    "use_mlock",
    "numa",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "logits_all",
    "draft_num_predict",
    "embedding_only",
];

/// The levels of `think`.
const LEVELS: [&str; 4] = ["low", "medium", "high", "max"];

/// Clients in Go send empty texts for what nobody set.
const UNSUPPORTED: [(&str, Neutral); 3] =
    [("suffix", Neutral::Empty), ("template", Neutral::Empty), ("context", Neutral::Empty)];

/// Parses the body of `/api/chat`.
pub(in crate::dialect) fn parse_chat(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(parse_object(body)?);
    let keep_alive = parse_keep_alive(&mut fields)?;
    let options = Options { route: Route::Chat, keep_alive };
    let mut ignored = Vec::new();
    let mut messages = fields.array("messages")?.unwrap_or_default();
    if messages.is_empty() {
        fields.take("tools");
        let request = common(&mut fields, &mut ignored)?;
        return call(fields, ignored, request, residency(keep_alive), options);
    }
    for (index, message) in messages.iter_mut().enumerate() {
        name_calls(message);
        refuse_images(message, index)?;
    }
    let messages = parse_messages(messages, "messages")?;
    let tools = parse_tools(fields.array("tools")?.unwrap_or_default(), "tools", &mut ignored)?;
    let common = common(&mut fields, &mut ignored)?;
    let request = ChatRequest { messages, tools, parallel_tool_calls: true, ..common };
    call(fields, ignored, request, Prompt::Conversation, options)
}

/// Parses the body of `/api/generate`.
pub(in crate::dialect) fn parse_generate(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(parse_object(body)?);
    let keep_alive = parse_keep_alive(&mut fields)?;
    let options = Options { route: Route::Generate, keep_alive };
    let prompt = fields.string("prompt")?.unwrap_or_default();
    let system = fields.string("system")?;
    let is_raw = fields.boolean("raw")?.unwrap_or(false);
    let mut ignored = Vec::new();
    let request = common(&mut fields, &mut ignored)?;
    if prompt.is_empty() {
        return call(fields, ignored, request, residency(keep_alive), options);
    }
    if is_raw {
        if system.is_some_and(|text| !text.is_empty()) {
            let message = "system: a raw prompt has no system message: leave out system or raw";
            return Err(ApiError::param("system", message));
        }
        let prompt = Prompt::Raw(vec![RawPrompt::Text(prompt)]);
        return call(fields, ignored, request, prompt, options);
    }
    let message = |role: &str, text: String| {
        let mut message = Object::default();
        message.set("role", role.into());
        message.set("content", text.into());
        Json::Object(message)
    };
    let mut messages: Vec<Json> = system
        .filter(|text| !text.is_empty())
        .map(|text| message("system", text))
        .into_iter()
        .collect();
    messages.push(message("user", prompt));
    let messages = parse_messages(messages, "prompt")?;
    let request = ChatRequest { messages, ..request };
    call(fields, ignored, request, Prompt::Conversation, options)
}

/// What a request without a prompt asks for: the model in memory, or out of it where it is to stay
/// for no time.
fn residency(keep_alive: Option<KeepAlive>) -> Prompt {
    match keep_alive {
        Some(KeepAlive::For(Duration::ZERO)) => Prompt::Unload,
        _ => Prompt::Load,
    }
}

fn call(
    mut fields: Fields,
    ignored: Vec<String>,
    request: ChatRequest,
    prompt: Prompt,
    options: Options,
) -> Result<ParsedRequest, ApiError> {
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    if fields.take("images").is_some_and(|images| !Neutral::Empty.holds(&images)) {
        return Err(no_images("images".to_owned()));
    }
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    // Every model of Ollama has a tag; this server's have none.
    let model = model.map(|model| match model.strip_suffix(":latest") {
        Some(name) => name.to_owned(),
        None => model,
    });
    let stream = fields.boolean("stream")?.unwrap_or(true);
    let writer_options = WriterOptions::Ollama(options);
    let ignored = leftover(fields, ignored);
    Ok(ParsedRequest { request, prompt, model, stream, ignored, writer_options })
}

/// What both routes have; options that are not known are ignored by their names.
fn common(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<ChatRequest, ApiError> {
    let mut options = Fields::new(fields.object("options")?.unwrap_or_default());
    let mut sampling: SamplingRequest = parse_sampling(&mut options)?;
    sampling.logprobs = parse_logprobs(fields)?;
    // Negative numbers mean: without a limit.
    let limits: Limits = match options.integer("num_predict")? {
        Some(count) if count > 0 => {
            let limits = parse_limits(&mut options, &[], "stop")?;
            Limits { max_tokens: Some(u32::try_from(count).unwrap_or(u32::MAX)), ..limits }
        }
        _ => parse_limits(&mut options, &[], "stop")?,
    };
    for name in OF_THE_RUNNER {
        options.take(name);
    }
    ignored.extend(options.into_names().into_iter().map(|name| format!("options.{name}")));
    let response_format = match fields.take("format") {
        None => ResponseFormat::Text,
        Some(Json::String(text)) if text.is_empty() => ResponseFormat::Text,
        Some(Json::String(text)) if text == "json" => ResponseFormat::JsonObject,
        Some(schema @ Json::Object(_)) => {
            ResponseFormat::JsonSchema { schema, strict: false, param: "format" }
        }
        Some(_) => {
            let message = "format: expected \"json\" or a schema";
            return Err(ApiError::param("format", message));
        }
    };
    let reasoning = parse_think(fields)?;
    Ok(ChatRequest { response_format, reasoning, sampling, limits, ..ChatRequest::default() })
}

/// `think`: a switch, or a level.
fn parse_think(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let enabled = |enabled| Reasoning { enabled: Some(enabled), ..Reasoning::default() };
    match fields.take("think") {
        None => Ok(Reasoning::default()),
        Some(Json::Bool(value)) => Ok(enabled(value)),
        Some(Json::String(level)) if LEVELS.contains(&level.as_str()) => {
            Ok(Reasoning { effort: Some(level), ..enabled(true) })
        }
        Some(Json::String(level)) => {
            let levels = LEVELS.join(", ");
            let message =
                format!("think: expected true, false or one of {levels}, found {level:?}");
            Err(ApiError::param("think", message))
        }
        Some(other) => Err(mismatch("think", "true, false or a level", &other)),
    }
}

/// `logprobs` with `top_logprobs`, which has no effect alone.
fn parse_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = parse_logprobs_count(fields, "top_logprobs")?;
    Ok(wanted.then(|| top.unwrap_or(0)))
}

/// Images in a user's message are refused, as in every dialect; in a result a note stands for them.
fn refuse_images(message: &mut Json, index: usize) -> Result<(), ApiError> {
    let Json::Object(message) = message else { return Ok(()) };
    let Some(images) = message.remove("images") else { return Ok(()) };
    if Neutral::Empty.holds(&images) || images == Json::Null {
        return Ok(());
    }
    if message.get("role").and_then(Json::as_str) == Some("tool") {
        let text = message.get("content").and_then(Json::as_str).unwrap_or_default();
        let text = format!("{text}\n[image: this model reads text only]");
        message.set("content", text.trim_start().into());
        return Ok(());
    }
    Err(no_images(format!("messages[{index}].images")))
}

fn no_images(path: String) -> ApiError {
    let message = format!("{path}: images are not supported: this model reads text only");
    ApiError::param(path, message).with_code("unsupported_value")
}

/// Results of tools name the tool here, which templates know as `name`.
fn name_calls(message: &mut Json) {
    let Json::Object(message) = message else { return };
    if let Some(name) = message.get("tool_name").cloned() {
        message.set("name", name);
    }
    // Thinking of past turns.
    if let Some(thinking) = message.get("thinking").cloned() {
        message.set("reasoning_content", thinking);
    }
}
