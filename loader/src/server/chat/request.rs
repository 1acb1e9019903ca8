//! A chat completion request of the `OpenAI` API to the inner form.

use super::fields::{Fields, mismatch, number};
use crate::server::{
    error::{ApiError, ErrorKind},
    inner::{ChatRequest, Limits, Message, SamplingRequest},
    json::{Json, Object},
    template::RESERVED,
};

/// Messages of one request: more than any context holds of the shortest turns that agents write.
const MESSAGES_MAX: usize = 16_384;
/// Tools of one request; clients with many servers of tools send some hundred.
const TOOLS_MAX: usize = 1024;
/// Stop texts of one request and the bytes of one: each is searched for in every piece.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Most names listed in the header of ignored parameters, which proxies bound.
const IGNORED_MAX: usize = 32;

/// A parsed request: the conversation and how the answer is to be written.
#[derive(Debug)]
pub(in crate::server) struct ChatCall {
    pub(in crate::server) request: ChatRequest,
    /// The model asked for; absent: whichever is served.
    pub(in crate::server) model: Option<String>,
    pub(in crate::server) stream: bool,
    pub(in crate::server) include_usage: bool,
    /// Parameters without effect, for the client to be told.
    pub(in crate::server) ignored: Vec<String>,
}

/// Parses a body.
pub(in crate::server) fn parse(body: &[u8]) -> Result<ChatCall, ApiError> {
    let body = Json::parse(body).map_err(|error| {
        ApiError::new(ErrorKind::Invalid, format!("the body is not JSON: {error}"))
    })?;
    let Json::Object(body) = body else {
        let message = format!("the body is a JSON object, not {}", body.kind());
        return Err(ApiError::new(ErrorKind::Invalid, message));
    };
    let mut fields = Fields::new(body);
    let messages = parse_messages(&mut fields)?;
    let mut ignored = Vec::new();
    let tools = parse_tools(&mut fields, &mut ignored)?;
    let template_kwargs = parse_template_kwargs(&mut fields)?;
    let sampling = parse_sampling(&mut fields)?;
    let limits = parse_limits(&mut fields)?;
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = parse_stream_options(&mut fields)?;
    refuse_unsupported(&mut fields)?;
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    ignored.extend(fields.into_names());
    ignored.truncate(IGNORED_MAX);
    let request = ChatRequest { messages, tools, template_kwargs, sampling, limits };
    Ok(ChatCall { request, model, stream, include_usage, ignored })
}

/// Parameters that by their nature change nothing in the answer.
const WITHOUT_EFFECT: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

fn parse_messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let messages = fields
        .array("messages")?
        .filter(|messages| !messages.is_empty())
        .ok_or_else(|| ApiError::param("messages", "messages: expected at least one message"))?;
    if messages.len() > MESSAGES_MAX {
        let message = format!("messages: {} of them: at most {MESSAGES_MAX}", messages.len());
        return Err(ApiError::param("messages", message));
    }
    let normalise = |(index, message)| {
        Message::normalise(message).map_err(|error| {
            let path = format!("messages[{index}]{}", error.path);
            let message = format!("{path}: {}", error.message);
            ApiError::param(path, message)
        })
    };
    messages.into_iter().enumerate().map(normalise).collect()
}

/// Functions as sent. Tools of other types run on somebody else's servers, and agents send them
/// unasked: they are left out and reported.
fn parse_tools(fields: &mut Fields, ignored: &mut Vec<String>) -> Result<Vec<Json>, ApiError> {
    let tools = fields.array("tools")?.unwrap_or_default();
    if tools.len() > TOOLS_MAX {
        let message = format!("tools: {} of them: at most {TOOLS_MAX}", tools.len());
        return Err(ApiError::param("tools", message));
    }
    let mut functions = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        let Some(object) = tool.as_object() else {
            return Err(mismatch(&path, "an object", &tool));
        };
        if object.get("type").and_then(Json::as_str).unwrap_or("function") != "function" {
            ignored.push(path);
            continue;
        }
        let function = object.get("function").and_then(Json::as_object);
        if function.and_then(|function| function.get("name")).and_then(Json::as_str).is_none() {
            let path = path + ".function.name";
            let message = format!("{path}: expected a string");
            return Err(ApiError::param(path, message));
        }
        functions.push(tool);
    }
    match fields.take("tool_choice") {
        None => Ok(functions),
        Some(Json::String(choice)) if choice == "auto" => Ok(functions),
        Some(Json::String(choice)) if choice == "none" => Ok(Vec::new()),
        Some(_) => Err(unsupported("tool_choice", "only \"auto\" and \"none\" are")),
    }
}

fn parse_template_kwargs(fields: &mut Fields) -> Result<Object, ApiError> {
    let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    for name in RESERVED {
        if kwargs.get(name).is_some() {
            let path = format!("chat_template_kwargs.{name}");
            let message = format!("{path}: this variable is set by the server");
            return Err(ApiError::param(path, message));
        }
    }
    // Templates of models with levels of thinking read it under the API's own name.
    if let Some(effort) = fields.string("reasoning_effort")?
        && kwargs.get("reasoning_effort").is_none()
    {
        kwargs.set("reasoning_effort", Json::String(effort));
    }
    Ok(kwargs)
}

fn parse_sampling(fields: &mut Fields) -> Result<SamplingRequest, ApiError> {
    let temperature = match fields.number("temperature")? {
        Some(value) if !(0.0..=2.0).contains(&value) => {
            let message = format!("temperature: expected a number from 0 to 2, found {value}");
            return Err(ApiError::param("temperature", message));
        }
        value => value.map(|value| value as f32),
    };
    // Any 64 bits are a seed; negative ones are as good as others.
    let seed = match fields.integer("seed")? {
        None => None,
        Some(seed) => {
            let bits = u64::try_from(seed).or_else(|_| i64::try_from(seed).map(i64::cast_unsigned));
            Some(bits.map_err(|_| ApiError::param("seed", "seed: expected 64 bits"))?)
        }
    };
    Ok(SamplingRequest { temperature, seed })
}

fn parse_limits(fields: &mut Fields) -> Result<Limits, ApiError> {
    let mut max_tokens = None;
    // The newer name comes last and counts.
    for name in ["max_tokens", "max_completion_tokens"] {
        if let Some(value) = fields.integer(name)? {
            if value < 1 {
                let message = format!("{name}: expected at least 1, found {value}");
                return Err(ApiError::param(name, message));
            }
            max_tokens = Some(u32::try_from(value).unwrap_or(u32::MAX));
        }
    }
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(stop @ Json::String(_)) => vec![stop],
        Some(Json::Array(stops)) => stops,
        Some(other) => return Err(mismatch("stop", "a string or an array of strings", &other)),
    };
    if stops.len() > STOPS_MAX {
        let message = format!("stop: {} texts: at most {STOPS_MAX}", stops.len());
        return Err(ApiError::param("stop", message));
    }
    let stop = stops.into_iter().enumerate().map(|(index, stop)| match stop {
        Json::String(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text),
        Json::String(text) => {
            let message =
                format!("stop: expected 1 to {STOP_BYTES_MAX} bytes, found {}", text.len());
            Err(ApiError::param(format!("stop[{index}]"), message))
        }
        other => Err(mismatch(&format!("stop[{index}]"), "a string", &other)),
    });
    Ok(Limits { max_tokens, stop: stop.collect::<Result<_, _>>()? })
}

fn parse_stream_options(fields: &mut Fields) -> Result<bool, ApiError> {
    let mut options = Fields::new(fields.object("stream_options")?.unwrap_or_default());
    Ok(options.boolean("include_usage")?.unwrap_or(false))
}

/// Values of a parameter that ask for nothing beyond what is done anyway.
enum Neutral {
    /// These numbers.
    Numbers(&'static [f64]),
    /// `false`.
    False,
    /// `true`.
    True,
    /// An object or array without members.
    Empty,
    /// An object whose `type` is `text`, or the string itself, alone or in an array.
    Text,
    /// No value at all.
    Nothing,
}

/// Parameters that are known, but of which only one value is supported.
const UNSUPPORTED: [(&str, Neutral); 25] = [
    ("n", Neutral::Numbers(&[1.0])),
    ("best_of", Neutral::Numbers(&[1.0])),
    ("top_p", Neutral::Numbers(&[1.0])),
    ("top_k", Neutral::Numbers(&[0.0, -1.0])),
    ("min_p", Neutral::Numbers(&[0.0])),
    ("presence_penalty", Neutral::Numbers(&[0.0])),
    ("frequency_penalty", Neutral::Numbers(&[0.0])),
    ("repetition_penalty", Neutral::Numbers(&[1.0])),
    ("min_tokens", Neutral::Numbers(&[0.0])),
    ("top_logprobs", Neutral::Numbers(&[0.0])),
    ("logprobs", Neutral::False),
    ("ignore_eos", Neutral::False),
    ("echo", Neutral::False),
    ("parallel_tool_calls", Neutral::True),
    ("logit_bias", Neutral::Empty),
    ("stop_token_ids", Neutral::Empty),
    ("functions", Neutral::Empty),
    ("response_format", Neutral::Text),
    ("modalities", Neutral::Text),
    ("function_call", Neutral::Nothing),
    ("structured_outputs", Neutral::Nothing),
    ("grammar", Neutral::Nothing),
    ("audio", Neutral::Nothing),
    ("prediction", Neutral::Nothing),
    ("web_search_options", Neutral::Nothing),
];

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    for (name, neutral) in UNSUPPORTED {
        let Some(value) = fields.take(name) else { continue };
        if neutral.holds(&value) {
            continue;
        }
        return Err(unsupported(name, &format!("only {} is", neutral.words())));
    }
    Ok(())
}

impl Neutral {
    fn holds(&self, value: &Json) -> bool {
        match (self, value) {
            (Self::Numbers(allowed), value) => {
                number(value).is_some_and(|found| allowed.contains(&found))
            }
            (Self::False, Json::Bool(found)) => !found,
            (Self::True, Json::Bool(found)) => *found,
            (Self::Empty, Json::Object(members)) => members.iter().next().is_none(),
            (Self::Empty, Json::Array(items)) => items.is_empty(),
            (Self::Text, Json::Object(format)) => {
                format.get("type").and_then(Json::as_str) == Some("text")
            }
            (Self::Text, Json::Array(items)) => *items == ["text".into()],
            _ => false,
        }
    }

    fn words(&self) -> String {
        match self {
            Self::Numbers(allowed) => {
                let allowed: Vec<String> = allowed.iter().map(f64::to_string).collect();
                allowed.join(" or ")
            }
            Self::False => "false".to_owned(),
            Self::True => "true".to_owned(),
            Self::Empty => "an empty one".to_owned(),
            Self::Text => "plain text".to_owned(),
            Self::Nothing => "its absence".to_owned(),
        }
    }
}

fn unsupported(name: &str, allowed: &str) -> ApiError {
    ApiError::param(name, format!("{name}: this value is not supported yet: {allowed}"))
        .with_code("unsupported_value")
}

#[cfg(test)]
mod tests;
