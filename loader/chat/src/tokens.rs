//! Tokenizes plain text, for evaluation and draft models: no conversation, no template.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use shardpack_engine_api::TokenId;

use super::{
    prompt::{PromptFiles, TextMarks},
    prompt_side::{OpenSideError, PromptHome, PromptSide, PromptSideError},
    text::{TokenEntry, TokenKind, TokenTable},
};

/// A text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The tokenizer's file cannot be read.
    #[error("cannot read the tokenizer")]
    Read(#[from] io::Error),
    /// It is no tokenizer.
    #[error("the tokenizer fails: {0}")]
    Open(OpenSideError),
    /// It does not take the text.
    #[error("the tokenizer fails: {0}")]
    Encode(PromptSideError),
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

/// Refuses a draft model (the folder of its package) whose vocabulary differs from the model's;
/// both tokenizers are opened in `home`.
pub fn check_same_tokens(
    model: &Path,
    draft: &Path,
    home: PromptHome<'_>,
) -> Result<(), SameTokensError> {
    let tokens = |folder: &Path| -> Result<BTreeMap<u32, String>, SameTokensError> {
        let (_, tokens) = open(folder, home)
            .map_err(|source| SameTokensError::Tokenizer { folder: folder.to_owned(), source })?;
        // Of several tokens with one id the added one is meant.
        let (added, plain): (Vec<_>, Vec<_>) =
            tokens.0.into_iter().partition(|token| token.kind != TokenKind::Plain);
        let all = plain.into_iter().chain(added);
        Ok(all.map(|TokenEntry { id, text, .. }| (id, text)).collect())
    };
    let [model, draft] = [tokens(model)?, tokens(draft)?];
    let both = |(id, model)| Some((id, model, draft.get(id)?));
    let known: Vec<(&u32, &String, &String)> = model.iter().filter_map(both).collect();
    let differing: Vec<_> = known.iter().filter(|(_, model, draft)| model != draft).collect();
    match differing.first() {
        Some((token, model, draft)) if differing.len() * MAY_DIFFER > known.len() => {
            Err(SameTokensError::Other {
                differing: differing.len(),
                known: known.len(),
                token: **token,
                draft: (*draft).clone(),
                model: (*model).clone(),
            })
        }
        _ => Ok(()),
    }
}

fn open(folder: &Path, home: PromptHome<'_>) -> Result<(PromptSide, TokenTable), TokenizeError> {
    let tokenizer = fs::read(folder.join("tokenizer.json"))?;
    let files = PromptFiles { tokenizer, ..PromptFiles::default() };
    let (side, opened) = PromptSide::open(files, home).map_err(TokenizeError::Open)?;
    Ok((side, opened.tokens))
}

/// The tokens of `text` by the `tokenizer.json` of a folder, which is opened in `home`, and the token
/// that the model's sequences begin with, if its tokenizer puts one there.
pub fn tokenize(
    folder: &Path,
    text: &str,
    home: PromptHome<'_>,
) -> Result<(Vec<TokenId>, Option<TokenId>), TokenizeError> {
    let (mut tokens, first) = tokenize_all(folder, &[text], home)?;
    Ok((tokens.pop().unwrap_or_default(), first))
}

/// [`tokenize`] of several texts, each by itself.
pub fn tokenize_all(
    folder: &Path,
    texts: &[&str],
    home: PromptHome<'_>,
) -> Result<(Vec<Vec<TokenId>>, Option<TokenId>), TokenizeError> {
    let (side, _) = open(folder, home)?;
    let encode = |text: &str, marks| side.encode(text, marks).map_err(TokenizeError::Encode);
    let first = encode("", TextMarks::Special)?.first().copied();
    let tokens =
        texts.iter().map(|text| encode(text, TextMarks::None)).collect::<Result<_, _>>()?;
    Ok((tokens, first))
}
