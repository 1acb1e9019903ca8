//! The draft model of rank 0: finds it and checks that it fits the model that is served.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use shardpack_chat::PromptHome;

use super::{package, store, text_worker};
use crate::{args::EngineChoice, failure::Failure};

/// Checks the draft model of an engine's arguments before anything is started.
pub(super) fn check(engine: &EngineChoice) -> Result<(), Failure> {
    engine.draft_model.as_deref().map(folder).transpose().map(drop)
}

/// The same if the ranks run on nodes, each of which has its own engine arguments.
pub(super) fn check_elsewhere(engine: &EngineChoice) -> Result<(), Failure> {
    if engine.draft_model.is_none() {
        return Ok(());
    }
    let error = anyhow!("--draft-model is loaded by rank 0, which runs on another node");
    Err(Failure::from(error).hint("start that node with it: shardpack node … --draft-model SET"))
}

/// The only package of a draft model's set.
pub(super) fn folder(set: &Path) -> Result<PathBuf, Failure> {
    let (_, mut folders) = package::members(&store::packed(set)?)?;
    let count = folders.len();
    match folders.pop() {
        Some(folder) if count == 1 => Ok(folder),
        _ => {
            let error = anyhow!(
                "{}: sharded for {count} nodes, and a draft model runs on rank 0 only",
                set.display()
            );
            Err(Failure::wrong(error).hint("convert or reshard it for one node"))
        }
    }
}

/// Refuses a draft model with another tokenizer than the model in a package.
pub(super) fn compare(draft: &Path, package: &Path) -> anyhow::Result<()> {
    let sandbox = text_worker::program();
    shardpack_chat::check_same_tokens(package, draft, PromptHome::Sandboxed(&sandbox))
        .with_context(|| format!("the draft model in {}", draft.display()))
}
