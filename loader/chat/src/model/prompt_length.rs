//! Prompts that are far too long are refused by their first part: to tokenize 8 MB takes seconds, and
//! the context of no model needs them.

use std::fmt;

use shardpack_engine_api::TokenId;

use super::{ChatModel, PromptError};
use crate::conversation::{ChatRequest, Message};

/// Bytes of a text per position of the context that are tokenized before the whole is: published
/// tokenizers make 3 to 5 bytes of prose and code into one token.
const BYTES_PER_POSITION: usize = 8;
/// Texts up to this size are tokenized at once.
const SMALL_BYTES: usize = 64 << 10;
/// Tokens that the first part may have too many because it ends within a word.
const CUT_TOKENS: usize = 1024;

/// The number of a prompt's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// All are counted.
    Exactly(usize),
    /// Those of its first part are; the rest was not tokenized.
    MoreThan(usize),
}

impl fmt::Display for PromptLength {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(tokens) => write!(formatter, "{tokens}"),
            Self::MoreThan(tokens) => write!(formatter, "more than {tokens}"),
        }
    }
}

impl ChatModel {
    /// The tokens of a rendered prompt that the model is to continue: at least one, and room for one more.
    pub(super) fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        self.check_first_part(text)?;
        self.check_prompt(self.encode(text)?)
    }

    /// Whether what the template writes has a first part that is worth a look: whoever speaks, and whatever
    /// the tools are.
    pub(super) fn may_be_far_too_long(&self, request: &ChatRequest) -> bool {
        let messages = request.messages.iter().map(Message::size_bytes);
        let tools = request.tools.iter().map(|tool| tool.definition.size_bytes());
        messages.chain(tools).sum::<usize>() > self.first_part_bytes()
    }

    fn first_part_bytes(&self) -> usize {
        (self.max_positions as usize).saturating_mul(BYTES_PER_POSITION).max(SMALL_BYTES)
    }

    /// Refuses a text whose first part has more tokens than the context.
    pub(super) fn check_first_part(&self, text: &str) -> Result<(), PromptError> {
        let most = self.max_positions as usize;
        let part = self.first_part_bytes();
        if text.len() <= part.saturating_mul(2) {
            return Ok(());
        }
        let end = text.floor_char_boundary(part);
        let tokens = self.encode(&text[..end])?.len();
        if tokens < most.saturating_add(CUT_TOKENS) {
            return Ok(());
        }
        let prompt_tokens = PromptLength::MoreThan(tokens - CUT_TOKENS);
        Err(PromptError::TooLong { max_positions: self.max_positions, prompt_tokens })
    }
}
