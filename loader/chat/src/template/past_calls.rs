//! Tool calls of earlier turns for chat templates that render none: written into the turn's text in
//! the model's tool-call format. Without them the model would see results of calls that it never
//! made.

use shardpack_formats::{
    OutputStyle, ToolFamily,
    template::{ChatTemplate, Next},
};

use crate::{
    conversation::{ArgumentsForm, Message},
    json::{Json, Object},
};

/// How the families write whose published templates leave their calls to the client: `SmolLM3` and
/// others in tags, Granite 3, LFM2.
const fn source(family: ToolFamily) -> Option<&'static str> {
    Some(match family {
        ToolFamily::JsonTags => include_str!("past_calls/json_tags.jinja"),
        ToolFamily::GraniteJson => include_str!("past_calls/granite_json.jinja"),
        ToolFamily::Lfm2 => include_str!("past_calls/lfm2.jinja"),
        _ => return None,
    })
}

/// Writes calls.
#[derive(Debug)]
pub(super) struct PastCalls(ChatTemplate);

impl PastCalls {
    /// For a template that needs it.
    pub(super) fn of(template: &str) -> Option<Self> {
        if template.contains("tool_calls") {
            return None;
        }
        Self::in_format(OutputStyle::detect(template).tools?)
    }

    /// In the generic tool-call format.
    pub(super) fn generic() -> Option<Self> {
        Self::in_format(ToolFamily::JsonTags)
    }

    fn in_format(family: ToolFamily) -> Option<Self> {
        let none: [(String, Json); 0] = [];
        ChatTemplate::parse(source(family)?, none).ok().map(Self)
    }

    /// The message with its calls behind its text.
    pub(super) fn written(&self, message: &Message) -> Message {
        let mut fields = message.shown(ArgumentsForm::Object);
        self.write(&mut fields);
        let text = fields.get("content").and_then(Json::as_str).unwrap_or_default();
        message.clone().with_text(text)
    }

    /// Puts a message's calls, if it has any, behind its text.
    pub(super) fn write(&self, fields: &mut Object) {
        let Some(calls) = fields.get("tool_calls").and_then(Json::as_array) else { return };
        let none: [(&str, Json); 0] = [];
        let no_tools: [Json; 0] = [];
        // What cannot be written stays unsaid, as the template has it.
        let Ok(written) = self.0.render(calls, no_tools, none, Next::Nobody) else { return };
        let said = fields.get("content").and_then(Json::as_str).unwrap_or_default();
        let between = if said.is_empty() || written.is_empty() { "" } else { "\n" };
        let text = format!("{said}{between}{written}");
        fields.set("content", Json::String(text));
    }
}
