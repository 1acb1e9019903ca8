//! A draft model for rank 0: found, compared with the model that is served, and opened.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::package;
use crate::{args::EngineChoice, failure::Failure};

/// Refuses, before anything is started, what an engine's choice asks for and cannot be.
pub(super) fn check(engine: &EngineChoice) -> Result<(), Failure> {
    engine.draft_model.as_deref().map(folder).transpose().map(drop)
}

/// The same where ranks run on nodes, each of which has an engine of its own choice.
pub(super) fn check_elsewhere(engine: &EngineChoice) -> Result<(), Failure> {
    if engine.draft_model.is_none() {
        return Ok(());
    }
    let error = anyhow!("--draft-model is read by rank 0, which runs on another node");
    Err(Failure::from(error).hint("start that node with it: shardpack node … --draft-model SET"))
}

/// The package of a draft model's set, which has only this one.
pub(super) fn folder(set: &Path) -> Result<PathBuf, Failure> {
    let document = package::read_set(set)?;
    let mut folders = package::folders(set, &document);
    let count = folders.len();
    match folders.pop() {
        Some(folder) if count == 1 => Ok(folder),
        _ => {
            let error = anyhow!(
                "{}: cut for {count} nodes, and a draft model runs on rank 0 alone",
                set.display()
            );
            Err(Failure::wrong(error).hint("convert it again, for one node"))
        }
    }
}

/// Refuses a draft model with other tokens than the model in a package.
pub(super) fn compare(draft: &Path, package: &Path) -> anyhow::Result<()> {
    shardpack_chat::check_same_tokens(package, draft)
        .with_context(|| format!("the draft model in {}", draft.display()))
}
