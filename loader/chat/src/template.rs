//! The model's chat template over `conversation` messages: which messages and variables it sees.
//! Rendering itself is [`shardpack_formats::template`]'s.

mod past_calls;

pub use shardpack_formats::template::TemplateError;
pub use shardpack_formats::template::{RESERVED, RenderError};

use std::{sync::Arc, time::SystemTime};

use shardpack_formats::template::{self, Next};

use super::{
    conversation::{Message, Role},
    json::{Json, Object},
};
use past_calls::PastCalls;

/// Marks the end of a last turn that is to be continued: a name between private-use characters.
const OPEN_END: &str = "\u{f8fe}goes on\u{f8fe}";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: template::ChatTemplate,
    source: String,
    knows_developer: bool,
    /// The name by which it reads the thinking of past turns, if it has one of its own.
    thinking_key: Option<&'static str>,
    past_calls: Option<PastCalls>,
}

/// Members of messages in which templates look for thinking, and how they name them there.
const THINKING_KEYS: [(&str, [&str; 3]); 2] = [
    ("thinking", ["message.thinking", "message['thinking']", "message[\"thinking\"]"]),
    ("reasoning", ["message.reasoning ", "message['reasoning']", "message[\"reasoning\"]"]),
];

impl ChatTemplate {
    /// Compiles a template; `specials` are the tokenizer's named special tokens, which templates
    /// read as variables.
    pub fn parse(source: &str, specials: Object) -> Result<Self, TemplateError> {
        Self::parse_with_clock(source, specials, Arc::new(SystemTime::now))
    }

    fn parse_with_clock(
        source: &str,
        specials: Object,
        now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    ) -> Result<Self, TemplateError> {
        let specials = specials.into_members();
        let template = template::ChatTemplate::parse_with_clock(source, specials, now)?;
        let knows_developer = source.contains("developer");
        let reads = |names: &[&str; 3]| names.iter().any(|name| source.contains(name));
        let thinking_key = THINKING_KEYS
            .iter()
            .find(|(_, names)| reads(names) && !source.contains("reasoning_content"))
            .map(|(key, _)| *key);
        let past_calls = PastCalls::of(source);
        let source = source.to_owned();
        Ok(Self { template, source, knows_developer, thinking_key, past_calls })
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation, up to where the assistant's next turn begins. `tools` may be
    /// empty, as may `kwargs`; [`RESERVED`] names in `kwargs` are not seen.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Json],
        kwargs: &Object,
    ) -> Result<String, RenderError> {
        let messages = messages.iter().map(|message| self.fields(message));
        self.template.render(messages, tools, kwargs.iter(), Next::Assistant)
    }

    /// The prompt of a conversation whose last turn is continued, up to the end of its text.
    /// Nothing where the template does not show that.
    pub fn render_open(
        &self,
        messages: &[Message],
        tools: &[Json],
        kwargs: &Object,
    ) -> Result<Option<String>, RenderError> {
        let Some((last, before)) = messages.split_last() else { return Ok(None) };
        let Some(said) = last.own_text() else { return Ok(None) };
        // A mark that no template writes by itself tells where the turn's text ends.
        let open = last.clone().with_text(&format!("{said}{OPEN_END}"));
        let messages = before.iter().chain([&open]).map(|message| self.fields(message));
        let rendered = self.template.render(messages, tools, kwargs.iter(), Next::Nobody)?;
        let end = rendered.rfind(OPEN_END);
        Ok(end.filter(|&end| rendered[..end].ends_with(said)).map(|end| rendered[..end].to_owned()))
    }

    fn fields(&self, message: &Message) -> Object {
        if message.role() == Role::Developer && !self.knows_developer {
            // A template without the role would drop the instructions or refuse the conversation.
            return message.clone().with_role(Role::System).fields().clone();
        }
        let mut fields = message.fields().clone();
        let has = |key: &str| fields.get(key).is_some_and(|value| *value != Json::Null);
        if let Some(key) = self.thinking_key.filter(|key| !has(key))
            // gpt-oss refuses thinking beside what is said with a call.
            && !(key == "thinking" && has("tool_calls") && says(&fields))
            && let Some(thinking) = fields.get("reasoning_content").cloned()
        {
            fields.set(key, thinking);
        }
        if let Some(past_calls) = &self.past_calls {
            past_calls.write(&mut fields);
        }
        fields
    }
}

fn says(fields: &Object) -> bool {
    fields.get("content").and_then(Json::as_str).is_some_and(|text| !text.is_empty())
}

#[cfg(test)]
mod tests;
