//! Models by their name on the hub: the environment that everybody's tools read, and what is shown
//! while files arrive.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use shardpack_converter::{
    Source,
    hub::{Hub, HubEvent, HubObserver, HubOptions, ModelName},
};

use crate::{
    failure::Failure,
    progress::{Progress, say, size},
    source::{Keep, failure},
};

/// The name of a model on the hub, unless the text is a folder's.
pub(crate) fn name(source: &Path) -> Option<ModelName> {
    let text = source.to_str()?;
    let is_path = source.exists() || text.starts_with(['.', '/', '~']);
    if is_path { None } else { text.parse().ok() }
}

/// Opens a model of the hub. With [`Keep::Nothing`], `spool` is the folder for files that are
/// needed.
pub(crate) fn open(name: &ModelName, keep: Keep, spool: &Path) -> Result<Source, Failure> {
    let shown = Arc::new(Shown::new(keep));
    let told = Arc::clone(&shown);
    let observe: HubObserver = Arc::new(move |event: &HubEvent| told.show(event));
    let hub = Arc::new(Hub::new(options(), observe)?);
    let opened = hub.find(name).and_then(|snapshot| {
        if keep == Keep::All {
            hub.fetch(&snapshot)?;
        }
        Ok(snapshot)
    });
    let snapshot = opened
        .map_err(|error| if error.is_wrong() { Failure::wrong(error) } else { error.into() })?;
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

struct Shown {
    keep: Keep,
    bar: OnceLock<Progress>,
}

impl Shown {
    const fn new(keep: Keep) -> Self {
        Self { keep, bar: OnceLock::new() }
    }

    fn finish(&self) {
        if let Some(bar) = self.bar.get() {
            bar.finish();
        }
    }

    fn show(&self, event: &HubEvent) {
        let bar = self.bar.get();
        match event {
            HubEvent::Found { commit, files, bytes } => {
                say(&format!("note: commit {commit}, {files} files, {}", size(*bytes)));
                if self.keep == Keep::All {
                    self.bar.get_or_init(|| Progress::bytes("fetch", *bytes));
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
            HubEvent::Retrying(problem) => say(&format!("note: {problem}; trying again")),
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
        authorities: ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
            .into_iter()
            .find_map(path),
        ..HubOptions::new(path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")))
    }
}
