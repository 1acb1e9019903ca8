//! Tokenizes plain text, for evaluation and draft models: no conversation, no template.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use shardpack_engine_api::TokenId;
use tokenizers::Tokenizer;

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

/// The draft model's vocabulary does not match the model's.
#[derive(Debug, thiserror::Error)]
pub enum SameTokensError {
    /// One of the two has no tokenizer to compare.
    #[error("{}", folder.display())]
    Tokenizer {
        /// Its package.
        folder: PathBuf,
        /// Why.
        source: TokenizeError,
    },
    /// The tokenizers are of different families.
    #[error(
        "its tokens are not the model's: {differing} of {known} differ, such as {token}, which is \
         {draft:?} to it and {model:?} to the model; a draft model is one of the same family"
    )]
    Other {
        /// Tokens of different texts.
        differing: usize,
        /// Tokens that both know.
        known: usize,
        /// The first that differs.
        token: u32,
        /// What it is to the draft model.
        draft: String,
        /// What it is to the model.
        model: String,
    },
}

/// One in so many tokens may differ: unused tokens have other names in each version of a family. A
/// draft token that means something else is rejected like any wrong one.
const MAY_DIFFER: usize = 100;

/// Refuses a draft model (the folder of its package) whose vocabulary differs from the model's.
pub fn check_same_tokens(model: &Path, draft: &Path) -> Result<(), SameTokensError> {
    let open = |folder: &Path| {
        open(folder)
            .map_err(|source| SameTokensError::Tokenizer { folder: folder.to_owned(), source })
    };
    let [model, draft] = [open(model)?, open(draft)?];
    let size = model.get_vocab_size(true).max(draft.get_vocab_size(true)) as u32;
    let both = |id| Some((id, model.id_to_token(id)?, draft.id_to_token(id)?));
    let known: Vec<_> = (0..size).filter_map(both).collect();
    let differing: Vec<_> = known.iter().filter(|(_, model, draft)| model != draft).collect();
    match differing.first() {
        Some((token, model, draft)) if differing.len() * MAY_DIFFER > known.len() => {
            Err(SameTokensError::Other {
                differing: differing.len(),
                known: known.len(),
                token: *token,
                draft: draft.clone(),
                model: model.clone(),
            })
        }
        _ => Ok(()),
    }
}

fn open(folder: &Path) -> Result<Tokenizer, TokenizeError> {
    let bytes = fs::read(folder.join("tokenizer.json"))?;
    Tokenizer::from_bytes(bytes).map_err(TokenizeError::Tokenizer)
}

/// The tokens of `text` by the `tokenizer.json` of a folder, and the token that the model's
/// sequences begin with, if its tokenizer puts one there.
pub fn tokenize(
    folder: &Path,
    text: &str,
) -> Result<(Vec<TokenId>, Option<TokenId>), TokenizeError> {
    let mut tokenizer = open(folder)?;
    // Left over from training: a text must be neither cut nor padded.
    tokenizer.with_truncation(None).map_err(TokenizeError::Tokenizer)?.with_padding(None);
    let encode = |text: &str, special| -> Result<Vec<TokenId>, TokenizeError> {
        let encoded = tokenizer.encode(text, special).map_err(TokenizeError::Tokenizer)?;
        Ok(encoded.get_ids().iter().map(|id| TokenId(*id)).collect())
    };
    Ok((encode(text, false)?, encode("", true)?.first().copied()))
}
