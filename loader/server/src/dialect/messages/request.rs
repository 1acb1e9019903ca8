//! Parses messages requests.

use shardpack_chat::{
    conversation::{ChatRequest, Reasoning, ResponseFormat},
    json::{Json, Object},
};

use super::Options;
use crate::{
    dialect::{
        ParsedRequest, Prompt, WriterOptions,
        fields::{Fields, mismatch},
        params::{
            MESSAGES_MAX, Neutral, leftover, parse_limits, parse_messages, parse_response_format,
            parse_sampling, parse_template_kwargs, refuse_unsupported,
        },
        tools::{parse_tool_choice, parse_tools},
    },
    error::ApiError,
};

/// A block that one client changes in every request; with it no prefix would ever be found again.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Parameters that steer services which do not exist here.
const OF_THE_SERVICE: [&str; 5] =
    ["context_management", "mcp_servers", "container", "betas", "inference_geo"];

const UNSUPPORTED: [(&str, Neutral); 1] = [("n", Neutral::Numbers(&[1.0]))];

/// Parses a body.
pub(in crate::dialect) fn parse(body: Object) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(body);
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    let mut ignored = Vec::new();
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let text = system_text(&system)?;
        if !text.is_empty() {
            messages.push(message("system", text.into()));
        }
    }
    add_messages(fields.array("messages")?.unwrap_or_default(), &mut messages, &mut ignored)?;
    let messages = parse_messages(messages, "messages")?;
    let tools = fields.array("tools")?.unwrap_or_default();
    let tools = parse_tools(tools, "tools", &mut ignored)?;
    let choice = fields.take("tool_choice");
    let tool_choice = parse_tool_choice(choice.as_ref(), &tools)?;
    let parallel = choice.as_ref().and_then(Json::as_object);
    let parallel = parallel.and_then(|choice| choice.get("disable_parallel_tool_use"));
    let limits = parse_limits(&mut fields, &["max_tokens"], "stop_sequences")?;
    if limits.max_tokens.is_none() {
        return Err(ApiError::param("max_tokens", "max_tokens: expected a number"));
    }
    let sampling = parse_sampling(&mut fields)?;
    let mut reasoning = parse_thinking(&mut fields)?;
    let mut config = Fields::new(fields.object("output_config")?.unwrap_or_default());
    reasoning.effort = config.string("effort")?;
    let response_format = parse_format(&mut fields, &mut config)?;
    ignored.extend(config.into_names().into_iter().map(|name| format!("output_config.{name}")));
    let template_kwargs = parse_template_kwargs(&mut fields)?;
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    for name in OF_THE_SERVICE {
        if fields.take(name).is_some() {
            ignored.push(name.to_owned());
        }
    }
    // As the service does, a last assistant turn is continued (prefill).
    let continues = messages.last().is_some_and(|last| last.own_text().is_some());
    let request = ChatRequest {
        messages,
        continues,
        tools,
        tool_choice,
        parallel_tool_calls: parallel != Some(&Json::Bool(true)),
        response_format,
        reasoning,
        template_kwargs,
        sampling,
        limits,
        prediction: None,
    };
    let writer_options = WriterOptions::Messages(Options { stop: request.limits.stop.clone() });
    let ignored = leftover(fields, ignored);
    Ok(ParsedRequest {
        request,
        prompt: Prompt::Conversation,
        model,
        stream,
        ignored,
        writer_options,
    })
}

/// Text from a string or blocks.
fn system_text(system: &Json) -> Result<String, ApiError> {
    match system {
        Json::String(text) => Ok(text.clone()),
        Json::Array(blocks) => {
            let text = |(index, block): (usize, &Json)| {
                let text = block.as_object().and_then(|block| block.get("text")?.as_str());
                text.map(str::to_owned).ok_or_else(|| {
                    let path = format!("system[{index}].text");
                    ApiError::param(path.clone(), format!("{path}: expected a string"))
                })
            };
            let texts: Vec<String> =
                blocks.iter().enumerate().map(text).collect::<Result<_, _>>()?;
            let texts = texts.into_iter().filter(|text| !text.starts_with(BILLING_HEADER));
            Ok(texts.collect::<Vec<_>>().join("\n\n"))
        }
        other => Err(mismatch("system", "a string or an array", other)),
    }
}

fn message(role: &str, content: Json) -> Json {
    let mut message = Object::default();
    message.set("role", role.into());
    message.set("content", content);
    Json::Object(message)
}

/// Messages in the form of chat completions: results of tools become messages of their own.
fn add_messages(
    given: Vec<Json>,
    messages: &mut Vec<Json>,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    if given.is_empty() {
        return Err(ApiError::param("messages", "messages: expected at least one message"));
    }
    if given.len() > MESSAGES_MAX {
        let message = format!("messages: {} of them: at most {MESSAGES_MAX}", given.len());
        return Err(ApiError::param("messages", message));
    }
    for (index, given) in given.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        let Json::Object(mut given) = given else {
            return Err(mismatch(&path, "an object", &given));
        };
        let blocks = match given.get_mut("content").map(std::mem::take) {
            Some(Json::Array(blocks)) => blocks,
            Some(text @ Json::String(_)) => {
                given.set("content", text);
                messages.push(Json::Object(given));
                continue;
            }
            _ => {
                let path = path + ".content";
                let message = format!("{path}: expected a string or an array");
                return Err(ApiError::param(path, message));
            }
        };
        let is_assistant = given.get("role").and_then(Json::as_str) == Some("assistant");
        let mut turn = Turn { given, texts: Vec::new(), calls: Vec::new(), thinking: Vec::new() };
        for (number, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}.content[{number}]");
            turn.block(block, &path, messages, ignored)?;
        }
        if is_assistant || !turn.texts.is_empty() {
            messages.push(turn.finish());
        }
    }
    Ok(())
}

/// A message whose blocks are being sorted.
struct Turn {
    given: Object,
    texts: Vec<Json>,
    calls: Vec<Json>,
    thinking: Vec<String>,
}

impl Turn {
    fn block(
        &mut self,
        block: Json,
        path: &str,
        messages: &mut Vec<Json>,
        ignored: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let Json::Object(mut block) = block else {
            return Err(mismatch(path, "an object", &block));
        };
        let kind = block.get("type").and_then(Json::as_str).unwrap_or("text").to_owned();
        match kind.as_str() {
            "text" => {
                block.remove("cache_control");
                self.texts.push(Json::Object(block));
            }
            "tool_use" => self.calls.push(call(&block, path)?),
            "tool_result" => {
                // What was said before the result stays before it.
                if !self.texts.is_empty() {
                    messages.push(self.take_texts());
                }
                messages.push(result(block, path)?);
            }
            "thinking" => {
                let text = block.get("thinking").and_then(Json::as_str).unwrap_or_default();
                self.thinking.push(text.to_owned());
            }
            "document" => self.texts.push(document(&block, path)?),
            "image" | "container_upload" => {
                let message = format!("{path}: blocks of type {kind:?} are not supported");
                return Err(ApiError::param(path, message));
            }
            // Thinking that only its author can read, and tools of the service.
            _ => ignored.push(path.to_owned()),
        }
        Ok(())
    }

    fn take_texts(&mut self) -> Json {
        let role = self.given.get("role").and_then(Json::as_str).unwrap_or("user").to_owned();
        message(&role, Json::Array(std::mem::take(&mut self.texts)))
    }

    fn finish(mut self) -> Json {
        let mut message = std::mem::take(&mut self.given);
        message.set("content", Json::Array(self.texts));
        if !self.thinking.is_empty() {
            message.set("reasoning_content", self.thinking.join("\n").into());
        }
        if !self.calls.is_empty() {
            message.set("tool_calls", Json::Array(self.calls));
        }
        Json::Object(message)
    }
}

fn string(block: &Object, key: &str, path: &str) -> Result<String, ApiError> {
    block.get(key).and_then(Json::as_str).map(str::to_owned).ok_or_else(|| {
        let path = format!("{path}.{key}");
        ApiError::param(path.clone(), format!("{path}: expected a string"))
    })
}

fn call(block: &Object, path: &str) -> Result<Json, ApiError> {
    let mut function = Object::default();
    function.set("name", string(block, "name", path)?.into());
    let input = block.get("input").cloned();
    function.set("arguments", input.unwrap_or_else(|| Json::Object(Object::default())));
    let mut call = Object::default();
    call.set("id", string(block, "id", path)?.into());
    call.set("type", "function".into());
    call.set("function", Json::Object(function));
    Ok(Json::Object(call))
}

fn result(mut block: Object, path: &str) -> Result<Json, ApiError> {
    let id = string(&block, "tool_use_id", path)?;
    let content = match block.remove("content") {
        // What a model of text cannot read is replaced by a note where messages are normalised.
        Some(Json::Array(parts)) => Json::Array(parts.into_iter().map(found_tool).collect()),
        Some(other) => other,
        None => "".into(),
    };
    let Json::Object(mut result) = message("tool", content) else { unreachable!("made above") };
    result.set("tool_call_id", id.into());
    Ok(Json::Object(result))
}

/// The tool that a search found, in words: the request's tools hold its definition. Another part as
/// it is.
fn found_tool(part: Json) -> Json {
    let object = part.as_object();
    let reference =
        object.filter(|object| object.get("type").and_then(Json::as_str) == Some("tool_reference"));
    let Some(name) = reference.and_then(|object| object.get("tool_name")?.as_str()) else {
        return part;
    };
    let mut found = Object::default();
    found.set("type", "text".into());
    found.set("text", format!("The tool {name} can be called now.").into());
    Json::Object(found)
}

/// A document of plain text.
fn document(block: &Object, path: &str) -> Result<Json, ApiError> {
    let source = block.get("source").and_then(Json::as_object);
    let is_text = source.and_then(|source| source.get("type")?.as_str()) == Some("text");
    let text = source.and_then(|source| source.get("data")?.as_str()).filter(|_| is_text);
    let Some(text) = text else {
        let message = format!("{path}.source: only documents of plain text are supported");
        return Err(ApiError::param(format!("{path}.source"), message));
    };
    let mut part = Object::default();
    part.set("type", "text".into());
    part.set("text", text.into());
    Ok(Json::Object(part))
}

fn parse_thinking(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let mut reasoning = Reasoning::default();
    if let Some(thinking) = fields.object("thinking")? {
        let mut thinking = Fields::new(thinking);
        reasoning.enabled = match thinking.string("type")?.as_deref() {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            // The model decides, as its template has it.
            Some("adaptive") | None => None,
            Some(other) => {
                let message = format!(
                    "thinking.type: expected enabled, disabled or adaptive, found {other:?}"
                );
                return Err(ApiError::param("thinking.type", message));
            }
        };
        let budget = thinking.integer("budget_tokens")?;
        reasoning.budget_tokens = budget.and_then(|budget| u32::try_from(budget).ok());
    }
    Ok(reasoning)
}

/// `output_config.format`, or `output_format` as it was first called.
fn parse_format(fields: &mut Fields, config: &mut Fields) -> Result<ResponseFormat, ApiError> {
    let format = config.object("format")?;
    let older = fields.object("output_format")?;
    parse_response_format(format.or(older), "output_format")
}
