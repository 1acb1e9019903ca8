//! Parses chat completion requests.

use std::collections::BTreeSet;

use shardpack_chat::{
    conversation::{ChatRequest, Message, Reasoning, Tool, ToolKind},
    json::{Json, Object},
};

use super::Options;
use crate::{
    dialect::{
        ParsedRequest, Prompt, WriterOptions,
        fields::{Fields, mismatch},
        params::{
            Neutral, leftover, parse_chat_logprobs, parse_constraints, parse_limits,
            parse_messages, parse_prediction, parse_response_format, parse_sampling,
            parse_stream_options, parse_template_kwargs, refuse_unsupported,
        },
        tools::{parse_tool_choice, parse_tools},
    },
    error::ApiError,
};

/// Parses a body.
pub(crate) fn parse(body: Object) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(body);
    let messages = parse_messages(fields.array("messages")?.unwrap_or_default(), "messages")?;
    let mut ignored = Vec::new();
    let tools = fields.array("tools")?.unwrap_or_default();
    let tools = parse_tools(tools, "tools", &mut ignored)?;
    let tool_choice = parse_tool_choice(fields.take("tool_choice").as_ref(), &tools)?;
    let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let template_kwargs = parse_template_kwargs(&mut fields)?;
    let mut sampling = parse_sampling(&mut fields)?;
    sampling.logprobs = parse_chat_logprobs(&mut fields)?;
    // The first is llama.cpp's.
    let names = ["n_predict", "max_tokens", "max_completion_tokens"];
    let limits = parse_limits(&mut fields, &names, "stop")?;
    let format = parse_response_format(fields.object("response_format")?, "response_format")?;
    let response_format = parse_constraints(&mut fields)?.unwrap_or(format);
    let reasoning = parse_reasoning(&mut fields)?;
    let prediction = parse_prediction(&mut fields)?;
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = parse_stream_options(&mut fields)?;
    let return_token_ids = fields.boolean("return_token_ids")?.unwrap_or(false);
    if return_token_ids {
        ignored.push("return_token_ids".to_owned());
    }
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    let continues = parse_continues(&mut fields, &messages)?;
    let request = ChatRequest {
        messages,
        continues,
        tools,
        tool_choice,
        parallel_tool_calls,
        response_format,
        reasoning,
        template_kwargs,
        sampling,
        limits,
        prediction,
    };
    let customs = customs(&request.tools);
    let writer_options = WriterOptions::Chat(Options { include_usage, customs });
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

/// Names of the tools that take free text.
fn customs(tools: &[Tool]) -> BTreeSet<String> {
    let custom = tools.iter().filter(|tool| tool.kind == ToolKind::Custom);
    custom.map(|tool| tool.name.clone()).collect()
}

/// `continue_final_message`, as vLLM has it.
fn parse_continues(fields: &mut Fields, messages: &[Message]) -> Result<bool, ApiError> {
    let name = "continue_final_message";
    if !fields.boolean(name)?.unwrap_or(false) {
        return Ok(false);
    }
    // Clients of `continue_final_message` send it too.
    fields.take("add_generation_prompt");
    if messages.last().and_then(Message::own_text).is_none() {
        let message = format!("{name}: the last message is not an assistant's text");
        return Err(ApiError::param(name, message));
    }
    Ok(true)
}

/// `reasoning_effort`, or `reasoning` as `OpenRouter` has it.
fn parse_reasoning(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let mut reasoning = Reasoning::default();
    if let Some(members) = fields.object("reasoning")? {
        let mut members = Fields::new(members);
        reasoning.effort = members.string("effort")?;
        reasoning.enabled = members.boolean("enabled")?;
        let budget = members.integer("max_tokens")?;
        reasoning.budget_tokens = budget.and_then(|budget| u32::try_from(budget).ok());
    }
    if let Some(effort) = fields.string("reasoning_effort")? {
        reasoning.effort = Some(effort);
    }
    for name in ["enable_thinking", "thinking", "think"] {
        match fields.take(name) {
            None => {}
            Some(Json::Bool(enabled)) => reasoning.enabled = Some(enabled),
            Some(Json::String(effort)) if name == "think" => {
                reasoning.enabled = Some(true);
                reasoning.effort = Some(effort);
            }
            Some(Json::Object(members)) if name == "thinking" => {
                let mut members = Fields::new(members);
                match members.string("type")?.as_deref() {
                    Some("enabled") => reasoning.enabled = Some(true),
                    Some("disabled") => reasoning.enabled = Some(false),
                    _ => {}
                }
                let budget = members.integer("budget_tokens")?;
                reasoning.budget_tokens = budget.and_then(|budget| u32::try_from(budget).ok());
            }
            Some(other) => return Err(mismatch(name, "true or false", &other)),
        }
    }
    if reasoning.effort.as_deref() == Some("none") {
        reasoning.enabled = Some(false);
    }
    Ok(reasoning)
}

/// Parameters that are known, but of which only one value is supported.
pub(super) const UNSUPPORTED: [(&str, Neutral); 7] = [
    ("best_of", Neutral::Numbers(&[1.0])),
    ("echo", Neutral::False),
    ("functions", Neutral::Empty),
    ("modalities", Neutral::Text),
    ("function_call", Neutral::Nothing),
    ("audio", Neutral::Nothing),
    ("web_search_options", Neutral::Nothing),
];

#[cfg(test)]
mod tests;
