//! Parses Ollama's requests.

use shardpack_chat::{
    conversation::{ChatRequest, Limits, Reasoning, ResponseFormat, SamplingRequest},
    json::{Json, Object},
};

use super::{Options, Route};
use crate::{
    dialect::{
        ParsedRequest, Prompt, RawPrompt, WriterOptions,
        fields::Fields,
        params::{
            Neutral, leftover, parse_limits, parse_messages, parse_sampling, refuse_unsupported,
        },
        parse_object,
        tools::parse_tools,
    },
    error::ApiError,
};

/// Options that say how Ollama itself is to run.
const OF_THE_RUNNER: [&str; 9] = [
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_keep",
    "use_mmap",
    "numa",
    "low_vram",
];

const UNSUPPORTED: [(&str, Neutral); 4] = [
    ("suffix", Neutral::Nothing),
    ("template", Neutral::Nothing),
    ("images", Neutral::Empty),
    ("context", Neutral::Empty),
];

/// Parses the body of `/api/chat`.
pub(in crate::dialect) fn parse_chat(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(parse_object(body)?);
    let mut messages = fields.array("messages")?.unwrap_or_default();
    for (index, message) in messages.iter_mut().enumerate() {
        name_calls(message);
        refuse_images(message, index)?;
    }
    let messages = parse_messages(messages, "messages")?;
    let mut ignored = Vec::new();
    let tools = parse_tools(fields.array("tools")?.unwrap_or_default(), "tools", &mut ignored)?;
    let request =
        ChatRequest { messages, tools, parallel_tool_calls: true, ..common(&mut fields)? };
    call(fields, ignored, request, Prompt::Conversation, Route::Chat)
}

/// Parses the body of `/api/generate`.
pub(in crate::dialect) fn parse_generate(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(parse_object(body)?);
    let prompt = fields.string("prompt")?.unwrap_or_default();
    let system = fields.string("system")?;
    let is_raw = fields.boolean("raw")?.unwrap_or(false);
    let request = common(&mut fields)?;
    if is_raw {
        let prompt = Prompt::Raw(vec![RawPrompt::Text(prompt)]);
        return call(fields, Vec::new(), request, prompt, Route::Generate);
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
    call(fields, Vec::new(), request, Prompt::Conversation, Route::Generate)
}

fn call(
    mut fields: Fields,
    ignored: Vec<String>,
    request: ChatRequest,
    prompt: Prompt,
    route: Route,
) -> Result<ParsedRequest, ApiError> {
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    // Every model of Ollama has a tag; this server's have none.
    let model = model.map(|model| match model.strip_suffix(":latest") {
        Some(name) => name.to_owned(),
        None => model,
    });
    let stream = fields.boolean("stream")?.unwrap_or(true);
    // The model stays as long as the server does.
    fields.take("keep_alive");
    let writer_options = WriterOptions::Ollama(Options { route });
    let ignored = leftover(fields, ignored);
    Ok(ParsedRequest { request, prompt, model, stream, ignored, writer_options })
}

/// What both routes have.
fn common(fields: &mut Fields) -> Result<ChatRequest, ApiError> {
    let mut options = Fields::new(rename(fields.object("options")?.unwrap_or_default()));
    let sampling: SamplingRequest = parse_sampling(&mut options)?;
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
    let reasoning = match fields.take("think") {
        None => Reasoning::default(),
        Some(Json::Bool(enabled)) => Reasoning { enabled: Some(enabled), ..Reasoning::default() },
        Some(Json::String(effort)) => {
            Reasoning { enabled: Some(true), effort: Some(effort), ..Reasoning::default() }
        }
        Some(_) => {
            let message = "think: expected true, false or a level";
            return Err(ApiError::param("think", message));
        }
    };
    Ok(ChatRequest { response_format, reasoning, sampling, limits, ..ChatRequest::default() })
}

/// The one option that has another name here.
fn rename(options: Object) -> Object {
    let name = |(name, value): (String, Json)| match name.as_str() {
        "repeat_penalty" => ("repetition_penalty".to_owned(), value),
        _ => (name, value),
    };
    options.into_members().into_iter().map(name).collect()
}

/// Images in a user's message are refused, as in every dialect; in a result a note stands for them.
fn refuse_images(message: &mut Json, index: usize) -> Result<(), ApiError> {
    let Json::Object(message) = message else { return Ok(()) };
    let Some(Json::Array(images)) = message.remove("images") else { return Ok(()) };
    if images.is_empty() {
        return Ok(());
    }
    if message.get("role").and_then(Json::as_str) == Some("tool") {
        let text = message.get("content").and_then(Json::as_str).unwrap_or_default();
        let text = format!("{text}\n[image: this model reads text only]");
        message.set("content", text.trim_start().into());
        return Ok(());
    }
    let path = format!("messages[{index}].images");
    let message = format!("{path}: images are not supported: this model reads text only");
    Err(ApiError::param(path, message).with_code("unsupported_value"))
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
