//! The model's chat template over the inner form of a conversation: which messages and variables
//! it sees. Rendering itself is [`shardpack_formats::template`]'s.

pub use shardpack_formats::template::TemplateError;
pub(super) use shardpack_formats::template::{RESERVED, RenderError};

use std::{sync::Arc, time::SystemTime};

use shardpack_formats::template::{self, Next};

use super::{
    inner::{Message, Role},
    json::{Json, Object},
};

/// Where a turn that goes on ends for now: private characters about a name.
const OPEN_END: &str = "\u{f8fe}goes on\u{f8fe}";

/// A compiled chat template.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    template: template::ChatTemplate,
    source: String,
    knows_developer: bool,
}

impl ChatTemplate {
    /// Compiles a template; `specials` are the tokenizer's named special tokens, which templates
    /// read as variables.
    pub(super) fn parse(source: &str, specials: Object) -> Result<Self, TemplateError> {
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
        Ok(Self { template, source: source.to_owned(), knows_developer })
    }

    /// Its text.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation, up to where the assistant's next turn begins. `tools` may be
    /// empty, as may `kwargs`; [`RESERVED`] names in `kwargs` are not seen.
    pub(super) fn render(
        &self,
        messages: &[Message],
        tools: &[Json],
        kwargs: &Object,
    ) -> Result<String, RenderError> {
        let messages = messages.iter().map(|message| self.fields(message));
        self.template.render(messages, tools, kwargs.iter(), Next::Assistant)
    }

    /// The prompt of a conversation whose last turn goes on: up to the end of what it says.
    /// Nothing where the template does not show that.
    pub(super) fn render_open(
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
        message.fields().clone()
    }
}

#[cfg(test)]
mod tests;
