//! Text to tokens, by what stands in a `tokenizer.json`: normalizers, expressions, merges. All of it
//! is foreign and is executed here, so a server has it in a sandbox.

use shardpack_engine_api::TokenId;
use tokenizers::Tokenizer;

use super::table::{TokenEntry, TokenKind, TokenTable};

/// A tokenizer.
pub struct Encoder(Tokenizer);

/// Not a tokenizer file.
#[derive(Debug, thiserror::Error)]
#[error("not a tokenizer: {0}")]
pub struct EncoderError(tokenizers::Error);

impl Encoder {
    /// Parses a `tokenizer.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, EncoderError> {
        let text = str::from_utf8(bytes).map_err(|error| EncoderError(error.into()))?;
        // `from_bytes` is generic: calling it would compile the whole parser of tokenizers in this crate.
        let mut tokenizer: Tokenizer = text.parse().map_err(EncoderError)?;
        // Left over from training: a prompt must be neither cut nor padded.
        tokenizer.with_truncation(None).map_err(EncoderError)?.with_padding(None);
        Ok(Self(tokenizer))
    }

    /// Tokens of a rendered prompt; none are added, since templates write their own special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, tokenizers::Error> {
        let encoding = self.0.encode_fast(text, false)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Tokens of a text by itself, with those that the tokenizer puts before and after one.
    pub fn encode_special(&self, text: &str) -> Result<Vec<TokenId>, tokenizers::Error> {
        let encoding = self.0.encode_fast(text, true)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Its tokens, in the order of their ids.
    #[must_use]
    pub fn tokens(&self) -> TokenTable {
        let added = self.0.get_added_vocabulary();
        let decoder = added.get_added_tokens_decoder();
        let mut tokens: Vec<TokenEntry> = decoder
            .iter()
            .map(|(id, token)| {
                let is_special = added.is_special_token(&token.content);
                let kind = if is_special { TokenKind::Special } else { TokenKind::Added };
                TokenEntry { id: *id, kind, text: token.content.clone() }
            })
            .collect();
        let plain = self.0.get_vocab(false).into_iter();
        let plain = plain.filter(|(_, id)| !decoder.contains_key(id));
        tokens.extend(plain.map(|(text, id)| TokenEntry { id, kind: TokenKind::Plain, text }));
        tokens.sort_unstable_by(|a, b| (a.id, &a.text).cmp(&(b.id, &b.text)));
        TokenTable(tokens)
    }
}
