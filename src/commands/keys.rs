//! `shardpack keys`: files of API keys.

use std::{collections::BTreeSet, fs, io::Write, num::NonZeroU32, path::Path, process::ExitCode};

use anyhow::{Context, anyhow};
use shardpack_server::{ApiKeys, KEY_FILE_BYTES_MAX, KeyEntry, KeyFile, KeyLimits, Scope};

use super::Outcome;
use crate::{
    args::{KeyAction, KeyLimitArgs, KeysArgs},
    failure::Failure,
    progress::{result, say, table},
};

/// How soon running servers notice a change of the file.
const NOTICED: &str = "running servers notice within 2 seconds";

/// Runs the command.
pub(crate) fn run(args: &KeysArgs) -> Outcome {
    let mut file = read(&args.file)?;
    let unknown = |name: &String| {
        let error = anyhow!("{}: no key is named {name:?}", args.file.display());
        Failure::wrong(error)
    };
    match &args.action {
        KeyAction::List { json: true } => {
            result(&serde_json::to_string(&file.keys).context("keys are always JSON")?);
        }
        KeyAction::List { json: false } => result(table(&rows(&file)).trim_end()),
        KeyAction::Remove { name } => {
            if !file.remove(name) {
                return Err(unknown(name));
            }
            write(&args.file, &file)?;
            say(&format!("keys: {name} removed; {NOTICED}, and its running requests finish"));
        }
        KeyAction::Set { name, scopes, limits, no_limits } => {
            let entry = file.entry_mut(name).ok_or_else(|| unknown(name))?;
            if !scopes.is_empty() {
                entry.scopes = parse_scopes(scopes)?;
            }
            if *no_limits {
                entry.limits = KeyLimits::default();
            }
            change(entry, limits);
            write(&args.file, &file)?;
            say(&format!("keys: {name} changed; {NOTICED}"));
        }
        KeyAction::Add { name, scopes, read_only, limits } => {
            let scopes = if *read_only { [Scope::Metrics].into() } else { parse_scopes(scopes)? };
            let key = file.add(name, scopes, KeyLimits::default()).map_err(Failure::wrong)?;
            change(file.entry_mut(name).ok_or_else(|| unknown(name))?, limits);
            write(&args.file, &file)?;
            result(&key);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes over what was given.
fn change(entry: &mut KeyEntry, args: &KeyLimitArgs) {
    let limits = &mut entry.limits;
    limits.requests_per_minute = args.requests_per_minute.or(limits.requests_per_minute);
    limits.tokens_per_minute = args.tokens_per_minute.or(limits.tokens_per_minute);
    limits.concurrency = args.concurrency.or(limits.concurrency);
    limits.body_bytes_per_minute = args.body_bytes_per_minute.or(limits.body_bytes_per_minute);
    limits.grammar_ms_per_minute = args.grammar_ms_per_minute.or(limits.grammar_ms_per_minute);
    entry.weight = args.weight.or(entry.weight);
    match args.models.as_slice() {
        [] => {}
        [all] if all == "all" => entry.models = None,
        models => entry.models = Some(models.iter().cloned().collect()),
    }
    match args.share_prefix_cache.as_deref() {
        None => {}
        Some("none") => entry.share_prefix_cache = None,
        Some(group) => entry.share_prefix_cache = Some(group.to_owned()),
    }
}

/// The keys of a file, for a server, which reads it again when it changes.
pub(super) fn open(path: &Path) -> Result<ApiKeys, Failure> {
    if !path.exists() {
        let error = anyhow!("{}: no such file", path.display());
        let hint = format!("make a key first: shardpack keys {} add NAME", path.display());
        return Err(Failure::from(error).hint(hint));
    }
    let keys = ApiKeys::new(read(path)?)
        .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown(path))))?;
    Ok(keys.watching(path, Box::new(say)))
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
    let heads = [
        "name",
        "scopes",
        "requests/min",
        "tokens/min",
        "at once",
        "bytes/min",
        "grammar ms/min",
        "weight",
        "models",
        "prefix cache",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for key in &file.keys {
        let scopes: Vec<&str> = key.scopes.iter().map(|scope| scope.name()).collect();
        let limit =
            |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
        let limits = &key.limits;
        let models = key
            .models
            .as_ref()
            .map(|models| models.iter().map(String::as_str).collect::<Vec<_>>().join(","));
        rows.push(vec![
            key.name.clone(),
            scopes.join(","),
            limit(limits.requests_per_minute.map(u64::from)),
            limit(limits.tokens_per_minute.map(u64::from)),
            limit(limits.concurrency.map(u64::from)),
            limit(limits.body_bytes_per_minute),
            limit(limits.grammar_ms_per_minute.map(u64::from)),
            key.weight.map_or(1, NonZeroU32::get).to_string(),
            models.unwrap_or_else(|| "all".to_owned()),
            key.share_prefix_cache.clone().unwrap_or_else(|| "own".to_owned()),
        ]);
    }
    rows
}
