//! The record of the releases of each model: the current one, the ones before, and one that is
//! pending.
//!
//! ```text
//! {"format": 2, "models": {NAME: {"current": R, "history": [R, …], "pending": R}}}
//! R = {"release": number, "package": key, "record": what the controller signed}
//! ```
//! Format 1 had a current and a previous key per model, without numbers and records; it is read, and
//! written as format 2 with the next change. The whole file is replaced by one rename, so a pending
//! release becomes the current one in one step.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};
use shardpack_manifests::{Digest, Manifest, canonical};

use super::{files, store::StoreError};
use crate::{
    protocol::PackageKey,
    release::{Release, SignedRelease},
};

/// Version of the record.
const FORMAT: u32 = 2;

/// The version without releases, which is read.
const FORMAT_OF_KEYS: u32 = 1;

/// Releases before the current one that are remembered: more than any node has room for.
const MAX_HISTORY: usize = 8;

/// The releases of all models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Active {
    /// By the name under which a model is served.
    pub models: BTreeMap<String, ActiveModel>,
}

/// The releases of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActiveModel {
    /// The one that is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<StoredRelease>,
    /// The ones before, the latest first, no package twice and none of the current one's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<StoredRelease>,
    /// The one that becomes current when the controller says that every node has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<StoredRelease>,
}

/// A release as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredRelease {
    /// Its number.
    pub release: u64,
    /// This node's package of it.
    pub package: PackageKey,
    /// The record; none of a version without records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<SignedRelease>,
}

impl StoredRelease {
    fn is(&self, record: Digest) -> bool {
        self.record.as_ref().is_some_and(|signed| signed.digest() == record)
    }
}

/// Why a release does not become pending or current.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseRefusal {
    /// Its number is not above the current one's.
    #[error(
        "release {offered} of {model} is not newer than release {current}, which is current here; \
         --allow-rollback takes it all the same"
    )]
    NotNewer {
        /// The model.
        model: String,
        /// Number of the current release.
        current: u64,
        /// Number of the refused one.
        offered: u64,
    },
    /// It is neither pending nor current.
    #[error("the release of {model} that is to become current is not pending here; push again")]
    NotPending {
        /// The model.
        model: String,
    },
    /// It is current already, so that it cannot be dropped.
    #[error("release {release} of {model} is current here and cannot be dropped; push again")]
    IsCurrent {
        /// The model.
        model: String,
        /// Its number.
        release: u64,
    },
}

/// Whether a release older than the current one may become current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOrder {
    /// Only a newer one may.
    Newer,
    /// Any may: `--allow-rollback`.
    Any,
}

/// State of a release that a controller has prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseState {
    /// It waits for the other nodes.
    Pending,
    /// It is current.
    Current,
}

impl ActiveModel {
    /// The package that is served.
    #[must_use]
    pub fn package(&self) -> Option<PackageKey> {
        self.current.as_ref().map(|release| release.package)
    }

    /// The package of the release before, kept for rollback.
    #[must_use]
    pub fn previous(&self) -> Option<PackageKey> {
        self.history.first().map(|release| release.package)
    }

    /// All releases.
    pub fn releases(&self) -> impl Iterator<Item = &StoredRelease> {
        self.current.iter().chain(&self.history).chain(&self.pending)
    }

    /// The highest number of any release.
    fn highest(&self) -> u64 {
        self.releases().map(|release| release.release).max().unwrap_or(0)
    }

    /// Makes `next` the current release; the one before goes to the history.
    fn replace(&mut self, next: StoredRelease) {
        let before = self.current.take();
        self.history.retain(|release| release.package != next.package);
        if let Some(before) = before.filter(|release| release.package != next.package) {
            self.history.insert(0, before);
            self.history.truncate(MAX_HISTORY);
        }
        self.current = Some(next);
    }
}

/// The versions of the file.
#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

#[derive(Deserialize)]
struct KeysDocument {
    models: BTreeMap<String, Keys>,
}

#[derive(Deserialize)]
struct Keys {
    current: PackageKey,
    #[serde(default)]
    previous: Option<PackageKey>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    models: BTreeMap<String, ActiveModel>,
}

impl Active {
    /// Reads the record; an absent one is empty.
    pub(super) fn read(path: &Path) -> Result<Self, StoreError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(StoreError::io("read", path)(error)),
        };
        Self::parse(&bytes).map_err(|problem| StoreError::Record { path: path.to_owned(), problem })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let wrong = |error: serde_json::Error| error.to_string();
        let FormatOnly { format } = serde_json::from_slice(bytes).map_err(wrong)?;
        match format {
            FORMAT => {
                let document: Document = serde_json::from_slice(bytes).map_err(wrong)?;
                Ok(Self { models: document.models })
            }
            FORMAT_OF_KEYS => {
                let document: KeysDocument = serde_json::from_slice(bytes).map_err(wrong)?;
                let models = document.models.into_iter().map(|(name, keys)| {
                    let numbered =
                        |release, package| StoredRelease { release, package, record: None };
                    let model = ActiveModel {
                        current: Some(numbered(1, keys.current)),
                        history: keys.previous.map(|key| numbered(0, key)).into_iter().collect(),
                        pending: None,
                    };
                    (name, model)
                });
                Ok(Self { models: models.collect() })
            }
            other => Err(format!("format {other}, this program reads 1 and {FORMAT}")),
        }
    }

    /// Replaces the record in one step.
    pub(super) fn write(&self, path: &Path) -> Result<(), StoreError> {
        let document = Document { format: FORMAT, models: self.models.clone() };
        let text = canonical::to_string(&document).map_err(|error| StoreError::Record {
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
        files::write_durably(path, format!("{text}\n").as_bytes())
            .map_err(StoreError::io("write", path))
    }

    /// Makes `key` the current package of `model` without a record, as controllers of earlier
    /// versions ask; returns the one before. Making the current one current again changes nothing.
    pub(super) fn activate(&mut self, model: String, key: PackageKey) -> Option<PackageKey> {
        let model = self.models.entry(model).or_default();
        if model.package() != Some(key) {
            let release = model.highest() + 1;
            model.replace(StoredRelease { release, package: key, record: None });
        }
        model.previous()
    }

    /// First phase: keeps a release as pending.
    pub(super) fn prepare(
        &mut self,
        signed: SignedRelease,
        package: PackageKey,
        order: ReleaseOrder,
    ) -> Result<ReleaseState, ReleaseRefusal> {
        let Release { model: name, release, .. } = signed.release();
        let (name, release) = (name.clone(), *release);
        let model = self.models.entry(name.clone()).or_default();
        if let Some(current) = &model.current {
            if current.is(signed.digest()) {
                return Ok(ReleaseState::Current);
            }
            if release <= current.release && order == ReleaseOrder::Newer {
                let current = current.release;
                return Err(ReleaseRefusal::NotNewer { model: name, current, offered: release });
            }
        }
        model.pending = Some(StoredRelease { release, package, record: Some(signed) });
        Ok(ReleaseState::Pending)
    }

    /// Second phase: makes the pending release current; returns the package before. Once more
    /// changes nothing.
    pub(super) fn commit(
        &mut self,
        name: &str,
        record: Digest,
    ) -> Result<Option<PackageKey>, ReleaseRefusal> {
        let not_pending = || ReleaseRefusal::NotPending { model: name.to_owned() };
        let model = self.models.get_mut(name).ok_or_else(not_pending)?;
        if !model.current.as_ref().is_some_and(|current| current.is(record)) {
            let pending = model.pending.take_if(|pending| pending.is(record));
            model.replace(pending.ok_or_else(not_pending)?);
        }
        Ok(model.previous())
    }

    /// Drops a pending release; whether there was one.
    pub(super) fn abort(&mut self, name: &str, record: Digest) -> Result<bool, ReleaseRefusal> {
        let Some(model) = self.models.get_mut(name) else { return Ok(false) };
        if let Some(current) = model.current.as_ref().filter(|current| current.is(record)) {
            let (model, release) = (name.to_owned(), current.release);
            return Err(ReleaseRefusal::IsCurrent { model, release });
        }
        let dropped = model.pending.take_if(|pending| pending.is(record)).is_some();
        self.models.retain(|_, model| model.releases().next().is_some());
        Ok(dropped)
    }

    /// Forgets all but the `keep` latest releases before the current one of each model; whether
    /// there were more.
    pub(super) fn trim(&mut self, keep: usize) -> bool {
        let mut trimmed = false;
        for model in self.models.values_mut() {
            trimmed |= model.history.len() > keep;
            model.history.truncate(keep);
        }
        trimmed
    }
}

/// The name under which a package's model is served. Packages without a name or a repository
/// share one, so that a node with a single local model needs none.
pub(crate) fn model_name(manifest: &Manifest) -> String {
    let name = manifest.name.as_ref().or(manifest.source.repo.as_ref());
    name.cloned().unwrap_or_else(|| "default".to_owned())
}
