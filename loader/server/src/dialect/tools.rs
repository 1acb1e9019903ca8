//! Parses `tools` and `tool_choice` of every dialect.

use shardpack_chat::{
    conversation::{Tool, ToolChoice, ToolKind},
    json::{Json, Object},
};

use super::fields::mismatch;
use crate::error::ApiError;

/// Tools of one request; clients with many servers of tools send some hundred.
pub(super) const TOOLS_MAX: usize = 1024;
/// Bytes of a tool's name: `OpenAI`'s limit is 64, prefixes of tool servers make some longer.
const NAME_BYTES_MAX: usize = 256;

/// Parses the `tools` of chat completions, responses or messages. Tools that run on somebody
/// else's servers cannot be called here, and agents send them unasked: they are left out and
/// added to `ignored`.
pub(super) fn parse_tools(
    tools: Vec<Json>,
    param: &str,
    ignored: &mut Vec<String>,
) -> Result<Vec<Tool>, ApiError> {
    let mut parsed = Vec::with_capacity(tools.len());
    add_tools(tools, param, &mut parsed, ignored)?;
    let mut names: Vec<&str> = parsed.iter().map(|tool| tool.name.as_str()).collect();
    names.sort_unstable();
    if let Some([name, _]) = names.array_windows().find(|[a, b]| a == b) {
        let message = format!("{param}: two tools are named {name:?}");
        return Err(ApiError::param(param, message));
    }
    Ok(parsed)
}

fn add_tools(
    tools: Vec<Json>,
    param: &str,
    parsed: &mut Vec<Tool>,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    if parsed.len().saturating_add(tools.len()) > TOOLS_MAX {
        let message = format!("{param}: {} of them: at most {TOOLS_MAX}", tools.len());
        return Err(ApiError::param(param, message));
    }
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("{param}[{index}]");
        let Json::Object(mut tool) = tool else { return Err(mismatch(&path, "an object", &tool)) };
        let kind = tool.get("type").and_then(Json::as_str).unwrap_or("function").to_owned();
        match kind.as_str() {
            // In messages, functions are of type custom.
            "custom" if tool.get("input_schema").is_none() => parsed.push(custom(&tool, &path)?),
            "function" | "custom" => parsed.push(function(&tool, &path)?),
            // A server's tools under one name, each a function of its own.
            "namespace" => {
                let Some(Json::Array(inner)) = tool.get_mut("tools").map(std::mem::take) else {
                    let path = path + ".tools";
                    return Err(ApiError::param(
                        path.clone(),
                        format!("{path}: expected an array"),
                    ));
                };
                // One level: what is below a namespace is functions.
                let is_deep = |tool: &Json| {
                    let kind = tool.as_object().and_then(|tool| tool.get("type"));
                    kind.and_then(Json::as_str) == Some("namespace")
                };
                if inner.iter().any(is_deep) {
                    let message = format!("{path}.tools: a namespace within a namespace");
                    return Err(ApiError::param(path + ".tools", message));
                }
                add_tools(inner, &format!("{path}.tools"), parsed, ignored)?;
            }
            _ => ignored.push(path),
        }
    }
    Ok(())
}

/// `{type, function: {name, …}}`, `{type, name, parameters, …}` or `{name, input_schema, …}`.
fn function(tool: &Object, path: &str) -> Result<Tool, ApiError> {
    let (members, path) = match tool.get("function") {
        Some(Json::Object(function)) => (function, format!("{path}.function")),
        Some(other) => return Err(mismatch(&format!("{path}.function"), "an object", other)),
        // The nested form is the first to be named in errors of `OpenAI`'s oldest dialect.
        None if tool.get("name").is_none() && tool.get("input_schema").is_none() => {
            (tool, format!("{path}.function"))
        }
        None => (tool, path.to_owned()),
    };
    let name = name(members, &path)?;
    let parameters = match members.get("parameters").or_else(|| members.get("input_schema")) {
        None | Some(Json::Null) => None,
        Some(schema @ (Json::Object(_) | Json::Bool(_))) => Some(schema.clone()),
        Some(other) => return Err(mismatch(&format!("{path}.parameters"), "an object", other)),
    };
    let strict = members.get("strict") == Some(&Json::Bool(true));
    let definition = if tool.get("function").is_some() {
        Json::Object(tool.clone())
    } else {
        definition(&name, members.get("description"), parameters.clone())
    };
    Ok(Tool { name, definition, parameters, strict, kind: ToolKind::Function })
}

/// A tool that takes free text: to the model, a function with one string.
fn custom(tool: &Object, path: &str) -> Result<Tool, ApiError> {
    let (members, path) = match tool.get("custom") {
        Some(Json::Object(custom)) => (custom, format!("{path}.custom")),
        _ => (tool, path.to_owned()),
    };
    let name = name(members, &path)?;
    let text = r#"{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}"#;
    let parameters = Json::parse(text.as_bytes()).expect("a constant");
    let definition = definition(&name, members.get("description"), Some(parameters.clone()));
    let (parameters, strict, kind) = (Some(parameters), false, ToolKind::Custom);
    Ok(Tool { name, definition, parameters, strict, kind })
}

fn name(members: &Object, path: &str) -> Result<String, ApiError> {
    let path = format!("{path}.name");
    match members.get("name").and_then(Json::as_str) {
        Some(name) if (1..=NAME_BYTES_MAX).contains(&name.len()) => Ok(name.to_owned()),
        Some(name) => {
            let found = name.len();
            let message = format!("{path}: expected 1 to {NAME_BYTES_MAX} bytes, found {found}");
            Err(ApiError::param(path, message))
        }
        None => {
            let message = format!("{path}: expected a string");
            Err(ApiError::param(path, message))
        }
    }
}

/// The form in which templates expect a function.
fn definition(name: &str, description: Option<&Json>, parameters: Option<Json>) -> Json {
    let mut function = Object::default();
    function.set("name", name.into());
    if let Some(description) = description {
        function.set("description", description.clone());
    }
    let any = || Json::parse(br#"{"type":"object","properties":{}}"#).expect("a constant");
    function.set("parameters", parameters.unwrap_or_else(any));
    let mut tool = Object::default();
    tool.set("type", "function".into());
    tool.set("function", Json::Object(function));
    Json::Object(tool)
}

/// Parses `tool_choice` of chat completions or responses and checks it against the tools.
pub(super) fn parse_tool_choice(
    choice: Option<&Json>,
    tools: &[Tool],
) -> Result<ToolChoice, ApiError> {
    let invalid = |path: &str, message: String| Err(ApiError::param(path, message));
    let choice = match choice {
        None => return Ok(ToolChoice::Auto),
        Some(Json::String(choice)) => match choice.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            other => {
                let message = format!(
                    "tool_choice: expected \"auto\", \"none\", \"required\" or an object, found {other:?}"
                );
                return invalid("tool_choice", message);
            }
        },
        Some(Json::Object(choice)) => {
            let kind = choice.get("type").and_then(Json::as_str).unwrap_or("function");
            match kind {
                "function" | "custom" | "tool" => match tool_name(choice) {
                    Some(name) => ToolChoice::Named(name.to_owned()),
                    None => {
                        return invalid(
                            "tool_choice",
                            "tool_choice: expected the name of a tool".to_owned(),
                        );
                    }
                },
                "allowed_tools" => allowed_tools(choice)?,
                "auto" => ToolChoice::Auto,
                "none" => ToolChoice::None,
                "any" | "required" => ToolChoice::Required,
                other => {
                    let message = format!("tool_choice.type: {other:?} is not supported");
                    return invalid("tool_choice.type", message);
                }
            }
        }
        Some(other) => return Err(mismatch("tool_choice", "a string or an object", other)),
    };
    check_choice(&choice, tools)?;
    Ok(choice)
}

/// Tools that are asked for must be there.
fn check_choice(choice: &ToolChoice, tools: &[Tool]) -> Result<(), ApiError> {
    let unknown = |name: &&String| !tools.iter().any(|tool| tool.name == **name);
    let (missing, needs_any) = match choice {
        ToolChoice::Auto | ToolChoice::None => (None, false),
        ToolChoice::Required => (None, true),
        ToolChoice::Named(name) => (Some(name).filter(unknown), true),
        ToolChoice::Allowed { names, required } => (names.iter().find(unknown), *required),
    };
    if let Some(name) = missing {
        let message = format!("tool_choice: {name:?} is not among the tools");
        return Err(ApiError::param("tool_choice", message));
    }
    if needs_any && tools.is_empty() {
        let message = "tool_choice: a call is required, but no tools are given";
        return Err(ApiError::param("tool_choice", message));
    }
    Ok(())
}

fn tool_name(choice: &Object) -> Option<&str> {
    let nested = ["function", "custom"].into_iter().find_map(|key| choice.get(key)?.as_object());
    nested.unwrap_or(choice).get("name")?.as_str()
}

fn allowed_tools(choice: &Object) -> Result<ToolChoice, ApiError> {
    let members = choice.get("allowed_tools").and_then(Json::as_object).unwrap_or(choice);
    let Some(Json::Array(tools)) = members.get("tools") else {
        let message = "tool_choice.tools: expected an array";
        return Err(ApiError::param("tool_choice.tools", message));
    };
    let names: Option<Vec<String>> =
        tools.iter().map(|tool| tool.as_object().and_then(tool_name).map(str::to_owned)).collect();
    let names = names.ok_or_else(|| {
        let message = "tool_choice.tools: expected tools with a name";
        ApiError::param("tool_choice.tools", message)
    })?;
    let required = members.get("mode").and_then(Json::as_str) == Some("required");
    Ok(ToolChoice::Allowed { names, required })
}
