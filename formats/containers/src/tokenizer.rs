//! Tokenizers of other programs as `tokenizer.json`, the one form that this program and its
//! neighbours load: ranks of tiktoken (Kimi), Mistral's tekken, and sentencepiece models.
//!
//! A conversion gives every text the tokens that the original gives it, or is refused by name with
//! what to do. Files come from strangers: sizes and counts are bounded, and nothing is executed.

pub mod added;
mod base64;
mod document;
mod protobuf;
mod ranks;
pub(crate) mod sentencepiece;
mod tekken;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde_json::Value;

pub use ranks::kimi;
pub use sentencepiece::sentencepiece;
pub use tekken::tekken;

/// Most tokens of a vocabulary: the largest published one has 262,144.
pub const MAX_TOKENS: usize = 1 << 20;

/// Longest token in bytes: the longest of a published model has under 300.
pub const MAX_TOKEN_BYTES: usize = 1024;

/// The form that needs no conversion.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Files that a tokenizer can be made of, in the order in which they are asked.
pub const OTHER_FILES: &[&str] = &["tekken.json", "tiktoken.model", "tokenizer.model"];

/// A tokenizer that cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// Not what its name says.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// A form whose tokens `tokenizer.json` could not give.
    #[error("{0}")]
    Refused(String),
}

/// A converted tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// `tokenizer.json`.
    pub json: Vec<u8>,
    /// The file that it was made of.
    pub from: &'static str,
}

/// Makes a `tokenizer.json` of whatever stands beside the weights; `None` when there is one, or
/// nothing that one can be made of. The error comes with the file's name.
#[must_use]
pub fn convert(
    files: &BTreeMap<String, Vec<u8>>,
) -> Option<Result<Converted, (&'static str, TokenizerError)>> {
    if files.contains_key(TOKENIZER_FILE) {
        return None;
    }
    let (from, bytes) = OTHER_FILES.iter().find_map(|name| Some((*name, files.get(*name)?)))?;
    let config = files.get("tokenizer_config.json");
    let config = config.and_then(|bytes| serde_json::from_slice(bytes).ok());
    let config: Value = config.unwrap_or_default();
    let document = match from {
        "tekken.json" => tekken(bytes),
        "tiktoken.model" => kimi(bytes, &config),
        _ => sentencepiece(bytes, &config),
    };
    Some(match document {
        Ok(document) => Ok(Converted { json: document.to_string().into_bytes(), from }),
        Err(error) => Err((from, error)),
    })
}

fn damaged(problem: impl Into<String>) -> TokenizerError {
    TokenizerError::Damaged(problem.into())
}

fn refused(problem: impl Into<String>) -> TokenizerError {
    TokenizerError::Refused(problem.into())
}
