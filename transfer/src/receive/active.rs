//! The record of the current package of each model.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shardpack_manifests::{Manifest, canonical};

use super::{files, store::StoreError};
use crate::protocol::PackageKey;

/// Version of the record.
const FORMAT: u32 = 1;

/// The record of current packages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Active {
    /// Version of the record.
    format: u32,
    /// By the name under which a model is served.
    pub models: BTreeMap<String, ActiveModel>,
}

/// The current package of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActiveModel {
    /// The package that is served.
    #[serde(serialize_with = "write_key", deserialize_with = "read_key")]
    pub current: PackageKey,
    /// The one before, kept for rollback.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "write_some_key",
        deserialize_with = "read_some_key"
    )]
    pub previous: Option<PackageKey>,
}

impl Active {
    /// Reads the record; an absent one is empty.
    pub(super) fn read(path: &Path) -> Result<Self, StoreError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { format: FORMAT, models: BTreeMap::new() });
            }
            Err(error) => return Err(StoreError::io("read", path)(error)),
        };
        let unusable = |problem: String| StoreError::Record { path: path.to_owned(), problem };
        let active: Self =
            serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        if active.format != FORMAT {
            return Err(unusable(format!("format {}, this program reads {FORMAT}", active.format)));
        }
        Ok(active)
    }

    /// Replaces the record in one step.
    pub(super) fn write(&self, path: &Path) -> Result<(), StoreError> {
        let text = canonical::to_string(self).map_err(|error| StoreError::Record {
            path: path.to_owned(),
            problem: error.to_string(),
        })?;
        files::write_durably(path, format!("{text}\n").as_bytes())
            .map_err(StoreError::io("write", path))
    }

    /// Makes `key` the current package of `model`; returns the one before. The package before
    /// that is forgotten; making the current one current again changes nothing.
    pub(super) fn activate(&mut self, model: String, key: PackageKey) -> Option<PackageKey> {
        let before = self.models.get(&model).copied();
        let previous = match before {
            Some(model) if model.current == key => model.previous,
            other => other.map(|model| model.current),
        };
        self.models.insert(model, ActiveModel { current: key, previous });
        previous
    }
}

/// The name under which a package's model is served. Packages without a name or a repository
/// share one, so that a node with a single local model needs none.
pub(super) fn model_name(manifest: &Manifest) -> String {
    let name = manifest.name.as_ref().or(manifest.source.repo.as_ref());
    name.cloned().unwrap_or_else(|| "default".to_owned())
}

fn write_key<S: Serializer>(key: &PackageKey, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(key)
}

#[expect(clippy::ref_option, reason = "serde passes fields so")]
fn write_some_key<S: Serializer>(key: &Option<PackageKey>, to: S) -> Result<S::Ok, S::Error> {
    match key {
        Some(key) => to.collect_str(key),
        None => to.serialize_none(),
    }
}

fn read_key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PackageKey, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

fn read_some_key<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PackageKey>, D::Error> {
    read_key(from).map(Some)
}
