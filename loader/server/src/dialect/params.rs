//! Parameters that several dialects have under the same names.

use shardpack_chat::{
    conversation::{Limits, Message, ResponseFormat, SamplingRequest},
    json::{Json, Object},
    template::RESERVED,
};
use shardpack_engine_api::TokenId;

use super::fields::{Fields, integer, mismatch, number};
use crate::error::ApiError;

/// Most messages of one request: more than any context holds of the shortest turns.
pub(super) const MESSAGES_MAX: usize = 16_384;
/// Most stop texts of one request and most bytes of each: all are searched for in every delta.
pub(super) const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Most stop tokens of one request: all are compared with every token.
const STOP_TOKENS_MAX: usize = 256;
/// Most entries of `logit_bias`; `OpenAI`'s limit is 300.
const LOGIT_BIAS_MAX: usize = 4096;
/// Most choices (`n`): `OpenAI`'s limit.
const CHOICES_MAX: u32 = 128;
/// Most `top_logprobs`: `OpenAI`'s limit.
const TOP_LOGPROBS_MAX: u32 = 20;
/// Most bytes of a grammar.
pub(super) const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Most bytes of a regex. Compiling cannot be interrupted: the worst of so many bytes, Unicode classes,
/// were measured at 1.1 s and 120 MB of memory.
pub(super) const PATTERN_BYTES_MAX: usize = 64 << 10;
/// Most texts of a `choice` constraint, and most bytes of them all.
const CHOICE_TEXTS_MAX: usize = 4096;
const CHOICE_BYTES_MAX: usize = 256 << 10;
/// Most names listed in the header of ignored parameters, which proxies bound.
const IGNORED_MAX: usize = 32;

/// Parameters that never change the output.
const WITHOUT_EFFECT: [&str; 14] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "cache_prompt",
    "cache_control",
    "moderation",
    "verbosity",
    "request_id",
    "cache_salt",
];

/// Normalises messages in the form of chat completions.
pub(super) fn parse_messages(messages: Vec<Json>, param: &str) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        let message = format!("{param}: expected at least one message");
        return Err(ApiError::param(param, message));
    }
    if messages.len() > MESSAGES_MAX {
        let message = format!("{param}: {} of them: at most {MESSAGES_MAX}", messages.len());
        return Err(ApiError::param(param, message));
    }
    let normalise = |(index, message)| {
        Message::normalise(message).map_err(|error| {
            let path = format!("{param}[{index}]{}", error.path);
            let message = format!("{path}: {}", error.message);
            ApiError::param(path, message)
        })
    };
    messages.into_iter().enumerate().map(normalise).collect()
}

/// Variables for the template.
pub(super) fn parse_template_kwargs(fields: &mut Fields) -> Result<Object, ApiError> {
    let kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    for name in RESERVED {
        if kwargs.get(name).is_some() {
            let path = format!("chat_template_kwargs.{name}");
            let message = format!("{path}: this variable is set by the server");
            return Err(ApiError::param(path, message));
        }
    }
    Ok(kwargs)
}

/// Sampling parameters, under the names of `OpenAI` and vLLM.
pub(super) fn parse_sampling(fields: &mut Fields) -> Result<SamplingRequest, ApiError> {
    Ok(SamplingRequest {
        temperature: ranged(fields, "temperature", 0.0..=2.0)?,
        seed: parse_seed(fields)?,
        top_p: positive(fields, "top_p", 1.0)?,
        top_k: parse_top_k(fields)?,
        min_p: ranged(fields, "min_p", 0.0..=1.0)?,
        presence_penalty: ranged(fields, "presence_penalty", -2.0..=2.0)?,
        frequency_penalty: ranged(fields, "frequency_penalty", -2.0..=2.0)?,
        repetition_penalty: repetition_penalty(fields)?,
        logit_bias: parse_logit_bias(fields)?,
        logprobs: None,
        choices: bounded(fields, "n", 1, CHOICES_MAX)?,
    })
}

/// Under its name here, or llama.cpp's.
fn repetition_penalty(fields: &mut Fields) -> Result<Option<f32>, ApiError> {
    let other = positive(fields, "repeat_penalty", 100.0)?;
    Ok(positive(fields, "repetition_penalty", 100.0)?.or(other))
}

/// A number within a range.
pub(super) fn ranged(
    fields: &mut Fields,
    name: &str,
    range: std::ops::RangeInclusive<f64>,
) -> Result<Option<f32>, ApiError> {
    match fields.number(name)? {
        Some(value) if !range.contains(&value) => {
            let (low, high) = range.into_inner();
            let message = format!("{name}: expected a number from {low} to {high}, found {value}");
            Err(ApiError::param(name, message))
        }
        value => Ok(value.map(|value| value as f32)),
    }
}

fn positive(fields: &mut Fields, name: &str, most: f64) -> Result<Option<f32>, ApiError> {
    let value = ranged(fields, name, 0.0..=most)?;
    if value == Some(0.0) {
        let message = format!("{name}: expected a number above 0 and up to {most}, found 0");
        return Err(ApiError::param(name, message));
    }
    Ok(value)
}

fn bounded(
    fields: &mut Fields,
    name: &str,
    least: u32,
    most: u32,
) -> Result<Option<u32>, ApiError> {
    let Some(value) = fields.integer(name)? else { return Ok(None) };
    match u32::try_from(value) {
        Ok(value) if (least..=most).contains(&value) => Ok(Some(value)),
        _ => {
            let message = format!("{name}: expected {least} to {most}, found {value}");
            Err(ApiError::param(name, message))
        }
    }
}

/// Any 64 bits are a seed; negative ones are as good as others.
fn parse_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(seed) = fields.integer("seed")? else { return Ok(None) };
    let bits = u64::try_from(seed).or_else(|_| i64::try_from(seed).map(i64::cast_unsigned));
    bits.map(Some).map_err(|_| ApiError::param("seed", "seed: expected 64 bits"))
}

/// 0 and -1 are no limit.
pub(super) fn parse_top_k(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let Some(value) = fields.integer("top_k")? else { return Ok(None) };
    if value < -1 {
        let message = format!("top_k: expected -1 or more, found {value}");
        return Err(ApiError::param("top_k", message));
    }
    Ok(Some(u32::try_from(value.max(0)).unwrap_or(u32::MAX)))
}

fn parse_logit_bias(fields: &mut Fields) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let members = fields.object("logit_bias")?.unwrap_or_default().into_members();
    if members.len() > LOGIT_BIAS_MAX {
        let message = format!("logit_bias: {} of them: at most {LOGIT_BIAS_MAX}", members.len());
        return Err(ApiError::param("logit_bias", message));
    }
    let entry = |(key, value): (String, Json)| {
        let path = || format!("logit_bias.{key}");
        let token = key.parse().map_err(|_| {
            ApiError::param(
                path(),
                format!("{}: expected the number of a token as the key", path()),
            )
        })?;
        match number(&value) {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((TokenId(token), bias as f32)),
            _ => {
                let message = format!("{}: expected a number from -100 to 100", path());
                Err(ApiError::param(path(), message))
            }
        }
    };
    members.into_iter().map(entry).collect()
}

/// `logprobs: true` with `top_logprobs`, as chat completions have them.
pub(super) fn parse_chat_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = bounded(fields, "top_logprobs", 0, TOP_LOGPROBS_MAX)?;
    if let (false, Some(1..)) = (wanted, top) {
        let message = "top_logprobs: needs logprobs to be true";
        return Err(ApiError::param("top_logprobs", message));
    }
    Ok(wanted.then(|| top.unwrap_or(0)))
}

/// `top_logprobs` or `logprobs` alone, as a number of alternatives.
pub(super) fn parse_logprobs_count(
    fields: &mut Fields,
    name: &str,
) -> Result<Option<u32>, ApiError> {
    bounded(fields, name, 0, TOP_LOGPROBS_MAX)
}

/// Limits of the output; of several names of `max_tokens` the last counts.
pub(super) fn parse_limits(
    fields: &mut Fields,
    max_names: &[&str],
    stop_name: &str,
) -> Result<Limits, ApiError> {
    let mut max_tokens = None;
    for &name in max_names {
        if let Some(value) = fields.integer(name)? {
            // Negative numbers are no limit, as for llama.cpp and LM Studio.
            if value < 0 {
                continue;
            }
            if value == 0 {
                let message =
                    format!("{name}: expected at least 1, or -1 for no limit, found {value}");
                return Err(ApiError::param(name, message));
            }
            max_tokens = Some(u32::try_from(value).unwrap_or(u32::MAX));
        }
    }
    let min_tokens = bounded(fields, "min_tokens", 0, u32::MAX)?.unwrap_or(0);
    if max_tokens.is_some_and(|most| min_tokens > most) {
        let message = format!("min_tokens: {min_tokens} is more than the most tokens asked for");
        return Err(ApiError::param("min_tokens", message));
    }
    Ok(Limits {
        max_tokens,
        min_tokens,
        ignore_stop_tokens: fields.boolean("ignore_eos")?.unwrap_or(false),
        stop: parse_stops(fields, stop_name)?,
        stop_tokens: parse_stop_tokens(fields)?,
    })
}

fn parse_stops(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take(name) {
        None => Vec::new(),
        Some(stop @ Json::String(_)) => vec![stop],
        Some(Json::Array(stops)) => stops,
        Some(other) => return Err(mismatch(name, "a string or an array of strings", &other)),
    };
    // An empty text would end every answer at once: clients that send one mean none.
    let empty = Json::String(String::new());
    let stops: Vec<Json> = stops.into_iter().filter(|stop| *stop != empty).collect();
    if stops.len() > STOPS_MAX {
        let message = format!("{name}: {} texts: at most {STOPS_MAX}", stops.len());
        return Err(ApiError::param(name, message));
    }
    let stop = |(index, stop)| match stop {
        Json::String(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text),
        Json::String(text) => {
            let found = text.len();
            let message = format!("{name}: expected 1 to {STOP_BYTES_MAX} bytes, found {found}");
            Err(ApiError::param(format!("{name}[{index}]"), message))
        }
        other => Err(mismatch(&format!("{name}[{index}]"), "a string", &other)),
    };
    stops.into_iter().enumerate().map(stop).collect()
}

fn parse_stop_tokens(fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    let name = "stop_token_ids";
    // Some clients send an empty object for none.
    let tokens = match fields.take(name) {
        None => Vec::new(),
        Some(Json::Object(members)) if members.iter().next().is_none() => Vec::new(),
        Some(Json::Array(tokens)) => tokens,
        Some(other) => return Err(mismatch(name, "an array", &other)),
    };
    if tokens.len() > STOP_TOKENS_MAX {
        let message = format!("{name}: {} of them: at most {STOP_TOKENS_MAX}", tokens.len());
        return Err(ApiError::param(name, message));
    }
    tokens.iter().enumerate().map(|(index, value)| parse_token(value, name, index)).collect()
}

/// A token's number.
pub(crate) fn parse_token(value: &Json, name: &str, index: usize) -> Result<TokenId, ApiError> {
    integer(value).and_then(|value| u32::try_from(value).ok()).map(TokenId).ok_or_else(|| {
        let path = format!("{name}[{index}]");
        ApiError::param(path.clone(), format!("{path}: expected the number of a token"))
    })
}

/// `stream_options.include_usage`.
pub(super) fn parse_stream_options(fields: &mut Fields) -> Result<bool, ApiError> {
    let mut options = Fields::new(fields.object("stream_options")?.unwrap_or_default());
    Ok(options.boolean("include_usage")?.unwrap_or(false))
}

/// `response_format` of chat completions or `text.format` of responses.
pub(super) fn parse_response_format(
    format: Option<Object>,
    param: &'static str,
) -> Result<ResponseFormat, ApiError> {
    let Some(format) = format else { return Ok(ResponseFormat::Text) };
    match format.get("type").and_then(Json::as_str) {
        None | Some("text") => Ok(ResponseFormat::Text),
        // llama.cpp, Together and Fireworks take a schema here.
        Some("json_object") => match format.get("schema") {
            Some(schema @ (Json::Object(_) | Json::Bool(_))) => {
                Ok(ResponseFormat::JsonSchema { schema: schema.clone(), strict: false, param })
            }
            None | Some(Json::Null) => Ok(ResponseFormat::JsonObject),
            Some(other) => Err(mismatch(&format!("{param}.schema"), "an object", other)),
        },
        Some("json_schema") => {
            let members = format.get("json_schema").and_then(Json::as_object).unwrap_or(&format);
            let Some(schema @ (Json::Object(_) | Json::Bool(_))) = members.get("schema") else {
                let message = format!("{param}: a json_schema needs a schema");
                return Err(ApiError::param(param, message));
            };
            let strict = members.get("strict") == Some(&Json::Bool(true));
            Ok(ResponseFormat::JsonSchema { schema: schema.clone(), strict, param })
        }
        Some("grammar" | "lark") => {
            let text = format.get("grammar").and_then(Json::as_str);
            let text = text.ok_or_else(|| {
                ApiError::param(param, format!("{param}: a grammar needs its text"))
            })?;
            check_bytes(text, GRAMMAR_BYTES_MAX, &format!("{param}.grammar"))?;
            grammar(text.to_owned(), param)
        }
        Some("regex") => {
            let named = |name| Some((name, format.get(name)?.as_str()?));
            let (name, text) = named("pattern").or_else(|| named("regex")).ok_or_else(|| {
                ApiError::param(param, format!("{param}: a regex needs its pattern"))
            })?;
            check_bytes(text, PATTERN_BYTES_MAX, &format!("{param}.{name}"))?;
            Ok(ResponseFormat::Regex(text.to_owned()))
        }
        Some(other) => {
            let message = format!("{param}: type {other:?} is not supported");
            Err(ApiError::param(param, message))
        }
    }
}

/// `OpenAI`'s predicted outputs: `{"type": "content", "content": text}`, or texts as parts.
pub(super) fn parse_prediction(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    const PARAM: &str = "prediction";
    let Some(members) = fields.object(PARAM)? else { return Ok(None) };
    let mut members = Fields::new(members);
    let kind = members.string("type")?.unwrap_or_default();
    if kind != "content" {
        let message = format!("{PARAM}: expected type \"content\", found {kind:?}");
        return Err(ApiError::param(PARAM, message));
    }
    let wrong = || {
        let param = format!("{PARAM}.content");
        let message = format!("{param}: expected a text or a list of parts of type text");
        ApiError::param(param, message)
    };
    match members.take("content") {
        Some(Json::String(text)) => Ok(Some(text)),
        Some(Json::Array(parts)) => {
            let text = |part: &Json| {
                let part = part.as_object()?;
                let is_text = part.get("type").and_then(Json::as_str) == Some("text");
                part.get("text").and_then(Json::as_str).filter(|_| is_text).map(str::to_owned)
            };
            let texts: Option<Vec<String>> = parts.iter().map(text).collect();
            texts.map(|texts| Some(texts.concat())).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Constraints under the names of vLLM and llama.cpp: they win over `response_format`, which the
/// same request seldom has.
pub(super) fn parse_constraints(fields: &mut Fields) -> Result<Option<ResponseFormat>, ApiError> {
    let mut found = None;
    if let Some(members) = fields.object("structured_outputs")? {
        let mut members = Fields::new(members);
        found = constraint(&mut members, "", "structured_outputs")?;
    }
    // llama.cpp's name for a schema.
    if let Some(schema) = fields.take("json_schema") {
        let param = "json_schema";
        match schema {
            Json::Object(_) | Json::Bool(_) => {
                found = Some(ResponseFormat::JsonSchema { schema, strict: false, param });
            }
            other => return Err(mismatch(param, "an object", &other)),
        }
    }
    Ok(constraint(fields, "guided_", "guided_json")?.or(found))
}

fn constraint(
    fields: &mut Fields,
    prefix: &str,
    param: &'static str,
) -> Result<Option<ResponseFormat>, ApiError> {
    let named = |name: &str| format!("{prefix}{name}");
    let mut found = None;
    match fields.take(&named("json")) {
        None => {}
        Some(Json::String(text)) => {
            let schema = Json::parse(text.as_bytes()).map_err(|error| {
                ApiError::param(param, format!("{param}: the schema is not JSON: {error}"))
            })?;
            found = Some(ResponseFormat::JsonSchema { schema, strict: false, param });
        }
        Some(schema) => {
            found = Some(ResponseFormat::JsonSchema { schema, strict: false, param });
        }
    }
    if let Some(text) = bounded_text(fields, &named("regex"), PATTERN_BYTES_MAX)? {
        found = Some(ResponseFormat::Regex(text));
    }
    let shown = if prefix.is_empty() { format!("{param}.grammar") } else { named("grammar") };
    if let Some(text) = bounded_text(fields, &named("grammar"), GRAMMAR_BYTES_MAX)? {
        found = Some(grammar(text, &shown)?);
    }
    // llama.cpp's name.
    if prefix == "guided_"
        && let Some(text) = bounded_text(fields, "grammar", GRAMMAR_BYTES_MAX)?
    {
        found = Some(grammar(text, "grammar")?);
    }
    let choice = named("choice");
    if let Some(texts) = fields.array(&choice)? {
        let text = |(index, text)| match text {
            Json::String(text) => Ok(text),
            other => Err(mismatch(&format!("{choice}[{index}]"), "a string", &other)),
        };
        if texts.is_empty() || texts.len() > CHOICE_TEXTS_MAX {
            let message = format!("{choice}: expected 1 to {CHOICE_TEXTS_MAX} texts");
            return Err(ApiError::param(choice, message));
        }
        let texts: Vec<String> =
            texts.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
        let bytes: usize = texts.iter().map(String::len).sum();
        if bytes > CHOICE_BYTES_MAX {
            let message = format!(
                "{choice}: expected texts of at most {CHOICE_BYTES_MAX} bytes together, found {bytes}"
            );
            return Err(ApiError::param(choice, message));
        }
        found = Some(ResponseFormat::Choice(texts));
    }
    Ok(found)
}

/// A grammar in Lark; one in GBNF is named as such.
fn grammar(text: String, param: &str) -> Result<ResponseFormat, ApiError> {
    if is_gbnf(&text) {
        let message = format!(
            "{param}: this is GBNF (`::=`); expected a grammar in Lark as llguidance reads it, such \
             as start: \"yes\" | \"no\""
        );
        return Err(ApiError::param(param, message).with_code("unsupported_value"));
    }
    Ok(ResponseFormat::Grammar(text))
}

/// llama.cpp's clients send GBNF, and vLLM's may.
fn is_gbnf(text: &str) -> bool {
    text.lines().any(|line| {
        let rule = line.split_once("::=").map(|(name, _)| name.trim());
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        rule.is_some_and(|name| !name.is_empty() && name.chars().all(is_name))
    })
}

fn bounded_text(
    fields: &mut Fields,
    name: &str,
    bytes_max: usize,
) -> Result<Option<String>, ApiError> {
    let text = fields.string(name)?;
    text.iter().try_for_each(|text| check_bytes(text, bytes_max, name))?;
    Ok(text)
}

/// Refuses a text that would take long or much memory to compile.
pub(super) fn check_bytes(text: &str, bytes_max: usize, name: &str) -> Result<(), ApiError> {
    if text.len() > bytes_max {
        let message = format!("{name}: expected at most {bytes_max} bytes, found {}", text.len());
        return Err(ApiError::param(name, message));
    }
    Ok(())
}

/// Values of an unsupported parameter that have no effect.
pub(super) enum Neutral {
    /// These numbers.
    Numbers(&'static [f64]),
    /// `false`.
    False,
    /// An object or array without members.
    Empty,
    /// An array of `text` alone.
    Text,
    /// No value at all.
    Nothing,
}

/// Refuses parameters that are known but of which only one value is supported.
pub(super) fn refuse_unsupported(
    fields: &mut Fields,
    unsupported: &[(&str, Neutral)],
) -> Result<(), ApiError> {
    for (name, neutral) in unsupported {
        let Some(value) = fields.take(name) else { continue };
        if !neutral.holds(&value) {
            return Err(refused(name, &format!("only {} is", neutral.words())));
        }
    }
    Ok(())
}

/// The error for an unsupported value.
fn refused(name: &str, allowed: &str) -> ApiError {
    ApiError::param(name, format!("{name}: this value is not supported: {allowed}"))
        .with_code("unsupported_value")
}

/// The names of unread parameters, apart from those that never change the output.
pub(super) fn leftover(mut fields: Fields, mut ignored: Vec<String>) -> Vec<String> {
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    ignored.extend(fields.into_names());
    ignored.truncate(IGNORED_MAX);
    ignored
}

impl Neutral {
    pub(super) fn holds(&self, value: &Json) -> bool {
        match (self, value) {
            (Self::Numbers(allowed), value) => {
                number(value).is_some_and(|found| allowed.contains(&found))
            }
            (Self::False, Json::Bool(found)) => !found,
            (Self::Empty, Json::Object(members)) => members.iter().next().is_none(),
            (Self::Empty, Json::Array(items)) => items.is_empty(),
            (Self::Empty, Json::String(text)) => text.is_empty(),
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
            Self::Empty => "an empty one".to_owned(),
            Self::Text => "plain text".to_owned(),
            Self::Nothing => "its absence".to_owned(),
        }
    }
}
