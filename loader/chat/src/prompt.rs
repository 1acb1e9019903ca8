//! What of a package is executed: its chat template and its tokenizer make prompts. Both are foreign
//! code, so a server has them in a [sandbox](crate::sandbox).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use shardpack_engine_api::TokenId;

use super::{
    conversation::Message,
    json::{Json, Object},
    template::{ChatTemplate, GENERIC_TOOLS, RenderError, Rendered, TemplateError},
    text::{Encoder, EncoderError, TokenTable},
};

/// The parts of a package that are executed, as its files have them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// The chat templates, if it has any.
    pub templates: Option<TemplateTexts>,
    /// The tokenizer's named special tokens, which templates read as variables.
    pub specials: Object,
}

/// A model's templates; some have one of their own for requests with tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateTexts {
    /// Of ordinary conversations.
    pub default: String,
    /// Of conversations with tools, where it is another.
    pub tools: Option<String>,
}

impl TemplateTexts {
    /// The template of conversations with tools.
    #[must_use]
    pub fn of_tools(&self) -> &str {
        self.tools.as_ref().unwrap_or(&self.default)
    }
}

/// What is known of a package once its template and its tokenizer are open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// The tokenizer's tokens.
    pub tokens: TokenTable,
    /// Whether the template of conversations with tools itself shows them.
    pub shows_tools: bool,
}

/// A conversation as a template sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversation<'a> {
    /// Turns in order.
    pub messages: Cow<'a, [Message]>,
    /// Definitions of tools.
    pub tools: Vec<Json>,
    /// Further variables.
    pub kwargs: Object,
    /// Whether the last turn is continued.
    pub continues: bool,
}

/// A template or a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenPromptsError {
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] EncoderError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Why a template or a tokenizer makes no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PromptFailure {
    /// The package has no template.
    #[error("this model has no chat template: its package has no chat_template.jinja")]
    NoTemplate,
    /// The template and the conversation do not go together.
    #[error("{0}")]
    Render(String),
    /// The last turn is to be continued, but the template does not render it unchanged.
    #[error("the chat template does not render the last turn unchanged, so it cannot be continued")]
    Closed,
    /// The tokenizer failed on the rendered text.
    #[error("the tokenizer fails on this conversation: {0}")]
    Encode(String),
}

impl From<RenderError> for PromptFailure {
    fn from(error: RenderError) -> Self {
        Self::Render(shortened(error.to_string()))
    }
}

/// Bytes of an error; a template may refuse with a text of any length.
const ERROR_BYTES_MAX: usize = 4096;

/// A message of which the end is left out where it is too long.
pub(crate) fn shortened(mut text: String) -> String {
    if text.len() > ERROR_BYTES_MAX {
        text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX));
        text.push('…');
    }
    text
}

/// Makes prompts: executes a template and a tokenizer.
pub struct PromptMaker {
    encoder: Encoder,
    templates: Option<Templates>,
}

struct Templates {
    default: ChatTemplate,
    tools: Option<ChatTemplate>,
}

impl PromptMaker {
    /// Opens the files, by which template and tokenizer are compiled and tried.
    pub fn open(files: &PromptFiles) -> Result<(Self, Opened), OpenPromptsError> {
        let encoder = Encoder::parse(&files.tokenizer)?;
        let compile = |source: &str| ChatTemplate::parse(source, files.specials.clone());
        let templates = match &files.templates {
            None => None,
            Some(TemplateTexts { default, tools }) => Some(Templates {
                default: compile(default)?,
                tools: tools.as_deref().map(compile).transpose()?,
            }),
        };
        let shows_tools = templates
            .as_ref()
            .is_some_and(|own| own.tools.as_ref().unwrap_or(&own.default).shows_tools());
        let opened = Opened { tokens: encoder.tokens(), shows_tools };
        Ok((Self { encoder, templates }, opened))
    }

    /// The text of a conversation, as the template renders it, and what was changed so that it did.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Rendered, PromptFailure> {
        let templates = self.templates.as_ref().ok_or(PromptFailure::NoTemplate)?;
        let Conversation { messages, tools, kwargs, continues } = conversation;
        let template = match &templates.tools {
            Some(template) if !tools.is_empty() => template,
            _ => &templates.default,
        };
        let mut rendered = if *continues {
            let open = template.render_open(messages, tools, kwargs)?;
            open.ok_or(PromptFailure::Closed)?
        } else {
            template.render(messages, tools, kwargs)?
        };
        if !tools.is_empty() && !template.shows_tools() {
            rendered.adjustments.insert(0, GENERIC_TOOLS);
        }
        Ok(rendered)
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, marks: TextMarks) -> Result<Vec<TokenId>, PromptFailure> {
        let tokens = match marks {
            TextMarks::None => self.encoder.encode(text),
            TextMarks::Special => self.encoder.encode_special(text),
        };
        tokens.map_err(|error| PromptFailure::Encode(shortened(error.to_string())))
    }
}

/// What a tokenizer puts around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextMarks {
    /// Nothing: templates write their own special tokens.
    None,
    /// The special tokens of a text by itself.
    Special,
}
