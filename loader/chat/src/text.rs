//! Text to tokens and back. Tokens are bytes: a detokenizer collects the bytes of the tokens as
//! they come and hands out whole characters.

mod decoding;
mod stop;

use std::{collections::HashSet, sync::Arc};

use tokenizers::Tokenizer;

use decoding::Decoding;
pub use decoding::DecodingError;
pub use stop::{Matched, StopMatcher};

use super::{conversation::PlainText, tools::TokenText};
use shardpack_engine_api::TokenId;

/// A tokenizer and what of its vocabulary is shown.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    decoding: Decoding,
    /// Tokens without text: the structure of a conversation rather than what is said in it.
    hidden: HashSet<u32>,
}

/// Special tokens that open or close turns in published templates. A model may emit them by
/// mistake; they are not shown.
const TURN_MARKERS: [&str; 12] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<s>",
    "</s>",
];

/// The tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// Not a tokenizer file.
    #[error("not a tokenizer: {0}")]
    Parse(tokenizers::Error),
    /// Its tokens cannot be turned back into text piece by piece.
    #[error(transparent)]
    Decoding(#[from] DecodingError),
}

impl Vocabulary {
    /// Parses a `tokenizer.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, VocabularyError> {
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(VocabularyError::Parse)?;
        let decoding = Decoding::parse(bytes)?;
        // Left over from training: a prompt must be neither cut nor padded.
        tokenizer.with_truncation(None).map_err(VocabularyError::Parse)?.with_padding(None);
        let mut vocabulary = Self { tokenizer, decoding, hidden: HashSet::new() };
        for name in TURN_MARKERS {
            vocabulary.hide(name);
        }
        Ok(vocabulary)
    }

    /// Shows a special token as nothing. Special tokens are otherwise shown as their text, since
    /// markers of calls and of thinking are among them and must not be lost.
    pub fn hide(&mut self, token: &str) {
        let special = self.tokenizer.get_added_vocabulary().is_special_token(token);
        if let Some(id) = self.token_id(token).filter(|_| special) {
            self.hidden.insert(id.0);
        }
    }

    /// The bytes of one token by itself, special or not.
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        let mut bytes = Vec::new();
        let added = self.tokenizer.get_added_vocabulary();
        if let Some(text) = added.simple_id_to_token(token.0) {
            bytes.extend_from_slice(text.as_bytes());
        } else if let Some(text) = self.tokenizer.id_to_token(token.0) {
            self.decoding.append_bytes(&text, false, &mut bytes);
        }
        bytes
    }

    /// The token of exactly that text.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(token).map(TokenId)
    }

    /// The token of exactly that text among those that were added to the vocabulary, which no text
    /// is cut into by chance.
    #[must_use]
    pub fn added_token(&self, token: &str) -> Option<TokenId> {
        self.tokenizer.get_added_vocabulary().get_vocab().get(token).copied().map(TokenId)
    }

    /// Every token of a vocabulary of that size, as the grammar compiler needs it.
    pub fn grammar_tokens(&self, vocab_size: u32) -> impl Iterator<Item = TokenText> {
        let added = self.tokenizer.get_added_vocabulary();
        (0..vocab_size).map(move |id| match added.simple_id_to_token(id) {
            Some(name) => TokenText::Added(name),
            None => match self.token_bytes(TokenId(id)) {
                bytes if bytes.is_empty() => TokenText::Nothing,
                bytes => TokenText::Bytes(bytes),
            },
        })
    }

    /// Tokens of a rendered prompt; none are added, since templates write their own special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, tokenizers::Error> {
        let encoding = self.tokenizer.encode_fast(text, false)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Tokens of a text by itself, with those that the tokenizer puts before and after one.
    pub fn encode_special(&self, text: &str) -> Result<Vec<TokenId>, tokenizers::Error> {
        let encoding = self.tokenizer.encode_fast(text, true)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Appends a token's bytes; an id outside the vocabulary has none.
    fn append_bytes(&self, token: TokenId, is_first: bool, out: &mut Vec<u8>) -> bool {
        if self.hidden.contains(&token.0) {
            return false;
        }
        let added = self.tokenizer.get_added_vocabulary();
        if let Some(text) = added.simple_id_to_token(token.0) {
            // Added tokens stand for their own text, whatever alphabet the others are spelt in.
            out.extend_from_slice(text.as_bytes());
        } else if let Some(text) = self.tokenizer.id_to_token(token.0) {
            self.decoding.append_bytes(&text, is_first, out);
        } else {
            return false;
        }
        true
    }
}

/// The bytes of a sequence's tokens, one by one.
pub struct TokenBytes {
    vocabulary: Arc<Vocabulary>,
    is_first: bool,
}

impl TokenBytes {
    /// For a new sequence.
    #[must_use]
    pub const fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, is_first: true }
    }

    /// The next token's bytes; none for hidden ones and ids outside the vocabulary.
    pub fn next(&mut self, token: TokenId) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.vocabulary.append_bytes(token, self.is_first, &mut bytes) {
            self.is_first = false;
        }
        bytes
    }
}

/// Turns tokens into text as they come.
///
/// Invariant: what was handed out is a prefix of the text of all tokens so far, and together with
/// [`Detokenizer::finish`] it is that text.
pub struct Detokenizer {
    bytes: TokenBytes,
    text: PlainText,
}

impl Detokenizer {
    /// For a new sequence.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { bytes: TokenBytes::new(vocabulary), text: PlainText::default() }
    }

    /// The text that a token completes, perhaps none.
    pub fn push(&mut self, token: TokenId) -> String {
        self.text.text(&self.bytes.next(token))
    }

    /// What is left at the end: the replacement character if one was cut off.
    pub fn finish(&mut self) -> String {
        self.text.rest()
    }
}

#[cfg(test)]
mod converted;
#[cfg(test)]
mod tests;
