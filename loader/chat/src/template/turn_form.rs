//! The form in which a chat template takes past turns: arguments of calls as an object or as text, and
//! what stands for content that a turn does not have. Tried when the template is compiled, since its
//! source does not tell.

use shardpack_formats::template::{ChatTemplate, Next};

use crate::{
    conversation::{ArgumentsForm, Message},
    json::{Json, Object},
};

/// How past turns are shown to a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TurnForm {
    /// Arguments of calls.
    arguments: ArgumentsForm,
    /// Whether null stays null in a turn with calls; an empty text otherwise.
    null_with_calls: bool,
    /// Likewise in a turn without.
    null_without_calls: bool,
    /// Whether calls are shown only in turns whose content is null.
    calls_need_null: bool,
}

// Words that no template says by itself.
const NAME: &str = "fetch_quokka";
const KEY: &str = "ibex_key";
const VALUE: &str = "lemur value";
const ASKED: &str = "zebra asks";

impl TurnForm {
    /// Renders conversations with a call and without one.
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let object = Json::Object(members([(KEY, VALUE.into())]));
        let text: Json = object.dumped().into();
        let form = |arguments: &Json| {
            ["".into(), Json::Null].map(|content| shows_call(template, arguments, &content))
        };
        let [as_object, as_text] = [form(&object), form(&text)];
        let is_text = as_object == [false; 2] && as_text != [false; 2];
        let [with_empty, with_null] = if is_text { as_text } else { as_object };
        let arguments = if is_text { ArgumentsForm::Text } else { ArgumentsForm::Object };
        let said = members([("role", "assistant".into()), ("content", Json::Null)]);
        let plain = render(template, &[asked(), said, asked()]);
        Self {
            arguments,
            null_with_calls: with_null,
            null_without_calls: plain.is_some_and(|text| text.contains(ASKED)),
            calls_need_null: with_null && !with_empty,
        }
    }

    /// The members of a message as the template takes them.
    pub(super) fn fields(self, message: &Message) -> Object {
        let mut fields = message.shown(self.arguments);
        let has_calls = message.calls().is_some();
        let stays_null = if has_calls { self.null_with_calls } else { self.null_without_calls };
        match fields.get("content") {
            Some(Json::Null) if !stays_null => fields.set("content", "".into()),
            Some(Json::String(text)) if text.is_empty() && has_calls && self.calls_need_null => {
                fields.set("content", Json::Null);
            }
            _ => {}
        }
        fields
    }
}

fn members<const N: usize>(members: [(&str, Json); N]) -> Object {
    members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn asked() -> Object {
    members([("role", "user".into()), ("content", ASKED.into())])
}

/// Whether a call is shown with its arguments as what they are: not as the text of a text, nor in Python's
/// spelling.
fn shows_call(template: &ChatTemplate, arguments: &Json, content: &Json) -> bool {
    let function = members([("name", NAME.into()), ("arguments", arguments.clone())]);
    let call = members([
        ("id", "abcdefghi".into()),
        ("type", "function".into()),
        ("function", Json::Object(function)),
    ]);
    let called = members([
        ("role", "assistant".into()),
        ("content", content.clone()),
        ("tool_calls", Json::Array(vec![Json::Object(call)])),
    ]);
    let result = members([
        ("role", "tool".into()),
        ("name", NAME.into()),
        ("tool_call_id", "abcdefghi".into()),
        ("content", "puffin".into()),
    ]);
    render(template, &[asked(), called, result]).is_some_and(|text| {
        let is_encoded = text.contains(&format!("\\\"{KEY}\\\""));
        let is_python = text.contains(&format!("'{KEY}'"));
        text.contains(NAME) && text.contains(VALUE) && !is_encoded && !is_python
    })
}

/// The prompt, unless it names what Python has for null.
fn render(template: &ChatTemplate, messages: &[Object]) -> Option<String> {
    let none: [(&str, Json); 0] = [];
    let no_tools: [Json; 0] = [];
    let text = template.render(messages, no_tools, none, Next::Assistant).ok()?;
    (!text.contains("None")).then_some(text)
}
