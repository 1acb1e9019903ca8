//! `shardpack completions` and `shardpack man`.

use std::{fs, process::ExitCode};

use anyhow::Context as _;

use super::Outcome;
use crate::{
    args::{CompletionsArgs, ManArgs, page, pages},
    progress::{result, result_part},
};

/// Runs `completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Outcome {
    result_part(&String::from_utf8_lossy(&args.script()))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `man`.
pub(crate) fn man(args: &ManArgs) -> Outcome {
    let Some(folder) = &args.folder else {
        result_part(&String::from_utf8_lossy(&page()?))?;
        return Ok(ExitCode::SUCCESS);
    };
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let pages = pages()?;
    for (name, page) in &pages {
        let path = folder.join(name);
        fs::write(&path, page).with_context(|| path.display().to_string())?;
    }
    result(&format!("{} pages in {}", pages.len(), folder.display()));
    Ok(ExitCode::SUCCESS)
}
