//! How the hub is reached, and what models are called there. The environment is read by whoever
//! makes these options.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use hf_hub::{Repo, RepoType};
use shardpack_http::{HttpOptions, Retries};

use crate::cancel::Cancel;

/// How to reach the hub and where to keep what it gives.
#[derive(Clone)]
pub struct HubOptions {
    /// Address of the hub (`HF_ENDPOINT`): https, or http on this machine.
    pub endpoint: String,
    /// Proof of who asks (`HF_TOKEN`); never sent anywhere but to the endpoint.
    pub token: Option<String>,
    /// The folder of the cache (`HF_HUB_CACHE`).
    pub cache: PathBuf,
    /// Use the cache alone (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// A proxy for connections to other machines.
    pub proxy: Option<String>,
    /// Hosts that are reached without the proxy, separated by commas (`NO_PROXY`).
    pub no_proxy: String,
    /// PEM certificates of the authorities to trust instead of Mozilla's (`SSL_CERT_FILE`,
    /// `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`).
    pub authorities: Option<PathBuf>,
    /// Longest wait for the first byte of an answer, and between two parts of a body.
    pub silence: Duration,
    /// How to wait before a request is made again.
    pub wait: fn(Duration, &dyn Fn() -> bool),
    /// Ends what is under way; a later download goes on from there.
    pub cancel: Cancel,
}

impl HubOptions {
    /// The hub that everybody means.
    pub const ENDPOINT: &str = "https://huggingface.co";

    /// The public hub with a cache in `cache`.
    #[must_use]
    pub fn new(cache: PathBuf) -> Self {
        Self {
            endpoint: Self::ENDPOINT.to_owned(),
            token: None,
            cache,
            offline: false,
            proxy: None,
            no_proxy: String::new(),
            authorities: None,
            silence: HttpOptions::SILENCE,
            wait: Retries::STANDARD.wait,
            cancel: Cancel::default(),
        }
    }
}

impl fmt::Debug for HubOptions {
    /// Without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// Who may see a repository that is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// Everybody.
    Public,
    /// Its owner.
    Private,
}

/// `organisation/model`, at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    owner: String,
    model: String,
    /// Branch, tag or commit.
    pub revision: String,
}

impl ModelName {
    /// The branch that is meant where none is named.
    pub const MAIN: &str = "main";

    /// `organisation/model`.
    #[must_use]
    pub fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.model)
    }

    /// `model`.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The model's folder within a cache.
    #[must_use]
    pub fn folder(&self) -> String {
        self.hub_repo().folder_name()
    }

    /// hf-hub's name for it.
    pub(super) fn hub_repo(&self) -> Repo {
        Repo::with_revision(self.repo(), RepoType::Model, self.revision.clone())
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.model)
    }
}

impl FromStr for ModelName {
    type Err = String;

    /// `organisation/model` or `organisation/model@revision`, or the address of its page.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, revision) = text.split_once('@').unwrap_or((text, Self::MAIN));
        let plain = |part: &str| {
            (1..=96).contains(&part.len())
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("..")
                && !part.contains("--")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        // Branches have slashes; nothing may leave the folder of references.
        let revises = (1..=200).contains(&revision.len())
            && revision.split('/').all(|part| {
                !part.is_empty()
                    && !part.starts_with('.')
                    && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-+".contains(&b))
            });
        match name.split_once('/') {
            Some((owner, model)) if plain(owner) && plain(model) && revises => Ok(Self {
                owner: owner.to_owned(),
                model: model.to_owned(),
                revision: revision.to_owned(),
            }),
            _ => Err(format!(
                "{text:?} is not a model name such as organisation/model or organisation/model@revision"
            )),
        }
    }
}
