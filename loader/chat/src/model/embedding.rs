//! Texts as an embedding model reads them: with the prompts of its publisher and the special tokens
//! of its tokenizer, and cut to its context.

use std::collections::BTreeMap;

use serde::Deserialize;
use shardpack_engine_api::TokenId;
use shardpack_formats::spec::Embedding;

use super::{ChatModel, PromptError, first_tokens::added_before};

/// Where sentence-transformers has the prompts of a model.
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";

/// What is put before texts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EmbeddingPrompts {
    prompts: BTreeMap<String, String>,
    default_prompt_name: Option<String>,
}

/// What becomes of a text that is longer than the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LongText {
    /// It is refused.
    Refuse,
    /// Its end is left out.
    Truncate,
}

impl ChatModel {
    /// The same, of a model that makes embeddings.
    #[must_use]
    pub fn with_embedding(mut self, embedding: Option<Embedding>) -> Self {
        self.embedding = embedding;
        self
    }

    /// How the model makes embeddings; nothing for a model that was not trained for it.
    #[must_use]
    pub const fn embedding(&self) -> Option<&Embedding> {
        self.embedding.as_ref()
    }

    /// What is put before texts by default.
    #[must_use]
    pub fn default_embedding_prompt(&self) -> &str {
        let name = self.embedding_prompts.default_prompt_name.as_deref();
        name.and_then(|name| self.embedding_prompt(name)).unwrap_or_default()
    }

    /// What is put before texts under this name.
    #[must_use]
    pub fn embedding_prompt(&self, name: &str) -> Option<&str> {
        self.embedding_prompts.prompts.get(name).map(String::as_str)
    }

    /// Names of such prompts.
    pub fn embedding_prompt_names(&self) -> impl Iterator<Item = &str> {
        self.embedding_prompts.prompts.keys().map(String::as_str)
    }

    /// The tokens of a text, with those that the tokenizer puts before and after.
    pub fn embedding_tokens(
        &self,
        text: &str,
        long: LongText,
    ) -> Result<Vec<TokenId>, PromptError> {
        if long == LongText::Refuse {
            self.check_first_part(text)?;
        }
        let whole = self.encode_special(text)?;
        let most = self.max_positions as usize;
        if whole.len() <= most || long == LongText::Refuse {
            return self.check_embedded(whole);
        }
        let plain = self.encode(text)?;
        let added = whole.len().saturating_sub(plain.len());
        let before = added_before(&plain, &whole);
        let after = &whole[whole.len() - (added - before)..];
        let kept = most.saturating_sub(after.len());
        self.check_embedded([&whole[..kept], after].concat())
    }

    /// Tokens that an embedding can be made of: at least one, and no more than the context.
    pub fn check_embedded(&self, tokens: Vec<TokenId>) -> Result<Vec<TokenId>, PromptError> {
        if tokens.len() == self.max_positions as usize {
            // Nothing is to follow them.
            return self.check_vocabulary(tokens);
        }
        self.check_prompt(tokens)
    }
}
