//! The texts of `eval`: read and tokenized, or from a file of logits.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use shardpack_chat::{PromptHome, tokenize_all};
use shardpack_engine::eval::{EvalOptions, LogitsDocument, LogitsReader, StoredText};
use shardpack_engine_api::TokenId;
use shardpack_manifests::{Digest, Manifest};

use super::super::{package, text_worker};
use crate::{args::EvalArgs, failure::Failure, progress::say, text_file};

/// The file of a package whose digest tells tokenizers apart.
const TOKENIZER: &str = "tokenizer.json";

/// What is read by every set.
pub(super) struct Texts {
    /// Names and digests.
    pub(super) stored: Vec<StoredText>,
    /// Tokens.
    pub(super) tokens: Vec<Vec<TokenId>>,
}

impl Texts {
    /// Those of a file of logits.
    pub(super) fn of_file(file: &LogitsReader) -> Self {
        Self { stored: file.document().texts.clone(), tokens: file.texts().to_vec() }
    }
}

/// Reads and tokenizes the texts. The tokens must be the same for every set.
pub(super) fn read(args: &EvalArgs, sets: &[PathBuf]) -> Result<(Texts, EvalOptions), Failure> {
    let texts =
        args.texts.iter().map(|path| text_file::read(path)).collect::<Result<Vec<_>, _>>()?;
    let (mut all, mut known) = (Vec::new(), Vec::new());
    for (given, set) in args.sets.iter().zip(sets) {
        let folder = package::members(set)?.1.into_iter().next();
        let folder = folder.ok_or_else(|| Failure::wrong(anyhow!("the set has no packages")))?;
        let manifest = package::read_manifest(&folder)?;
        let digest = tokenizer(&manifest);
        if digest.is_none() || !known.contains(&digest) {
            all.push((given, manifest.architecture.max_positions, tokens(&folder, &texts)?));
            known.push(digest);
        }
    }
    let longest = all.iter().map(|it| it.1 as usize).min().unwrap_or(0);
    let mut all = all.into_iter();
    let (set, _, (tokens, first)) = all.next().context("no set")?;
    if let Some((other, ..)) = all.find(|it| it.2 != (tokens.clone(), first)) {
        return Err(Failure::wrong(anyhow!(
            "{} and {} make different tokens of the text: evaluate them one by one",
            set.display(),
            other.display()
        )));
    }
    let stored = args.texts.iter().zip(&texts).zip(&tokens).map(|((path, text), tokens)| {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        StoredText { name, blake3: Digest::of(text.as_bytes()), tokens: tokens.len() as u64 }
    });
    let options = EvalOptions { context: args.context.unwrap_or(longest.min(512)), first };
    Ok((Texts { stored: stored.collect(), tokens }, options))
}

type Tokenized = (Vec<Vec<TokenId>>, Option<TokenId>);

fn tokens(folder: &Path, texts: &[String]) -> Result<Tokenized, Failure> {
    let sandbox = text_worker::program();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    tokenize_all(folder, &texts, PromptHome::Sandboxed(&sandbox)).map_err(|error| {
        Failure::wrong(anyhow::Error::from(error).context(folder.display().to_string()))
    })
}

/// The digest of a package's tokenizer.
pub(super) fn tokenizer(manifest: &Manifest) -> Option<Digest> {
    manifest.file(TOKENIZER).map(|file| file.blake3)
}

/// Says so if a set's tokenizer is not that of the file: the ids may mean other tokens.
pub(super) fn compare_tokenizers(document: &LogitsDocument, set: &Path, manifests: &[Manifest]) {
    let own = manifests.first().and_then(tokenizer);
    if own != document.tokenizer {
        let (set, model) = (set.display(), &document.model);
        say(&format!(
            "note: {set} has another {TOKENIZER} than {model}, of which the logits are; figures mean \
             something only if both give the same tokens the same ids"
        ));
    }
}
