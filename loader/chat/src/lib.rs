//! Text and messages: a conversation becomes a prompt's tokens, and a model's tokens become text,
//! reasoning and tool calls.
//!
//! Reading order: [`conversation`] (request and output, the same for every dialect), [`model`] (the
//! package's tokenizer, chat template and limits), [`template`] (messages to text), [`text`] (text
//! to tokens and back), [`prompt`] (what of a package is executed), [`sandbox`] (a process for that),
//! [`prompt_side`] (where it is executed), [`tools`] (tool-call formats, grammars), [`output`] (how one answer is
//! parsed and constrained). No HTTP, no tensors.
#![forbid(unsafe_code)]

pub mod conversation;
pub mod json;
pub mod model;
pub mod output;
pub mod prompt;
pub mod prompt_side;
pub mod sandbox;
pub mod template;
pub mod text;
pub mod tokens;
pub mod tools;

pub use model::{ChatModel, OpenModelError, constraints};
pub use prompt_side::{PromptHome, PromptSide, SandboxedProber};
pub use sandbox::{SandboxError, SandboxProgram};
pub use template::TemplateError;
pub use text::{DecodingError, VocabularyError};
pub use tokens::{SameTokensError, TokenizeError, check_same_tokens, tokenize, tokenize_all};
