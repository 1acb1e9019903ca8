//! A text's tokens, for what measures models: no conversation, no template.

use std::{fs, io, path::Path};

use tokenizers::Tokenizer;

use crate::engine::TokenId;

/// A text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The tokenizer's file cannot be read.
    #[error("cannot read the tokenizer")]
    Read(#[from] io::Error),
    /// It is no tokenizer, or does not take the text.
    #[error("the tokenizer fails: {0}")]
    Tokenizer(tokenizers::Error),
}

/// The tokens of `text` by the `tokenizer.json` of a folder, and the token that the model's
/// sequences begin with, if its tokenizer puts one there.
pub fn tokenize(
    folder: &Path,
    text: &str,
) -> Result<(Vec<TokenId>, Option<TokenId>), TokenizeError> {
    let bytes = fs::read(folder.join("tokenizer.json"))?;
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(TokenizeError::Tokenizer)?;
    // Left over from training: a text must be neither cut nor padded.
    tokenizer.with_truncation(None).map_err(TokenizeError::Tokenizer)?.with_padding(None);
    let encode = |text: &str, special| -> Result<Vec<TokenId>, TokenizeError> {
        let encoded = tokenizer.encode(text, special).map_err(TokenizeError::Tokenizer)?;
        Ok(encoded.get_ids().iter().map(|id| TokenId(*id)).collect())
    };
    Ok((encode(text, false)?, encode("", true)?.first().copied()))
}
