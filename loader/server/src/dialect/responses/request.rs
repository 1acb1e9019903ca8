//! Parses responses requests.

use shardpack_chat::{
    conversation::{ChatRequest, Reasoning, ResponseFormat, Tool, ToolChoice},
    json::{Json, Object},
};

use super::{
    ClientTool, Options,
    compaction::{self, Compaction},
    input::{brought_tools, parse_input},
    references,
};
use crate::{
    dialect::{
        ParsedRequest, Prompt, StoredItems, WriterOptions,
        fields::Fields,
        params::{
            Neutral, leftover, parse_limits, parse_logprobs_count, parse_messages,
            parse_response_format, parse_sampling, parse_template_kwargs, refuse_unsupported,
        },
        tools::{model_name, parse_tool_choice, parse_tools_and_more},
    },
    error::ApiError,
};

/// Parses a body.
pub(in crate::dialect) fn parse(
    body: Object,
    earlier: StoredItems<'_>,
) -> Result<ParsedRequest, ApiError> {
    let mut options = Options::of(&body);
    let mut fields = Fields::new(body);
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    let mut ignored = Vec::new();
    let instructions = fields.string("instructions")?;
    let input = join(fields.string("previous_response_id")?, fields.take("input"), earlier)?;
    let mut input = references::resolve(input, earlier, &mut ignored)?;
    options.compaction = Compaction::take(&mut input)?;
    options.store = fields.boolean("store")?.unwrap_or(true);
    options.items = items(input.as_ref()).filter(|_| options.store).unwrap_or_default();
    let tools = fields.array("tools")?.unwrap_or_default();
    let brought = brought_tools(input.as_ref());
    let mut ignored_tools = Vec::new();
    let tools = parse_tools_and_more(tools, "tools", brought, &mut ignored_tools)?;
    let name = |namespace: Option<&str>, name: &str| model_name(&tools, namespace, name);
    let mut messages = parse_input(instructions, input, &name, &mut ignored)?;
    ignored.append(&mut ignored_tools);
    let compacts = !options.compaction.is_none();
    if compacts {
        messages.push(compaction::request());
    }
    let messages = parse_messages(messages, "input")?;
    let tool_choice = parse_tool_choice(fields.take("tool_choice").as_ref(), &tools)?;
    // A summary is text, whatever answers are.
    let tool_choice = if compacts { ToolChoice::None } else { tool_choice };
    let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let template_kwargs = parse_template_kwargs(&mut fields)?;
    let mut text = Fields::new(fields.object("text")?.unwrap_or_default());
    let response_format = parse_response_format(text.object("format")?, "text.format")?;
    let response_format = if compacts { ResponseFormat::Text } else { response_format };
    let mut sampling = parse_sampling(&mut fields)?;
    sampling.choices = None;
    let wants_logprobs = wants_logprobs(&mut fields)?;
    let top = parse_logprobs_count(&mut fields, "top_logprobs")?;
    sampling.logprobs = wants_logprobs.then(|| top.unwrap_or(0));
    let limits = parse_limits(&mut fields, &["max_output_tokens"], "stop")?;
    let reasoning = parse_reasoning(&mut fields)?;
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    // They change nothing here: nothing is left out, and nothing is obfuscated.
    // Calls of tools that run on a service are all that `max_tool_calls` counts.
    for name in ["include", "stream_options", "truncation", "client_metadata", "max_tool_calls"] {
        fields.take(name);
    }
    let client_tool = |tool: &Tool| {
        let (kind, namespaced) = (tool.kind, tool.namespaced.clone());
        (tool.name.clone(), ClientTool { kind, namespaced })
    };
    let tools_by_name = tools.iter().map(client_tool).collect();
    let request = ChatRequest {
        messages,
        continues: false,
        tools,
        tool_choice,
        parallel_tool_calls,
        response_format,
        reasoning,
        template_kwargs,
        sampling,
        limits,
        prediction: None,
    };
    let writer_options = WriterOptions::Responses(Box::new(Options { tools_by_name, ..options }));
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

/// Parses the body of a request for a summary of a conversation.
pub(in crate::dialect) fn parse_compact(
    mut body: Object,
    earlier: StoredItems<'_>,
) -> Result<ParsedRequest, ApiError> {
    let previous = body.get("previous_response_id").and_then(Json::as_str).map(str::to_owned);
    let whole = join(previous, body.get("input").cloned(), earlier)?;
    let history = Compaction::of_history(whole.as_ref());
    let mut items = items(whole.as_ref()).unwrap_or_default();
    let mut trigger = Object::default();
    trigger.set("type", "compaction_trigger".into());
    items.retain(|item| *item != Json::Object(trigger.clone()));
    items.push(Json::Object(trigger));
    body.set("input", Json::Array(items));
    body.set("store", Json::Bool(false));
    body.set("stream", Json::Bool(false));
    body.remove("previous_response_id");
    let mut parsed = parse(body, earlier)?;
    if let WriterOptions::Responses(options) = &mut parsed.writer_options {
        options.compaction = history;
    }
    Ok(parsed)
}

/// The items of an input; a text is one message.
pub(super) fn items(input: Option<&Json>) -> Option<Vec<Json>> {
    match input? {
        Json::Array(items) => Some(items.clone()),
        text @ Json::String(_) => {
            let mut message = Object::default();
            message.set("role", "user".into());
            message.set("content", text.clone());
            Some(vec![Json::Object(message)])
        }
        _ => None,
    }
}

/// The input after the items of the response that it continues.
fn join(
    previous: Option<String>,
    input: Option<Json>,
    earlier: StoredItems<'_>,
) -> Result<Option<Json>, ApiError> {
    let Some(previous) = previous else { return Ok(input) };
    let Some(earlier) = earlier(&previous) else {
        let message = format!(
            "previous_response_id: {previous:?} is not stored: send the whole conversation in input"
        );
        let error = ApiError::param("previous_response_id", message);
        return Err(error.with_code("previous_response_not_found"));
    };
    match (items(input.as_ref()), input) {
        (Some(own), _) => Ok(Some(Json::Array(earlier.iter().cloned().chain(own).collect()))),
        (None, None) => Ok(Some(Json::Array(earlier.to_vec()))),
        // Of the wrong kind, which is complained of where inputs are.
        (None, input) => Ok(input),
    }
}

/// `include: ["message.output_text.logprobs"]`.
fn wants_logprobs(fields: &mut Fields) -> Result<bool, ApiError> {
    let include = fields.array("include")?.unwrap_or_default();
    Ok(include.iter().any(|item| item.as_str() == Some("message.output_text.logprobs")))
}

fn parse_reasoning(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let mut members = Fields::new(fields.object("reasoning")?.unwrap_or_default());
    let effort = members.string("effort")?;
    let enabled = (effort.as_deref() == Some("none")).then_some(false);
    Ok(Reasoning { enabled, effort, budget_tokens: None })
}

/// Parameters that are known, but of which only one value is supported.
pub(super) const UNSUPPORTED: [(&str, Neutral); 4] = [
    ("conversation", Neutral::Nothing),
    ("background", Neutral::False),
    ("prompt", Neutral::Nothing),
    ("n", Neutral::Numbers(&[1.0])),
];

impl Options {
    /// Request fields that a response repeats.
    fn of(body: &Object) -> Self {
        let member = |name: &str| body.get(name).cloned().unwrap_or(Json::Null);
        let or = |name: &str, default: &str| match member(name) {
            Json::Null => Json::parse(default.as_bytes()).expect("a constant"),
            value => value,
        };
        Self {
            tools_by_name: std::collections::BTreeMap::new(),
            store: true,
            previous_response_id: member("previous_response_id"),
            items: Vec::new(),
            compaction: Compaction::None,
            keeper: None,
            instructions: member("instructions"),
            max_output_tokens: member("max_output_tokens"),
            metadata: or("metadata", "{}"),
            parallel_tool_calls: or("parallel_tool_calls", "true"),
            reasoning: or("reasoning", r#"{"effort":null,"summary":null}"#),
            temperature: member("temperature"),
            text: or("text", r#"{"format":{"type":"text"}}"#),
            tool_choice: or("tool_choice", "\"auto\""),
            tools: or("tools", "[]"),
            top_p: member("top_p"),
            user: member("user"),
        }
    }
}
