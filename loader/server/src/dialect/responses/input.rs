//! The items of a request's `input` as messages of a conversation.

use shardpack_chat::json::{Json, Object};

use super::compaction;
use crate::{
    dialect::{params::MESSAGES_MAX, to_json, tools::SEARCH},
    error::ApiError,
};

/// What the model calls a tool that the client knows by its namespace and name.
type ModelName<'a> = &'a dyn Fn(Option<&str>, &str) -> String;

/// Items that bring tools into the conversation.
const BRINGING: [&str; 2] = ["additional_tools", "tool_search_output"];

/// Tools that items of an input bring, each list with its path.
pub(super) fn brought_tools(input: Option<&Json>) -> Vec<(String, Vec<Json>)> {
    let Some(Json::Array(items)) = input else { return Vec::new() };
    let brought = |(index, item): (usize, &Json)| {
        let item = item.as_object()?;
        let kind = item.get("type")?.as_str()?;
        let tools = item.get("tools")?.as_array().filter(|_| BRINGING.contains(&kind))?;
        Some((format!("input[{index}].tools"), tools.to_vec()))
    };
    items.iter().enumerate().filter_map(brought).collect()
}

/// Collects items; those that one turn of the model consists of become one message.
struct Turns<'a> {
    messages: Vec<Json>,
    name: ModelName<'a>,
    /// The assistant's turn that may still grow.
    open: Option<Object>,
    ignored: Vec<String>,
}

/// Parses `instructions` and `input` into messages in the form of chat completions. Items of
/// tools that run elsewhere are left out and named.
pub(super) fn parse_input(
    instructions: Option<String>,
    input: Option<Json>,
    name: ModelName<'_>,
    ignored: &mut Vec<String>,
) -> Result<Vec<Json>, ApiError> {
    let mut turns = Turns { messages: Vec::new(), name, open: None, ignored: Vec::new() };
    if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
        turns.messages.push(message("system", instructions.into()));
    }
    match input {
        Some(Json::String(text)) => turns.messages.push(message("user", text.into())),
        Some(Json::Array(items)) => {
            if items.len() > MESSAGES_MAX {
                let message = format!("input: {} items: at most {MESSAGES_MAX}", items.len());
                return Err(ApiError::param("input", message));
            }
            for (index, item) in items.into_iter().enumerate() {
                turns.item(item, &format!("input[{index}]"))?;
            }
        }
        None => {}
        Some(other) => {
            let message = format!("input: expected a string or an array, found {}", other.kind());
            return Err(ApiError::param("input", message));
        }
    }
    turns.close();
    // Clients probe a server with an empty input.
    if turns.messages.is_empty() {
        turns.messages.push(message("user", "".into()));
    }
    ignored.append(&mut turns.ignored);
    Ok(turns.messages)
}

fn message(role: &str, content: Json) -> Json {
    let mut message = Object::default();
    message.set("role", role.into());
    message.set("content", content);
    Json::Object(message)
}

impl Turns<'_> {
    fn item(&mut self, item: Json, path: &str) -> Result<(), ApiError> {
        let Json::Object(mut item) = item else {
            let message = format!("{path}: expected an object, found {}", item.kind());
            return Err(ApiError::param(path, message));
        };
        let kind = item.get("type").and_then(Json::as_str).unwrap_or("message").to_owned();
        match kind.as_str() {
            "message" => {
                item.remove("type");
                self.message(item);
            }
            "reasoning" => self.reasoning(&item),
            "function_call" => {
                let name = self.called(&item, path)?;
                let arguments = item.get("arguments").cloned().unwrap_or_else(|| "{}".into());
                self.call(text(&item, "call_id", path)?, name, arguments);
            }
            "custom_tool_call" => {
                let name = self.called(&item, path)?;
                let mut arguments = Object::default();
                arguments.set("input", text(&item, "input", path)?.into());
                self.call(text(&item, "call_id", path)?, name, Json::Object(arguments));
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = text(&item, "call_id", path)?;
                self.close();
                let output = item.remove("output").unwrap_or_default();
                let Json::Object(mut result) = message("tool", output) else { return Ok(()) };
                result.set("tool_call_id", id.into());
                self.messages.push(Json::Object(result));
            }
            "tool_search_call" => {
                let arguments = item.get("arguments").cloned().unwrap_or_else(|| "{}".into());
                if let Some(id) = item.get("call_id").and_then(Json::as_str) {
                    self.call(id.to_owned(), SEARCH.to_owned(), arguments);
                }
            }
            "tool_search_output" => self.found(&item),
            // Its tools stand among the request's.
            "additional_tools" => {}
            "compaction" | "compaction_summary" | "context_compaction" => {
                match compaction::summary(&item) {
                    Some(summary) => {
                        self.close();
                        self.messages.push(summary);
                    }
                    // Another server's.
                    None => self.ignored.push(path.to_owned()),
                }
            }
            "local_shell_call" | "shell_call" | "apply_patch_call" => {
                let action = ["action", "operation"].iter().find_map(|key| item.get(key));
                let arguments = action.cloned().unwrap_or_else(|| Json::Object(Object::default()));
                let name = kind.trim_end_matches("_call").to_owned();
                self.call(text(&item, "call_id", path)?, name, arguments);
            }
            "local_shell_call_output" | "shell_call_output" | "apply_patch_call_output" => {
                let id = ["call_id", "id"].iter().find_map(|key| item.get(key)?.as_str());
                let id = id.map(str::to_owned);
                let output = match item.remove("output").unwrap_or_default() {
                    Json::String(text) => text,
                    // What each command wrote.
                    other => to_json(&other),
                };
                self.close();
                let Json::Object(mut result) = message("tool", output.into()) else {
                    return Ok(());
                };
                result.set("tool_call_id", id.map_or(Json::Null, Into::into));
                self.messages.push(Json::Object(result));
            }
            _ => self.ignored.push(path.to_owned()),
        }
        Ok(())
    }

    fn message(&mut self, mut item: Object) {
        if item.get("role").and_then(Json::as_str) != Some("assistant") {
            self.close();
            self.messages.push(Json::Object(item));
            return;
        }
        if self.open.as_ref().is_some_and(|open| has_text(open) || has_calls(open)) {
            self.close();
        }
        if let Some(content) = item.remove("content") {
            self.open().set("content", content);
        }
    }

    fn reasoning(&mut self, item: &Object) {
        if self.open.as_ref().is_some_and(|open| has_text(open) || has_calls(open)) {
            self.close();
        }
        let texts = ["content", "summary"].into_iter().find_map(|key| {
            let parts = item.get(key)?.as_array()?.iter();
            let texts: Vec<&str> =
                parts.filter_map(|part| part.as_object()?.get("text")?.as_str()).collect();
            (!texts.is_empty()).then(|| texts.join("\n"))
        });
        if let Some(text) = texts {
            self.open().set("reasoning_content", text.into());
        }
    }

    /// The model's name for the tool that an item calls.
    fn called(&self, item: &Object, path: &str) -> Result<String, ApiError> {
        let namespace = item.get("namespace").and_then(Json::as_str);
        let namespace = namespace.filter(|namespace| !namespace.is_empty());
        Ok((self.name)(namespace, &text(item, "name", path)?))
    }

    /// The names of the tools that a search found; their definitions stand among the request's.
    fn found(&mut self, item: &Object) {
        let Some(id) = item.get("call_id").and_then(Json::as_str) else { return };
        let mut names = Vec::new();
        for tool in item.get("tools").and_then(Json::as_array).into_iter().flatten() {
            let Some(tool) = tool.as_object() else { continue };
            let Some(own) = tool.get("name").and_then(Json::as_str) else { continue };
            let Some(inner) = tool.get("tools").and_then(Json::as_array) else {
                names.push((self.name)(None, own));
                continue;
            };
            let inner = inner.iter().filter_map(|tool| tool.as_object()?.get("name")?.as_str());
            names.extend(inner.map(|name| (self.name)(Some(own), name)));
        }
        let text = if names.is_empty() {
            "No tools found.".to_owned()
        } else {
            format!("These tools can be called now: {}", names.join(", "))
        };
        self.close();
        let Json::Object(mut result) = message("tool", text.into()) else { return };
        result.set("tool_call_id", id.into());
        self.messages.push(Json::Object(result));
    }

    fn call(&mut self, id: String, name: String, arguments: Json) {
        let mut function = Object::default();
        function.set("name", name.into());
        function.set("arguments", arguments);
        let mut call = Object::default();
        call.set("id", id.into());
        call.set("type", "function".into());
        call.set("function", Json::Object(function));
        let open = self.open();
        match open.get_mut("tool_calls") {
            Some(Json::Array(calls)) => calls.push(Json::Object(call)),
            _ => open.set("tool_calls", Json::Array(vec![Json::Object(call)])),
        }
    }

    fn open(&mut self) -> &mut Object {
        self.open.get_or_insert_with(|| {
            let mut turn = Object::default();
            turn.set("role", "assistant".into());
            turn.set("content", "".into());
            turn
        })
    }

    fn close(&mut self) {
        self.messages.extend(self.open.take().map(Json::Object));
    }
}

fn has_text(turn: &Object) -> bool {
    turn.get("content").is_some_and(|content| *content != Json::String(String::new()))
}

fn has_calls(turn: &Object) -> bool {
    turn.get("tool_calls").is_some()
}

fn text(item: &Object, key: &str, path: &str) -> Result<String, ApiError> {
    item.get(key).and_then(Json::as_str).map(str::to_owned).ok_or_else(|| {
        let path = format!("{path}.{key}");
        ApiError::param(path.clone(), format!("{path}: expected a string"))
    })
}
