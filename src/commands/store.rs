//! The managed store: package sets that `serve MODEL` converts when they are needed; `list`, `rm` and
//! `du`.

use std::{
    env,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_converter::{
    Cancel,
    store::{PullEvent, PullObserver, PullRequest, PullSource, Store, StoreError, Stored},
};

use super::{Outcome, convert, package, threads};
use crate::{
    args::{RemoveArgs, StoreArgs},
    failure::Failure,
    progress::{result, say, size, table},
    source,
};

/// What a model can be, for whoever named something else.
const HINT: &str = "give a package set, a folder or .gguf file of a model, organisation/model of the hub, or a name that `shardpack list` shows";

/// The store: `$SHARDPACK_MODELS`, or `shardpack/models` in the user's data folder (XDG's, which
/// macOS has by default too).
pub(super) fn store() -> anyhow::Result<Store> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(models) = set("SHARDPACK_MODELS") {
        return Ok(Store::new(models));
    }
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    let data = data.context("no home folder: set SHARDPACK_MODELS to the folder of models")?;
    Ok(Store::new(data.join("shardpack/models")))
}

/// The package set or package for what the user named, and whether it is one of the store: what is
/// packed is taken as it is; anything else is a source, converted into the store unless it is there.
pub(super) fn set_of(
    given: &Path,
    bits: Option<u32>,
    nodes: usize,
) -> Result<(PathBuf, bool), Failure> {
    if package::is_set(given) || package::is_package(given) {
        if bits.is_some() {
            let given = given.display();
            return Err(anyhow!("--bits: {given} is converted already; leave it away").into());
        }
        return Ok((given.to_owned(), false));
    }
    let store = store()?;
    if let Some(name) = given.to_str().filter(|_| !given.exists())
        && let Some(stored) = store.find(name).map_err(failure)?
    {
        return Ok((stored.folder, true));
    }
    let source = if given.exists() {
        PullSource::Local(given.to_owned())
    } else {
        source::of_hub(given)?.ok_or_else(|| {
            let given = given.display();
            Failure::from(anyhow!("{given}: no such set, model or file")).hint(HINT)
        })?
    };
    let (nodes, cancel) = (nodes as u32, Cancel::default());
    let request = PullRequest { source, bits, nodes, served_as: None, cancel };
    Ok((pull(&store, &request)?.folder, true))
}

/// The same for commands that choose nothing of a set: a model is converted for one node. What is no
/// model is left to the command to judge.
pub(super) fn model(given: &Path) -> Result<PathBuf, Failure> {
    let ends = |ending: &str| given.extension().is_some_and(|found| found == ending);
    let is_file = given.is_file() && (ends("gguf") || ends("safetensors"));
    let is_model = is_file || given.join("config.json").is_file();
    let is_name = !given.exists()
        && (source::is_of_hub(given)?
            || matches!(given.to_str(), Some(name) if store()?.find(name).map_err(failure)?.is_some()));
    if is_model || is_name { Ok(set_of(given, None, 1)?.0) } else { Ok(given.to_owned()) }
}

/// The same for commands that read packages as they are: names of the store and sets of the hub;
/// nothing is converted.
pub(super) fn packed(given: &Path) -> Result<PathBuf, Failure> {
    let Some(name) = given.to_str().filter(|_| !given.exists()) else {
        return Ok(given.to_owned());
    };
    let store = store()?;
    if let Some(stored) = store.find(name).map_err(failure)? {
        return Ok(stored.folder);
    }
    let Some(source) = source::of_hub(given)? else { return Ok(given.to_owned()) };
    let cancel = Cancel::default();
    let request = PullRequest { source, bits: None, nodes: 1, served_as: None, cancel };
    if let Some(stored) = store.pulled(&request).map_err(failure)? {
        return Ok(stored.folder);
    }
    match fetch_set(name, None)? {
        Some(set) => Ok(set),
        None => Err(Failure::from(anyhow!("{name}: a model, and no package set")).hint(format!(
            "convert it first (shardpack convert {name} -o SET); shardpack plan {name} shows what that would write"
        ))),
    }
}

/// [`packed`] for each.
pub(super) fn packed_all(given: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    given.iter().map(|given| packed(given)).collect()
}

#[cfg(feature = "hub")]
pub(super) fn fetch_set(repository: &str, rank: Option<u32>) -> Result<Option<PathBuf>, Failure> {
    source::hub::fetch_set(repository, rank)
}

#[cfg(not(feature = "hub"))]
pub(super) fn fetch_set(_: &str, _: Option<u32>) -> Result<Option<PathBuf>, Failure> {
    Err(anyhow!("this program was built without the feature `hub`").into())
}

/// Brings a model into the store, with progress.
pub(super) fn pull(store: &Store, request: &PullRequest) -> Result<Stored, Failure> {
    let display = Arc::new(Display::default());
    let shown = Arc::clone(&display);
    let observe: PullObserver = Arc::new(move |event: &PullEvent| shown.show(event));
    let is_new = store.pulled(request).map_err(failure)?.is_none();
    let stored = threads::with(None, || store.pull(request, &observe))?.map_err(failure)?;
    if is_new && let Some(warning) = convert::refused_text(&stored.folder, &stored.set) {
        say(&format!("note: {warning}"));
    }
    Ok(stored)
}

/// A fetch and a conversion as progress bars.
#[derive(Default)]
struct Display {
    #[cfg(feature = "hub")]
    fetch: source::hub::Shown,
    conversion: convert::Display,
}

impl Display {
    fn show(&self, event: &PullEvent) {
        match event {
            #[cfg(feature = "hub")]
            PullEvent::Fetching(event) => self.fetch.show(event),
            PullEvent::Converting { bits, nodes, folder } => {
                #[cfg(feature = "hub")]
                self.fetch.finish();
                let folder = folder.display();
                say(&format!("note: converting to {bits} bits for {nodes} nodes into {folder}"));
            }
            PullEvent::Conversion(event) => self.conversion.show(event),
        }
    }
}

/// What went wrong with the store, with a hint.
pub(super) fn failure(error: StoreError) -> Failure {
    match error {
        StoreError::Convert(error) => convert::failure(error),
        error @ StoreError::NotStored { .. } => {
            Failure::from(error).hint("`shardpack list` shows their names")
        }
        error @ StoreError::Converted(_) => Failure::from(error).hint("leave --bits away"),
        error if error.is_wrong() => Failure::wrong(error),
        error => error.into(),
    }
}

/// Runs `list`.
pub(crate) fn list(args: &StoreArgs) -> Outcome {
    let store = store()?;
    let models = store.list().map_err(failure)?;
    if args.form.json {
        let model = |model: &Stored| {
            let (bits, nodes) = (model.set.quantization.bits, model.set.packages.len());
            json!({ "name": model.name, "bits": bits, "nodes": nodes, "bytes": model.size_bytes, "model": model.digest() })
        };
        let models: Vec<_> = models.iter().map(model).collect();
        result(&json!({ "folder": store.folder(), "models": models }).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    if models.is_empty() {
        say(&format!("note: no models in {}", store.folder().display()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["name", "bits", "nodes", "size"].map(str::to_owned).to_vec()];
    rows.extend(models.iter().map(|model| {
        let (bits, nodes) = (model.set.quantization.bits, model.set.packages.len());
        vec![model.name.clone(), bits.to_string(), nodes.to_string(), size(model.size_bytes)]
    }));
    result(table(&rows).trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Runs `du`.
pub(crate) fn disk_usage(args: &StoreArgs) -> Outcome {
    let store = store()?;
    let (folder, bytes) = (store.folder(), store.size_bytes().map_err(failure)?);
    if args.form.json {
        result(&json!({ "folder": folder, "bytes": bytes }).to_string());
    } else {
        result(&format!("{}  {}", size(bytes), folder.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `rm`.
pub(crate) fn remove(args: &RemoveArgs) -> Outcome {
    let store = store()?;
    for name in &args.names {
        if store.find(name).map_err(failure)?.is_none() {
            let (name, folder) = (name.clone(), store.folder().to_owned());
            return Err(failure(StoreError::NotStored { name, folder }));
        }
    }
    for name in &args.names {
        let bytes = store.remove(name).map_err(failure)?;
        say(&format!("removed {name}, {}", size(bytes)));
    }
    Ok(ExitCode::SUCCESS)
}
