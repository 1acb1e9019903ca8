//! Parses `tools` and `tool_choice` of every dialect.

use shardpack_chat::{
    conversation::{NamespacedName, Tool, ToolChoice, ToolFormat, ToolKind},
    json::{Json, Object},
};

use std::collections::BTreeMap;

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
    parse_tools_and_more(tools, param, Vec::new(), ignored)
}

/// The same with tools that the conversation brings, each list with its path: a later definition
/// of the same tool takes the place of an earlier one.
pub(super) fn parse_tools_and_more(
    tools: Vec<Json>,
    param: &str,
    more: Vec<(String, Vec<Json>)>,
    ignored: &mut Vec<String>,
) -> Result<Vec<Tool>, ApiError> {
    let mut parsed = Vec::with_capacity(tools.len());
    add_tools(tools, param, None, &mut parsed, ignored)?;
    for (path, tools) in more {
        let mut brought = Vec::new();
        add_tools(tools, &path, None, &mut brought, ignored)?;
        for tool in brought {
            let same = parsed.iter_mut().find(|old| old.client_name() == tool.client_name());
            match same {
                Some(old) => *old = tool,
                None => parsed.push(tool),
            }
        }
    }
    if parsed.len() > TOOLS_MAX {
        let message = format!("{param}: {} of them: at most {TOOLS_MAX}", parsed.len());
        return Err(ApiError::param(param, message));
    }
    qualify(&mut parsed);
    let mut names: Vec<&str> = parsed.iter().map(|tool| tool.name.as_str()).collect();
    names.sort_unstable();
    if let Some([name, _]) = names.array_windows().find(|[a, b]| a == b) {
        let message = format!("{param}: two tools are named {name:?}");
        return Err(ApiError::param(param, message));
    }
    Ok(parsed)
}

/// A tool within a namespace keeps its name where no other has it; else the model sees the
/// namespace before it.
fn qualify(tools: &mut [Tool]) {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for tool in tools.iter() {
        *counts.entry(tool.name.clone()).or_default() += 1;
    }
    for tool in tools.iter_mut().filter(|tool| counts[&tool.name] > 1) {
        if let Some(own) = &tool.namespaced {
            tool.rename(qualified(&own.namespace, &own.name));
        }
    }
}

fn qualified(namespace: &str, name: &str) -> String {
    format!("{}__{name}", namespace.trim_end_matches('_'))
}

/// What the model calls a tool that the client knows by this name; also of tools that are gone.
pub(super) fn model_name(tools: &[Tool], namespace: Option<&str>, name: &str) -> String {
    let known = tools.iter().find(|tool| tool.client_name() == (namespace, name));
    match (known, namespace) {
        (Some(tool), _) => tool.name.clone(),
        (None, Some(namespace)) if tools.iter().any(|tool| tool.name == name) => {
            qualified(namespace, name)
        }
        (None, _) => name.to_owned(),
    }
}

fn add_tools(
    tools: Vec<Json>,
    param: &str,
    namespace: Option<&str>,
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
        let mut push = |tool: Tool| {
            let namespaced = namespace.map(|namespace| NamespacedName {
                namespace: namespace.to_owned(),
                name: tool.name.clone(),
            });
            parsed.push(Tool { namespaced, ..tool });
        };
        match kind.as_str() {
            // In messages, functions are of type custom.
            "custom" if tool.get("input_schema").is_none() => push(custom(&tool, &path)?),
            "function" | "custom" => push(function(&tool, &path)?),
            // Searched by the client; a search by the service leaves all tools callable.
            "tool_search" if tool.get("execution").and_then(Json::as_str) == Some("client") => {
                push(search(&tool));
            }
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
                let name = tool.get("name").and_then(Json::as_str);
                let name = name.filter(|name| !name.is_empty());
                add_tools(inner, &format!("{path}.tools"), name, parsed, ignored)?;
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
    let kind = ToolKind::Function;
    Ok(Tool { name, definition, parameters, strict, kind, format: None, namespaced: None })
}

/// What the model calls the client's search for tools.
pub(super) const SEARCH: &str = "tool_search";

/// The client's search for tools: to the model, a function like any other.
fn search(tool: &Object) -> Tool {
    let any = || {
        let text =
            r#"{"type":"object","properties":{"query":{"type":"string"}},"required":["query"]}"#;
        Json::parse(text.as_bytes()).expect("a constant")
    };
    let parameters = tool.get("parameters").filter(|schema| schema.as_object().is_some()).cloned();
    let parameters = Some(parameters.unwrap_or_else(any));
    let about = || "Finds further tools, which can be called afterwards.".into();
    let about = tool.get("description").cloned().unwrap_or_else(about);
    let definition = definition(SEARCH, Some(&about), parameters.clone());
    let (name, kind) = (SEARCH.to_owned(), ToolKind::Search);
    Tool { name, definition, parameters, strict: false, kind, format: None, namespaced: None }
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
    let (format, shown) = text_format(members, &path)?;
    let about = members.get("description").and_then(Json::as_str).unwrap_or_default();
    let about = [about, &shown].into_iter().filter(|text| !text.is_empty());
    let about = about.collect::<Vec<_>>().join("\n\n");
    let about = (!about.is_empty()).then(|| about.as_str().into());
    let definition = definition(&name, about.as_ref(), Some(parameters.clone()));
    let (parameters, strict, kind) = (Some(parameters), false, ToolKind::Custom);
    Ok(Tool { name, definition, parameters, strict, kind, format, namespaced: None })
}

/// Bytes of a custom tool's grammar.
const FORMAT_BYTES_MAX: usize = 64 << 10;

/// The form of a custom tool's text, and how the model is told of it. Forms that are not known
/// leave it free.
fn text_format(members: &Object, path: &str) -> Result<(Option<ToolFormat>, String), ApiError> {
    let Some(format) = members.get("format").and_then(Json::as_object) else {
        return Ok((None, String::new()));
    };
    // Chat completions have the grammar in a member of its own.
    let nested = format.get("grammar").and_then(Json::as_object);
    let grammar = nested.unwrap_or(format);
    let text = |key: &str| grammar.get(key).and_then(Json::as_str);
    let Some(definition) = text("definition").filter(|definition| !definition.is_empty()) else {
        return Ok((None, String::new()));
    };
    if definition.len() > FORMAT_BYTES_MAX {
        let path = format!("{path}.format.definition");
        let found = definition.len();
        let message = format!("{path}: {found} bytes: at most {FORMAT_BYTES_MAX}");
        return Err(ApiError::param(path, message));
    }
    let own = definition.to_owned();
    let (format, what) = match text("syntax") {
        Some("regex") => (ToolFormat::Regex(own), "match this regular expression"),
        Some("lark") => (ToolFormat::Lark(own), "follow this grammar in Lark"),
        _ => return Ok((None, String::new())),
    };
    Ok((Some(format), format!("The input must {what}:\n{definition}")))
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
                SEARCH => ToolChoice::Named(SEARCH.to_owned()),
                "function" | "custom" | "tool" => match chosen_name(choice, tools) {
                    Some(name) => ToolChoice::Named(name),
                    None => {
                        return invalid(
                            "tool_choice",
                            "tool_choice: expected the name of a tool".to_owned(),
                        );
                    }
                },
                "allowed_tools" => allowed_tools(choice, tools)?,
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

/// What the model calls the tool that a choice names as the client knows it.
fn chosen_name(choice: &Object, tools: &[Tool]) -> Option<String> {
    let name = tool_name(choice)?;
    let namespace = choice.get("namespace").and_then(Json::as_str);
    if namespace.is_some() || tools.iter().any(|tool| tool.name == name) {
        return Some(model_name(tools, namespace, name));
    }
    // By its name alone, wherever it stands.
    let own = tools.iter().find(|tool| tool.client_name().1 == name);
    Some(own.map_or_else(|| name.to_owned(), |tool| tool.name.clone()))
}

fn allowed_tools(choice: &Object, known: &[Tool]) -> Result<ToolChoice, ApiError> {
    let members = choice.get("allowed_tools").and_then(Json::as_object).unwrap_or(choice);
    let Some(Json::Array(tools)) = members.get("tools") else {
        let message = "tool_choice.tools: expected an array";
        return Err(ApiError::param("tool_choice.tools", message));
    };
    let name = |tool: &Json| chosen_name(tool.as_object()?, known);
    let names: Option<Vec<String>> = tools.iter().map(name).collect();
    let names = names.ok_or_else(|| {
        let message = "tool_choice.tools: expected tools with a name";
        ApiError::param("tool_choice.tools", message)
    })?;
    let required = members.get("mode").and_then(Json::as_str) == Some("required");
    Ok(ToolChoice::Allowed { names, required })
}
