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
