//! The generic tool-call format, for templates that show the model no tools: their definitions
//! stand in the system message, with an example of a call.

use shardpack_formats::template::Next;

use super::ChatTemplate;
use crate::{
    conversation::{Message, Role},
    json::Json,
};

/// How calls are written where a template knows of none.
const GENERIC_CALL: &str =
    "<tool_call>\n{\"name\": \"function-name\", \"arguments\": {\"key\": \"value\"}}\n</tool_call>";

/// The conversation with the tools' definitions in its system message.
pub(super) fn with_definitions(
    messages: &[Message],
    tools: &[Json],
    template: &ChatTemplate,
) -> Vec<Message> {
    let text = instructions(tools, template.native_call().as_deref());
    let mut messages = messages.to_vec();
    match messages.first_mut() {
        Some(first) if matches!(first.role(), Role::System | Role::Developer) => {
            let whole = match first.text() {
                "" => text,
                own => format!("{own}\n\n{text}"),
            };
            *first = first.clone().with_text(&whole);
        }
        _ => messages.insert(0, Message::of(Role::System, &text)),
    }
    messages
}

fn instructions(tools: &[Json], native: Option<&str>) -> String {
    let line = |tool: &Json| serde_json::to_string(tool).expect("JSON is JSON");
    let definitions: Vec<String> = tools.iter().map(line).collect();
    let how = match native {
        Some(call) => format!("Call a function like this:\n{call}"),
        None => format!(
            "For each function call, write a JSON object with the function's name and arguments \
             between <tool_call> tags:\n{GENERIC_CALL}\nResults come back between <tool_response> \
             tags. Answer in plain text when no function is needed."
        ),
    };
    format!(
        "You can call functions to help with the user's request. Their definitions:\n<tools>\n{}\n\
         </tools>\n{how}",
        definitions.join("\n")
    )
}

/// What the template writes for a call: the difference that one makes.
pub(super) fn native_call(template: &ChatTemplate) -> Option<String> {
    let parse = |text: &str| {
        Message::normalise(Json::parse(text.as_bytes()).expect("a constant")).expect("a message")
    };
    let asked = parse(r#"{"role":"user","content":"hi"}"#);
    let called = parse(
        r#"{"role":"assistant","content":"","tool_calls":[{"id":"abcdefghi","type":"function","function":{"name":"function-name","arguments":{"key":"value"}}}]}"#,
    );
    let before = template.plain(std::slice::from_ref(&asked), Next::Assistant)?;
    let after = template.plain(&[asked, called], Next::Nobody)?;
    let call = after.strip_prefix(before.as_str())?.trim();
    call.contains("function-name").then(|| call.to_owned())
}
