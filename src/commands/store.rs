//! The managed store: package sets that `serve MODEL` converts when they are needed, one folder each;
//! `list`, `rm` and `du`.

use std::{
    collections::BTreeSet,
    env, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_converter::ConvertOptions;
use shardpack_manifests::Digest;

use super::{Outcome, convert, package, threads};
use crate::{
    args::{RemoveArgs, StoreArgs},
    failure::Failure,
    progress::{result, say, size, table},
    source::{Input, Keep},
};

/// Bits per weight when none are asked for.
const BITS: u32 = 4;

/// A model of the store.
struct Stored {
    name: String,
    bits: u32,
    ranks: usize,
    bytes: u64,
}

/// The folder of the store: `$SHARDPACK_MODELS`, or `shardpack/models` in the user's data folder
/// (XDG's, which macOS has by default too).
fn folder() -> anyhow::Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(models) = set("SHARDPACK_MODELS") {
        return Ok(models);
    }
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    let data = data.context("no home folder: set SHARDPACK_MODELS to the folder of models")?;
    Ok(data.join("shardpack/models"))
}

/// The package set to serve for what the user named, and whether it is one of the store: a set is
/// taken as it is; anything else is a source, converted into the store unless it is there.
pub(super) fn set_of(
    given: &Path,
    bits: Option<u32>,
    nodes: usize,
) -> Result<(PathBuf, bool), Failure> {
    let is_package = given.join(shardpack_manifests::manifest::MANIFEST_FILE).is_file();
    if package::is_set(given) || is_package {
        if bits.is_some() {
            let given = given.display();
            return Err(anyhow!("--bits: {given} is converted already; leave it away").into());
        }
        return Ok((given.to_owned(), false));
    }
    let store = folder()?;
    if let Some(name) = given.to_str().filter(|name| is_name(name))
        && package::is_set(&store.join(name))
    {
        return Ok((store.join(name), true));
    }
    let is_remote = given.to_str().is_some_and(|text| text.contains('/')) && !given.exists();
    if !given.exists() && !is_remote {
        let given = given.display();
        return Err(Failure::from(anyhow!("{given}: no such set, model or file")).hint(
            "give a package set, a folder or .gguf file of a model, organisation/model of the hub, or a name that `shardpack list` shows",
        ));
    }
    #[cfg(feature = "hub")]
    if is_remote
        && bits.is_none()
        && let Some(set) = crate::source::hub::fetch_set(given)?
    {
        return Ok((set, true));
    }
    let bits = bits.unwrap_or(BITS);
    let set = store.join(name_of(given, bits, nodes)?);
    if !package::is_set(&set) {
        fs::create_dir_all(&store).with_context(|| store.display().to_string())?;
        say(&format!("note: converting to {bits} bits for {nodes} nodes into {}", set.display()));
        let mut options = ConvertOptions::new(set.clone(), nodes as u32);
        options.bits = bits;
        options.name = Some(given.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        let input = Input::model(given, Keep::All);
        threads::with(None, || convert::convert_source(&input, options))??;
    }
    Ok((set, true))
}

/// What a source's set is called: its name, bits and nodes; of a folder or file on this machine
/// also what tells it from another one, and from itself before it was changed.
fn name_of(given: &Path, bits: u32, nodes: usize) -> anyhow::Result<String> {
    let plain = |text: &str| -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        text.replace('/', "--").chars().map(plain).collect()
    };
    let mut name = if given.exists() {
        let place = given.canonicalize().with_context(|| given.display().to_string())?;
        let marked = [place.join("config.json"), place.clone()];
        let mark = marked.iter().find(|path| path.is_file()).unwrap_or(&place);
        let changed = fs::metadata(mark).and_then(|metadata| metadata.modified());
        let changed = changed.with_context(|| mark.display().to_string())?;
        let digest = Digest::of(format!("{} {changed:?}", place.display()).as_bytes()).to_string();
        let stem = place.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        format!("{}-{}", plain(&stem), &digest[..8])
    } else {
        plain(&given.to_string_lossy())
    };
    name = format!("{}-{bits}bit", name.trim_start_matches(['.', '-']));
    Ok(if nodes == 1 { name } else { format!("{name}-{nodes}nodes") })
}

/// Whether this is one plain name below the store.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains('/')
}

/// Runs `list`.
pub(crate) fn list(args: &StoreArgs) -> Outcome {
    let models = models()?;
    if args.form.json {
        let model = |model: &Stored| json!({ "name": model.name, "bits": model.bits, "nodes": model.ranks, "bytes": model.bytes });
        let models: Vec<_> = models.iter().map(model).collect();
        result(&json!({ "folder": folder()?, "models": models }).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    if models.is_empty() {
        say(&format!("note: no models in {}", folder()?.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["name", "bits", "nodes", "size"].map(str::to_owned).to_vec()];
    rows.extend(models.iter().map(|model| {
        let (bits, ranks) = (model.bits.to_string(), model.ranks.to_string());
        vec![model.name.clone(), bits, ranks, size(model.bytes)]
    }));
    result(table(&rows).trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Runs `du`.
pub(crate) fn disk_usage(args: &StoreArgs) -> Outcome {
    let folder = folder()?;
    let bytes = bytes_below(&folder)?;
    if args.form.json {
        result(&json!({ "folder": folder, "bytes": bytes }).to_string());
    } else {
        result(&format!("{}  {}", size(bytes), folder.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `rm`.
pub(crate) fn remove(args: &RemoveArgs) -> Outcome {
    let store = folder()?;
    for name in &args.names {
        if !is_name(name) || !package::is_set(&store.join(name)) {
            let problem = anyhow!("{name}: no model of this name in {}", store.display());
            return Err(Failure::from(problem).hint("`shardpack list` shows their names"));
        }
    }
    for name in &args.names {
        let set = store.join(name);
        let bytes = bytes_below(&set)?;
        fs::remove_dir_all(&set).with_context(|| set.display().to_string())?;
        say(&format!("removed {name}, {}", size(bytes)));
    }
    Ok(ExitCode::SUCCESS)
}

fn models() -> Result<Vec<Stored>, Failure> {
    let store = folder()?;
    let entries = match fs::read_dir(&store) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| store.display().to_string())?,
    };
    let mut models = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if !package::is_set(&path) {
            continue;
        }
        let set = package::read_set(&path)?;
        models.push(Stored {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bits: set.quantization.bits,
            ranks: set.packages.len(),
            bytes: bytes_below(&path)?,
        });
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Bytes of the files below a folder; those that packages share count once.
fn bytes_below(folder: &Path) -> anyhow::Result<u64> {
    let (mut seen, mut bytes, mut waiting) = (BTreeSet::new(), 0, vec![folder.to_owned()]);
    while let Some(folder) = waiting.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries.with_context(|| folder.display().to_string())?,
        };
        for entry in entries {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                waiting.push(entry.path());
            } else if seen.insert((metadata.dev(), metadata.ino())) {
                bytes += metadata.len();
            }
        }
    }
    Ok(bytes)
}
