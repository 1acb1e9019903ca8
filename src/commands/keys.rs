//! `shardpack keys`: files of API keys.

use std::{collections::BTreeSet, fs, io::Write, path::Path, process::ExitCode};

use anyhow::{Context, anyhow};
use shardpack_server::{ApiKeys, KEY_FILE_BYTES_MAX, KeyFile, KeyLimits, Scope};

use super::Outcome;
use crate::{
    args::{KeyAction, KeysArgs},
    failure::Failure,
    progress::{result, say, table},
};

/// Runs the command.
pub(crate) fn run(args: &KeysArgs) -> Outcome {
    let mut file = read(&args.file)?;
    match &args.action {
        KeyAction::List => result(table(&rows(&file)).trim_end()),
        KeyAction::Remove { name } => {
            if !file.remove(name) {
                let error = anyhow!("{}: no key is named {name:?}", args.file.display());
                return Err(Failure::wrong(error));
            }
            write(&args.file, &file)?;
            say(&format!("keys: {name} removed; restart servers that have read the file"));
        }
        KeyAction::Add { name, scopes, requests_per_minute, tokens_per_minute, concurrency } => {
            let limits = KeyLimits {
                requests_per_minute: *requests_per_minute,
                tokens_per_minute: *tokens_per_minute,
                concurrency: *concurrency,
            };
            let key = file.add(name, parse_scopes(scopes)?, limits).map_err(Failure::wrong)?;
            write(&args.file, &file)?;
            result(&key);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The keys of a file, for a server.
pub(super) fn open(path: &Path) -> Result<ApiKeys, Failure> {
    if !path.exists() {
        let error = anyhow!("{}: no such file", path.display());
        let hint = format!("make a key first: shardpack keys {} add NAME", path.display());
        return Err(Failure::from(error).hint(hint));
    }
    ApiKeys::new(read(path)?)
        .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown(path))))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The file, or an empty one where there is none yet.
fn read(path: &Path) -> Result<KeyFile, Failure> {
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(KeyFile::default()),
        Err(error) => return Err(anyhow::Error::from(error).context(shown(path)).into()),
    };
    if size > KEY_FILE_BYTES_MAX {
        let error = anyhow!("{}: over {KEY_FILE_BYTES_MAX} bytes", path.display());
        return Err(Failure::wrong(error));
    }
    let bytes = fs::read(path).with_context(|| shown(path))?;
    KeyFile::parse(&bytes)
        .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown(path))))
}

/// Writes a sibling and renames it, so that no reader sees half a file.
fn write(path: &Path, file: &KeyFile) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    let mut sibling = tempfile::NamedTempFile::new_in(folder)
        .with_context(|| format!("cannot write in {}", folder.display()))?;
    let text = serde_json::to_string_pretty(file).context("keys are always JSON")?;
    sibling.write_all(text.as_bytes()).with_context(|| shown(path))?;
    sibling.as_file().sync_all().with_context(|| shown(path))?;
    sibling.persist(path).with_context(|| shown(path))?;
    Ok(())
}

fn parse_scopes(names: &[String]) -> Result<BTreeSet<Scope>, Failure> {
    let scope = |name: &String| {
        Scope::ALL.into_iter().find(|scope| scope.name() == name).ok_or_else(|| {
            let known = Scope::ALL.map(Scope::name).join(", ");
            Failure::from(anyhow!("--scopes: {name:?} is none of {known}"))
        })
    };
    names.iter().map(scope).collect()
}

fn rows(file: &KeyFile) -> Vec<Vec<String>> {
    let heads = ["name", "scopes", "requests/min", "tokens/min", "at once"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for key in &file.keys {
        let scopes: Vec<&str> = key.scopes.iter().map(|scope| scope.name()).collect();
        let limit = |limit: Option<u32>| limit.map_or_else(|| "-".to_owned(), |n| n.to_string());
        rows.push(vec![
            key.name.clone(),
            scopes.join(","),
            limit(key.limits.requests_per_minute),
            limit(key.limits.tokens_per_minute),
            limit(key.limits.concurrency),
        ]);
    }
    rows
}
