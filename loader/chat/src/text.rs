//! Text to tokens and back. Tokens are bytes: a detokenizer collects the bytes of the tokens as
//! they come and hands out whole characters.

mod decoding;
mod encoder;
mod stop;
mod table;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use decoding::Decoding;
pub use decoding::DecodingError;
pub use encoder::{Encoder, EncoderError};
pub use stop::{Matched, StopMatcher};
pub use table::{TOKENS_MAX, TableError, TokenEntry, TokenKind, TokenTable};

use super::{conversation::PlainText, tools::TokenText};
use shardpack_engine_api::TokenId;

/// The tokens of a vocabulary as bytes, and which of them are shown. It cannot tokenize: that is an
/// [`Encoder`]'s, which executes what stands in a tokenizer's file.
pub struct Vocabulary {
    texts: HashMap<u32, Token>,
    ids: HashMap<Box<str>, u32>,
    decoding: Decoding,
    /// Tokens without text: the structure of a conversation rather than what is said in it.
    hidden: HashSet<u32>,
}

/// A token by its id.
struct Token {
    text: Box<str>,
    kind: TokenKind,
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
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// Its tokens cannot be turned back into text piece by piece.
    #[error(transparent)]
    Decoding(#[from] DecodingError),
}

impl Vocabulary {
    /// The tokens of a `tokenizer.json`, which is read and not executed but for the names of its
    /// tokens, which `tokens` has.
    pub fn new(tokens: TokenTable, tokenizer: &[u8]) -> Result<Self, DecodingError> {
        let decoding = Decoding::parse(tokenizer)?;
        let mut texts = HashMap::with_capacity(tokens.0.len());
        let mut ids = HashMap::with_capacity(tokens.0.len());
        // Of two tokens with one text the added one is meant, as tokenizers have it.
        let (added, plain): (Vec<_>, Vec<_>) =
            tokens.0.into_iter().partition(|token| token.kind != TokenKind::Plain);
        for TokenEntry { id, kind, text } in added.into_iter().chain(plain) {
            let text: Box<str> = text.into();
            ids.entry(text.clone()).or_insert(id);
            texts.entry(id).or_insert(Token { text, kind });
        }
        let mut vocabulary = Self { texts, ids, decoding, hidden: HashSet::new() };
        for name in TURN_MARKERS {
            vocabulary.hide(name);
        }
        Ok(vocabulary)
    }

    /// Parses a `tokenizer.json` in this process.
    pub fn parse(bytes: &[u8]) -> Result<Self, VocabularyError> {
        let encoder = Encoder::parse(bytes)?;
        Ok(Self::new(encoder.tokens(), bytes)?)
    }

    /// Shows a special token as nothing. Special tokens are otherwise shown as their text, since
    /// markers of calls and of thinking are among them and must not be lost.
    pub fn hide(&mut self, token: &str) {
        let id = self.ids.get(token).copied();
        let is_special =
            |id: &u32| self.texts.get(id).is_some_and(|token| token.kind == TokenKind::Special);
        if let Some(id) = id.filter(is_special) {
            self.hidden.insert(id);
        }
    }

    /// The bytes of one token by itself, special or not.
    #[must_use]
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(token) = self.texts.get(&token.0) {
            self.append_text(token, false, &mut bytes);
        }
        bytes
    }

    /// The token of exactly that text.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<TokenId> {
        self.ids.get(token).copied().map(TokenId)
    }

    /// The text by which the vocabulary has a token.
    #[must_use]
    pub fn token_text(&self, token: TokenId) -> Option<&str> {
        self.texts.get(&token.0).map(|token| &*token.text)
    }

    /// The ids of its tokens, in order.
    #[must_use]
    pub fn token_ids(&self) -> BTreeSet<u32> {
        self.texts.keys().copied().collect()
    }

    /// The token of exactly that text among those that were added to the vocabulary, which no text
    /// is cut into by chance.
    #[must_use]
    pub fn added_token(&self, token: &str) -> Option<TokenId> {
        let id = *self.ids.get(token)?;
        self.texts.get(&id).filter(|token| token.kind != TokenKind::Plain).map(|_| TokenId(id))
    }

    /// Every token of a vocabulary of that size, as the grammar compiler needs it.
    pub fn grammar_tokens(&self, vocab_size: u32) -> impl Iterator<Item = TokenText> {
        (0..vocab_size).map(move |id| match self.texts.get(&id) {
            Some(Token { text, kind: TokenKind::Added | TokenKind::Special }) => {
                TokenText::Added(text.to_string())
            }
            _ => match self.token_bytes(TokenId(id)) {
                bytes if bytes.is_empty() => TokenText::Nothing,
                bytes => TokenText::Bytes(bytes),
            },
        })
    }

    /// Appends a token's bytes; an id outside the vocabulary has none.
    fn append_bytes(&self, token: TokenId, is_first: bool, out: &mut Vec<u8>) -> bool {
        if self.hidden.contains(&token.0) {
            return false;
        }
        let Some(token) = self.texts.get(&token.0) else { return false };
        self.append_text(token, is_first, out);
        true
    }

    fn append_text(&self, token: &Token, is_first: bool, out: &mut Vec<u8>) {
        match token.kind {
            TokenKind::Plain => self.decoding.append_bytes(&token.text, is_first, out),
            // Added tokens stand for their own text, whatever alphabet the others are spelt in.
            TokenKind::Added | TokenKind::Special => out.extend_from_slice(token.text.as_bytes()),
        }
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
