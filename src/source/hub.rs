//! Models by their name on the hub: the usual environment variables, and progress of downloads.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use shardpack_converter::{
    Source, Subfolder,
    hub::{
        Hub, HubError, HubEvent, HubObserver, HubOptions, ModelAddress, ModelName, Selection,
        Visibility,
    },
    store::PullSource,
};

use super::{Input, Keep, failure};
use crate::{
    failure::Failure,
    progress::{Progress, say, size},
};

/// The ending of GGUF files.
const GGUF: &str = ".gguf";

/// A model on the hub.
pub(crate) struct HubModel {
    name: ModelName,
    /// The GGUF file, if one was named.
    gguf: Option<String>,
    /// The folder, if an address names one.
    subfolder: Option<Subfolder>,
    /// The tag of a quantization, if one was named.
    tag: Option<String>,
}

/// Parses the name of a model on the hub, or the address of one of its pages; `None` if the text is a
/// local path.
pub(crate) fn parse(source: &Path) -> Result<Option<HubModel>, Failure> {
    let Some(text) = source.to_str() else { return Ok(None) };
    if source.exists() || text.starts_with(['.', '/', '~']) {
        return Ok(None);
    }
    let address = ModelAddress::parse(text, &options().endpoint);
    let address = address.map_err(|problem| anyhow::anyhow!(problem))?;
    if let Some(ModelAddress { name, subfolder, gguf, tag }) = address {
        return Ok(Some(HubModel { name, gguf, subfolder, tag }));
    }
    let model = |name, gguf| HubModel { name, gguf, subfolder: None, tag: None };
    // Before anything else: what follows a revision could be part of a branch's name.
    let file = text.match_indices('/').nth(1).filter(|_| text.ends_with(GGUF));
    let Some((file, _)) = file else {
        return Ok(text.parse().ok().map(|name| model(name, None)));
    };
    let (name, file) = (text[..file].parse().ok(), &text[file + 1..]);
    // The rules of a path below a repository are those of a folder below one.
    let is_path = file.parse::<Subfolder>().is_ok();
    Ok(name.filter(|_| is_path).map(|name| model(name, Some(file.to_owned()))))
}

/// Opens a model of the hub. With [`Keep::Nothing`], `spool` is the folder for files that are
/// needed.
pub(crate) fn open(
    HubModel { name, mut gguf, subfolder, tag }: HubModel,
    input: &Input,
    spool: &Path,
) -> Result<Source, Failure> {
    if let (Some(file), true) = (&gguf, input.subfolder.is_some()) {
        return Err(anyhow::anyhow!(
            "--subfolder: not allowed with {file:?}, whose path is already complete"
        )
        .into());
    }
    let mut keep = input.keep;
    let shown = Arc::new(Shown::new(keep));
    let told = Arc::clone(&shown);
    let observe: HubObserver = Arc::new(move |event: &HubEvent| told.show(event));
    let hub = Arc::new(Hub::new(options(), observe)?);
    let wrong =
        |error: HubError| if error.is_wrong() { Failure::wrong(error) } else { error.into() };
    if let Some(tag) = tag {
        gguf = Some(hub.tagged_gguf(&name, &tag).map_err(wrong)?);
    }
    let subfolder = input.subfolder.cloned().or(subfolder);
    let selection = Selection { subfolder, gguf, pickles: input.pickles };
    let snapshot = hub.find(&name, &selection).map_err(wrong)?;
    // What is in the cache is not read from the hub.
    if snapshot.is_cached() || !snapshot.is_readable_from_afar() {
        if keep == Keep::Nothing && !snapshot.is_cached() {
            return Err(anyhow::anyhow!(
                "--no-keep-source supports .safetensors only; without it the files of {name} are kept in the cache"
            )
            .into());
        }
        // A plan needs what the conversion will.
        keep = Keep::All;
        shown.keep();
    }
    if keep == Keep::All {
        hub.fetch(&snapshot).map_err(wrong)?;
    }
    let source = match keep {
        Keep::All => Source::open_snapshot(&hub, &snapshot),
        Keep::Headers => Source::open_remote(&hub, &snapshot, None),
        Keep::Nothing => Source::open_remote(&hub, &snapshot, Some(spool)),
    };
    if keep == Keep::All {
        shown.finish();
    }
    source.map_err(failure)
}

/// What is pulled into the store for a model of the hub.
pub(crate) fn pull_source(model: HubModel) -> Result<PullSource, Failure> {
    let HubModel { name, mut gguf, subfolder, tag } = model;
    if let Some(folder) = subfolder {
        return Err(
            anyhow::anyhow!("{name}: only a whole repository is pulled, not {folder}/").into()
        );
    }
    if let Some(tag) = tag {
        let hub = Hub::new(options(), Arc::new(|_: &HubEvent| ()))?;
        gguf = Some(hub.tagged_gguf(&name, &tag)?);
    }
    Ok(PullSource::Hub { name, gguf, options: Box::new(options()) })
}

/// Brings a package set of the hub into the cache, or one rank's package with the set's documents;
/// `None` if what is named is none.
pub(crate) fn fetch_set(repository: &str, rank: Option<u32>) -> Result<Option<PathBuf>, Failure> {
    let name = repository_name(repository)?;
    let shown = Arc::new(Shown::default());
    let told = Arc::clone(&shown);
    let hub = Hub::new(options(), Arc::new(move |event: &HubEvent| told.show(event)))?;
    let folder = hub
        .fetch_set(&name, rank)
        .map_err(|error| if error.is_wrong() { Failure::wrong(error) } else { error.into() })?;
    shown.finish();
    Ok(folder)
}

/// The repository that a name or an address means.
fn repository_name(text: &str) -> Result<ModelName, Failure> {
    let address = ModelAddress::parse(text, &options().endpoint);
    match address.map_err(|problem| anyhow::anyhow!(problem))? {
        Some(ModelAddress { name, subfolder: None, gguf: None, tag: None }) => Ok(name),
        _ => Ok(text.parse().map_err(|problem: String| anyhow::anyhow!(problem))?),
    }
}

/// The commit of a repository's revision.
pub(crate) fn newest_commit(repository: &str, revision: &str) -> Result<String, Failure> {
    let name = format!("{repository}@{revision}");
    let name: ModelName = name.parse().map_err(|problem: String| anyhow::anyhow!(problem))?;
    let hub = Hub::new(options(), Arc::new(|_: &HubEvent| ()))?;
    Ok(hub.commit(&name)?)
}

/// Uploads a package set; returns the commit.
pub(crate) fn upload(
    repository: &str,
    set: &Path,
    visibility: Visibility,
) -> Result<String, Failure> {
    let name = repository_name(repository)?;
    let told = Shown::new(Keep::Headers);
    let hub = Hub::new(options(), Arc::new(move |event: &HubEvent| told.show(event)))?;
    Ok(hub.upload(&name, set, visibility)?)
}

/// Downloads as a progress bar, and what is said of them.
pub(crate) struct Shown {
    keep: Keep,
    /// Bytes that will be fetched.
    bytes: OnceLock<u64>,
    bar: OnceLock<Progress>,
}

impl Default for Shown {
    /// All files are downloaded.
    fn default() -> Self {
        Self::new(Keep::All)
    }
}

impl Shown {
    const fn new(keep: Keep) -> Self {
        Self { keep, bytes: OnceLock::new(), bar: OnceLock::new() }
    }

    /// Files are downloaded after all.
    fn keep(&self) {
        let bytes = self.bytes.get().copied().unwrap_or(0);
        self.bar.get_or_init(|| Progress::bytes("fetch", bytes));
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = self.bar.get() {
            bar.finish();
        }
    }

    pub(crate) fn show(&self, event: &HubEvent) {
        let bar = self.bar.get();
        match event {
            HubEvent::Found { commit, files, bytes } => {
                say(&format!("note: commit {commit}, {files} files, {}", size(*bytes)));
                self.bytes.get_or_init(|| *bytes);
                if self.keep == Keep::All {
                    self.keep();
                }
            }
            HubEvent::FileStarted(name) => {
                if let Some(bar) = bar {
                    bar.message(name);
                }
            }
            HubEvent::Arrived(bytes) => {
                if let Some(bar) = bar {
                    bar.add(*bytes);
                }
            }
            HubEvent::Lost(bytes) => {
                if let Some(bar) = bar {
                    bar.take_back(*bytes);
                }
            }
            HubEvent::Retrying(problem) => say(&format!("note: {problem}")),
            HubEvent::Away { problem, commit } => say(&format!(
                "note: the hub cannot be reached ({problem}); commit {commit} is used from the cache"
            )),
        }
    }
}

/// The options that the usual environment variables ask for.
fn options() -> HubOptions {
    let text = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
    let flag = |name: &str| {
        text(name).is_some_and(|value| {
            matches!(value.to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true")
        })
    };
    let path = |name: &str| text(name).map(PathBuf::from);
    let user_cache = || {
        path("XDG_CACHE_HOME")
            .or_else(|| Some(env::home_dir()?.join(".cache")))
            .unwrap_or_else(|| PathBuf::from(".cache"))
    };
    let home = path("HF_HOME").unwrap_or_else(|| user_cache().join("huggingface"));
    let stored = || {
        let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        fs::read_to_string(file).ok()
    };
    let token = text("HF_TOKEN")
        .or_else(|| if flag("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { stored() })
        .map(|token| token.trim().to_owned())
        .filter(|token| !token.is_empty());
    let proxy = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"].into_iter().find_map(text);
    HubOptions {
        endpoint: text("HF_ENDPOINT").unwrap_or_else(|| HubOptions::ENDPOINT.to_owned()),
        token,
        offline: flag("HF_HUB_OFFLINE"),
        proxy,
        no_proxy: ["NO_PROXY", "no_proxy"].into_iter().find_map(text).unwrap_or_default(),
        authorities: ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
            .into_iter()
            .find_map(path),
        ..HubOptions::new(path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")))
    }
}
