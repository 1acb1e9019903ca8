//! One message of a conversation, normalised for the chat template. No HTTP, no tokens.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::json::{Json, Object};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions of the application.
    System,
    /// Instructions of the developer; a system message for templates that do not know the role.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 5] =
        [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool];

    /// The name that templates compare with.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    /// The role of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// One turn, as templates read it.
///
/// Invariant: `fields` holds `role`; `content` is a string, or null in a turn of the assistant that has
/// none; `tool_calls`, when present, is an array of objects with a `function` whose `arguments` are an
/// object where they were JSON of one, with the text as sent beside it. Other keys, and
/// the order of all keys, are as sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    role: Role,
    fields: Object,
}

/// The member of a function that keeps its arguments as they were sent: a name of private-use
/// characters, which no client can mean.
const SENT_ARGUMENTS: &str = "\u{f8fe}arguments\u{f8fe}";

/// How a template takes the arguments of past calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ArgumentsForm {
    /// As an object.
    #[default]
    Object,
    /// As the text of one.
    Text,
}

/// What is wrong with a message; `path` is below the message (`.content[1].type`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct MessageError {
    /// Path below the message, to be appended to the message's own.
    pub path: String,
    /// A sentence for the client.
    pub message: String,
}

impl MessageError {
    fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }
}

impl Message {
    /// Normalises a message as clients send it.
    pub fn normalise(value: Json) -> Result<Self, MessageError> {
        let Json::Object(mut fields) = value else {
            let message = format!("a message is an object, not {}", value.kind());
            return Err(MessageError::new("", message));
        };
        let role = parse_role(&fields)?;
        let content = normalise_content(role, fields.get("content"))?;
        fields.set("content", content);
        normalise_calls(&mut fields)?;
        // Servers name the thinking of a past turn either way; templates read the first.
        if fields.get("reasoning_content").is_none()
            && let Some(reasoning) = fields.get("reasoning").cloned()
        {
            fields.set("reasoning_content", reasoning);
        }
        Ok(Self { role, fields })
    }

    /// Who speaks.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// The same message from another role.
    #[must_use]
    pub fn with_role(mut self, role: Role) -> Self {
        self.fields.set("role", role.name().into());
        Self { role, fields: self.fields }
    }

    /// What the model said in this turn, if a turn of its own holds text alone.
    #[must_use]
    pub fn own_text(&self) -> Option<&str> {
        let has_calls = self.fields.get("tool_calls").is_some_and(|calls| *calls != Json::Null);
        let text = self.fields.get("content")?.as_str()?.trim_end();
        (self.role == Role::Assistant && !has_calls && !text.is_empty()).then_some(text)
    }

    /// About what it takes in memory.
    pub(crate) fn size_bytes(&self) -> usize {
        self.fields.iter().map(|(name, value)| name.len() + value.size_bytes()).sum()
    }

    /// The same message with another text.
    #[must_use]
    pub fn with_text(mut self, text: &str) -> Self {
        self.fields.set("content", text.into());
        self
    }

    /// A message of text alone.
    pub(crate) fn of(role: Role, text: &str) -> Self {
        let mut fields = Object::default();
        fields.set("role", role.name().into());
        fields.set("content", text.into());
        Self { role, fields }
    }

    /// What it says.
    pub(crate) fn text(&self) -> &str {
        self.fields.get("content").and_then(Json::as_str).unwrap_or_default()
    }

    /// The calls that it makes, if any.
    pub(crate) fn calls(&self) -> Option<&[Json]> {
        self.fields.get("tool_calls")?.as_array().filter(|calls| !calls.is_empty())
    }

    /// The same message with another member.
    pub(crate) fn with(mut self, key: &str, value: Json) -> Self {
        self.fields.set(key, value);
        self
    }

    /// The same message without a member.
    pub(crate) fn without(mut self, key: &str) -> Self {
        self.fields.remove(key);
        self
    }

    /// The members of the message.
    pub(crate) const fn fields(&self) -> &Object {
        &self.fields
    }

    /// The members that templates see, with arguments of calls in a form.
    pub(crate) fn shown(&self, form: ArgumentsForm) -> Object {
        let mut fields = self.fields.clone();
        let Some(Json::Array(calls)) = fields.get_mut("tool_calls") else { return fields };
        for call in calls {
            let Json::Object(call) = call else { continue };
            let Some(Json::Object(function)) = call.get_mut("function") else { continue };
            let sent = function.remove(SENT_ARGUMENTS);
            if form == ArgumentsForm::Text
                && let Some(arguments @ Json::Object(_)) = function.get("arguments")
            {
                let text = sent.unwrap_or_else(|| arguments.dumped().into());
                function.set("arguments", text);
            }
        }
        fields
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Message {
    /// A message that was normalised before it was written.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Json::Object(fields) = Json::deserialize(deserializer)? else {
            return Err(D::Error::custom("a message is an object"));
        };
        let role = parse_role(&fields).map_err(D::Error::custom)?;
        match fields.get("content") {
            Some(Json::String(_)) => {}
            Some(Json::Null) if role == Role::Assistant => {}
            _ => return Err(D::Error::custom("a message's content is a string")),
        }
        Ok(Self { role, fields })
    }
}

fn parse_role(fields: &Object) -> Result<Role, MessageError> {
    let names = Role::ALL.map(Role::name).join(", ");
    let Some(value) = fields.get("role") else {
        return Err(MessageError::new(".role", format!("a message needs a role: one of {names}")));
    };
    value.as_str().and_then(Role::parse).ok_or_else(|| {
        let found = value.as_str().unwrap_or_else(|| value.kind());
        MessageError::new(".role", format!("unknown role {found:?}: expected one of {names}"))
    })
}

/// Text from a string or an array of text parts; an assistant's turn may have none.
fn normalise_content(role: Role, content: Option<&Json>) -> Result<Json, MessageError> {
    match content {
        Some(Json::String(text)) => Ok(text.as_str().into()),
        Some(Json::Array(parts)) => {
            let text = |(index, part)| match left_out(role, part) {
                Some(note) => Ok(note),
                None => part_text(index, part).map(str::to_owned),
            };
            let texts: Result<Vec<String>, _> = parts.iter().enumerate().map(text).collect();
            // A line break between parts, as llama.cpp and vLLM join them.
            Ok(texts?.join("\n").into())
        }
        None | Some(Json::Null) if role == Role::Assistant => Ok(Json::Null),
        None | Some(Json::Null) if role == Role::Tool => Ok("".into()),
        None | Some(Json::Null) => Err(MessageError::new(
            ".content",
            format!("a message of role {:?} needs content", role.name()),
        )),
        Some(other) => Err(MessageError::new(
            ".content",
            format!("content is a string or an array of text parts, not {}", other.kind()),
        )),
    }
}

/// What stands in a tool's result for a part that a model of text cannot read: a refusal would end
/// the whole session, since every later request repeats the result.
fn left_out(role: Role, part: &Json) -> Option<String> {
    if role != Role::Tool {
        return None;
    }
    let part = part.as_object()?;
    let kind = part.get("type")?.as_str()?;
    match kind {
        "text" | "input_text" | "output_text" | "refusal" => None,
        _ if part.get("text").and_then(Json::as_str).is_some() => {
            part.get("text").and_then(Json::as_str).map(str::to_owned)
        }
        _ => {
            let kind = kind.trim_start_matches("input_").trim_end_matches("_url");
            Some(format!("[{kind}: this model reads text only]"))
        }
    }
}

fn part_text(index: usize, part: &Json) -> Result<&str, MessageError> {
    let path = format!(".content[{index}]");
    let Some(object) = part.as_object() else {
        return part.as_str().ok_or_else(|| {
            MessageError::new(path, format!("a content part is an object, not {}", part.kind()))
        });
    };
    let kind = object.get("type").and_then(Json::as_str).unwrap_or("text");
    let key = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        _ => {
            let message = format!("content parts of type {kind:?} are not supported: only text is");
            return Err(MessageError::new(path + ".type", message));
        }
    };
    object.get(key).and_then(Json::as_str).ok_or_else(|| {
        MessageError::new(format!("{path}.{key}"), format!("a {kind} part needs a string {key:?}"))
    })
}

/// Most calls in one message; one answer cannot hold more within the longest contexts in use.
const CALLS_MAX: usize = 1024;

/// A call of a custom tool as the function with one text that the model knows.
fn custom_as_function(call: &mut Object) {
    if call.get("function").is_some() {
        return;
    }
    let Some(Json::Object(custom)) = call.remove("custom") else { return };
    let mut arguments = Object::default();
    arguments.set("input", custom.get("input").cloned().unwrap_or_else(|| "".into()));
    let mut function = Object::default();
    function.set("name", custom.get("name").cloned().unwrap_or_default());
    function.set("arguments", Json::Object(arguments));
    call.set("type", "function".into());
    call.set("function", Json::Object(function));
}

fn normalise_calls(fields: &mut Object) -> Result<(), MessageError> {
    let calls = match fields.get_mut("tool_calls") {
        None | Some(Json::Null) => return Ok(()),
        Some(Json::Array(calls)) => calls,
        Some(other) => {
            let message = format!("tool_calls is an array, not {}", other.kind());
            return Err(MessageError::new(".tool_calls", message));
        }
    };
    if calls.len() > CALLS_MAX {
        let message = format!("{} calls in one message: at most {CALLS_MAX}", calls.len());
        return Err(MessageError::new(".tool_calls", message));
    }
    for (index, call) in calls.iter_mut().enumerate() {
        let path = format!(".tool_calls[{index}].function");
        if let Json::Object(call) = call {
            custom_as_function(call);
        }
        let function = match call {
            Json::Object(call) => call.get_mut("function"),
            _ => None,
        };
        let Some(Json::Object(function)) = function else {
            return Err(MessageError::new(path, "a tool call needs an object \"function\""));
        };
        if function.get("name").and_then(Json::as_str).is_none() {
            return Err(MessageError::new(path + ".name", "a function needs a string \"name\""));
        }
        // Half of the published templates would encode a string of JSON once more; none needs it.
        if let Some(Json::String(text)) = function.get("arguments").cloned() {
            let parsed = match text.trim() {
                "" => Ok(Json::Object(Object::default())),
                text => Json::parse(text.as_bytes()),
            };
            if let Ok(object @ Json::Object(_)) = parsed {
                function.set("arguments", object);
                function.set(SENT_ARGUMENTS, text.into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalise(text: &str) -> Result<String, String> {
        Message::normalise(Json::parse(text.as_bytes()).unwrap())
            .map(|message| serde_json::to_string(&message.shown(ArgumentsForm::Object)).unwrap())
            .map_err(|error| format!("{}: {error}", error.path))
    }

    fn check(text: &str, expected: &str) {
        assert_eq!(normalise(text).unwrap(), expected, "{text}");
    }

    #[test]
    fn content_becomes_a_string() {
        check(r#"{"role":"user","content":"a"}"#, r#"{"role":"user","content":"a"}"#);
        check(
            r#"{"content":[{"type":"text","text":"a"},{"type":"input_text","text":"b"},"c"],"role":"user"}"#,
            r#"{"content":"a\nb\nc","role":"user"}"#,
        );
        check(r#"{"role":"assistant","content":null}"#, r#"{"role":"assistant","content":null}"#);
        check(r#"{"role":"assistant"}"#, r#"{"role":"assistant","content":null}"#);
        check(
            r#"{"role":"tool","tool_call_id":"x"}"#,
            r#"{"role":"tool","tool_call_id":"x","content":""}"#,
        );
        check(r#"{"role":"user","content":[]}"#, r#"{"role":"user","content":""}"#);
    }

    #[test]
    fn arguments_become_objects_where_they_are_json_of_one() {
        let check = |arguments: &str, expected: &str| {
            let text = |arguments| {
                format!(
                    r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"1","type":"function","function":{{"name":"f","arguments":{arguments}}}}}]}}"#
                )
            };
            assert_eq!(normalise(&text(arguments)).unwrap(), text(expected), "{arguments}");
        };
        check(r#""{\"z\": 1, \"a\": 2.0}""#, r#"{"z":1,"a":2.0}"#);
        check(r#""""#, "{}");
        check(r#""not json""#, r#""not json""#);
        check(r#""5""#, r#""5""#);
        check(r#"{"z":1}"#, r#"{"z":1}"#);
    }

    #[test]
    fn arguments_are_shown_as_text_as_they_were_sent() {
        let shown = |arguments: &str| {
            let text = format!(
                r#"{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}"#
            );
            let message = Message::normalise(Json::parse(text.as_bytes()).unwrap()).unwrap();
            let written = serde_json::to_vec(&message).unwrap();
            let read: Message = serde_json::from_slice(&written).unwrap();
            let fields = read.shown(ArgumentsForm::Text);
            let calls = fields.get("tool_calls").and_then(Json::as_array).unwrap();
            let function = calls[0].as_object().unwrap().get("function").unwrap();
            function.as_object().unwrap().get("arguments").unwrap().as_str().unwrap().to_owned()
        };
        assert_eq!(shown(r#""{\"n\":1.50,  \"a\":2}""#), r#"{"n":1.50,  "a":2}"#);
        assert_eq!(shown(r#"{"é":[1,null],"b":{}}"#), r#"{"é": [1, null], "b": {}}"#);
        assert_eq!(shown(r#""no JSON""#), "no JSON");
    }

    #[test]
    fn thinking_has_one_name() {
        check(
            r#"{"role":"assistant","content":"a","reasoning":"b"}"#,
            r#"{"role":"assistant","content":"a","reasoning":"b","reasoning_content":"b"}"#,
        );
    }

    #[test]
    fn faults_name_their_place() {
        let check = |text: &str, expected: &str| {
            let error = normalise(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        };
        check("3", ": a message is an object, not a number");
        check("{}", ".role: a message needs a role");
        check(r#"{"role":"bot"}"#, ".role: unknown role \"bot\"");
        check(r#"{"role":"user"}"#, ".content: a message of role \"user\" needs content");
        check(r#"{"role":"user","content":7}"#, ".content: content is a string or");
        check(
            r#"{"role":"user","content":[{"type":"image_url"}]}"#,
            ".content[0].type: content parts of type \"image_url\"",
        );
        check(r#"{"role":"user","content":[{"type":"text"}]}"#, ".content[0].text: ");
        check(r#"{"role":"assistant","tool_calls":7}"#, ".tool_calls: ");
        check(r#"{"role":"assistant","tool_calls":[{}]}"#, ".tool_calls[0].function: ");
        check(
            r#"{"role":"assistant","tool_calls":[{"function":{}}]}"#,
            ".tool_calls[0].function.name: ",
        );
    }
}
