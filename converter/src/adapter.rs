//! Fine-tunes that change a model without storing it again: adapters in PEFT's and MLX's form. They
//! are a layer over the source's logical float tensors: what a tensor becomes is computed in f32,
//! block of rows by block, before it is quantized. Anything in an adapter that is not understood is
//! refused by name.

mod change;
mod config;
mod experts;
mod file;
mod mlx;
mod pattern;
mod peft;
#[cfg(test)]
mod tests;
mod wrapper;

use std::{
    collections::BTreeMap,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use shardpack_containers::container::TensorInfo;
use shardpack_formats::normalise::rows_and_columns;
use shardpack_manifests::manifest::AdapterRecord;
use shardpack_quantize::{Dtype, Platform, affine};

pub(crate) use change::Merge;
use change::{Change, Kind};
use file::AdapterFile;

use crate::checkpoint::{TOKENIZER_FILES, read_text};

/// Largest `adapter_config.json`: rank patterns of every module of the largest models have some
/// 100,000 entries.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Why an adapter cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The adapter is not understood, or does not belong to this model.
    #[error("adapter {}: {problem}", .folder.display())]
    Refused {
        /// Its folder.
        folder: PathBuf,
        /// What is wrong, by name.
        problem: String,
    },
    /// A file of it cannot be read.
    #[error("{}: cannot be read", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl AdapterError {
    /// Whether the adapter was looked at and is wrong (else it could not be looked at).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

/// The tensors that adapters may change: logical float tensors by published name.
pub(crate) type Base<'a> = &'a dyn Fn(&str) -> Option<TensorInfo>;

/// Adapters that are merged into a source, in the order in which they were given.
#[derive(Default)]
pub(crate) struct Adapters {
    files: Vec<AdapterFile>,
    /// Changes by tensor, in the order in which they are applied.
    changes: BTreeMap<String, Vec<Change>>,
    /// What changed tensors look like from outside.
    infos: BTreeMap<String, TensorInfo>,
    /// Tokenizer files that came with an adapter, by name.
    pub(crate) texts: BTreeMap<String, Vec<u8>>,
    /// Things the user should know.
    pub(crate) warnings: Vec<String>,
}

impl Adapters {
    /// Opens adapters and finds a place for every tensor of theirs.
    pub(crate) fn open(folders: &[PathBuf], base: Base) -> Result<Self, AdapterError> {
        let mut adapters = Self::default();
        for folder in folders {
            adapters.add(folder, base)?;
        }
        adapters.infos = adapters.shapes(base)?;
        Ok(adapters)
    }

    fn add(&mut self, folder: &Path, base: Base) -> Result<(), AdapterError> {
        let refuse = |problem: String| AdapterError::Refused { folder: folder.to_owned(), problem };
        let path = folder.join("adapter_config.json");
        if !path.is_file() {
            let problem = "has no adapter_config.json; give the folder of a PEFT or MLX adapter";
            return Err(refuse(problem.to_owned()));
        }
        let read = |source| AdapterError::Read { path: path.clone(), source };
        if fs::metadata(&path).map_err(read)?.len() > MAX_CONFIG_BYTES {
            return Err(refuse(format!("adapter_config.json has over {MAX_CONFIG_BYTES} bytes")));
        }
        let text = fs::read(&path).map_err(read)?;
        let config = config::parse(&text).map_err(&refuse)?;
        let index = self.files.len();
        let file = AdapterFile::open(folder, &config)?;
        let found = match &config {
            config::Config::Peft(config) => peft::changes(config, &file, index, base),
            config::Config::Mlx(config) => mlx::changes(config, &file, index, base),
        };
        for (tensor, change) in found.map_err(refuse)? {
            self.changes.entry(tensor).or_default().push(change);
        }
        self.files.push(file);
        for name in TOKENIZER_FILES {
            let path = folder.join(name);
            if path.is_file() {
                let bytes = read_text(&path).map_err(|error| AdapterError::Refused {
                    folder: folder.to_owned(),
                    problem: error.to_string(),
                })?;
                self.texts.insert((*name).to_owned(), bytes);
            }
        }
        Ok(())
    }

    /// Follows every tensor through its changes; each must fit what the one before has left.
    fn shapes(&mut self, base: Base) -> Result<BTreeMap<String, TensorInfo>, AdapterError> {
        let mut infos = BTreeMap::new();
        for (name, changes) in &mut self.changes {
            // A replacement comes before what was trained on top of it, within one adapter.
            changes.sort_by_key(|change| (change.adapter, change.order()));
            let Some(mut info) = base(name) else { continue };
            info.dtype = Dtype::F32;
            for change in changes.iter() {
                let file = &self.files[change.adapter];
                change.kind.apply_shape(name, &mut info, file).map_err(|problem| {
                    AdapterError::Refused { folder: file.folder.clone(), problem }
                })?;
            }
            infos.insert(name.clone(), info);
        }
        Ok(infos)
    }

    /// Whether a head that shares the weights of the embedding has weights of its own after the
    /// adapters. A copy of the embedding that stands in an adapter as the head is no other head.
    pub(crate) fn part(
        &mut self,
        (embedding, rows): (&str, u64),
        head: &str,
    ) -> Result<bool, AdapterError> {
        if self.changes.contains_key(head) {
            let is_copy = self.is_copy(embedding, head)?;
            if is_copy {
                self.changes.remove(head);
                self.infos.remove(head);
            }
            return Ok(!is_copy);
        }
        let grows = self.infos.get(embedding).is_some_and(|info| info.shape.first() != Some(&rows));
        let parts = |change: &Change| {
            // Rows that the base does not have can only be those of both.
            let is_part = match &change.kind {
                Kind::Replace { .. } => !grows,
                Kind::ReplaceRows { .. } => false,
                Kind::Delta(_) | Kind::Stack(_) | Kind::Add { .. } => true,
            };
            is_part && !self.files[change.adapter].keeps_ties
        };
        Ok(self.changes.get(embedding).is_some_and(|changes| changes.iter().any(parts)))
    }

    /// Whether both are replaced, by the same values.
    fn is_copy(&self, embedding: &str, head: &str) -> Result<bool, AdapterError> {
        let replaced = |name: &str| match self.changes.get(name).map(Vec::as_slice) {
            Some([Change { adapter, kind: Kind::Replace { tensor } }]) => Some((*adapter, tensor)),
            _ => None,
        };
        match (replaced(embedding), replaced(head)) {
            (Some((one, left)), Some((other, right))) => {
                self.files[one].is_same(left, (&self.files[other], right))
            }
            _ => Ok(false),
        }
    }

    /// What a changed tensor looks like; `None` when no adapter touches it.
    pub(crate) fn info(&self, tensor: &str) -> Option<&TensorInfo> {
        self.infos.get(tensor)
    }

    /// Bytes that a thread holds beside its blocks while it merges.
    pub(crate) fn working_bytes(&self) -> u64 {
        let changes = self.changes.iter().flat_map(|(name, changes)| {
            let width = self.infos.get(name).map_or(1, |info| rows_and_columns(&info.shape)[1]);
            changes.iter().map(move |change| change.working_bytes(width))
        });
        changes.max().unwrap_or(0)
    }

    /// Begins to merge a tensor; `None` when no adapter touches it.
    pub(crate) fn merge(&self, tensor: &str) -> Result<Option<Merge<'_>>, AdapterError> {
        let (Some(changes), Some(info)) = (self.changes.get(tensor), self.infos.get(tensor)) else {
            return Ok(None);
        };
        Merge::new(info, changes, &self.files).map(Some)
    }

    /// What tells these adapters from others on this machine: names, sizes and times.
    pub(crate) fn key(&self) -> Vec<(u64, String)> {
        self.files.iter().map(|file| (file.size, file.modified.clone())).collect()
    }

    /// The adapters as manifests record them; reads their files once more, to hash them.
    pub(crate) fn records(&self) -> Result<Vec<AdapterRecord>, AdapterError> {
        self.files.iter().map(AdapterFile::record).collect()
    }
}

/// Rows of a tensor before any adapter, widened to f32: what [`Merge::rows`] asks for.
pub(crate) fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    affine::widen(Platform::detect_for_quantizing(), dtype, bytes, out);
}

/// A range of rows and a place for them.
pub(crate) type Rows<'a, E> = &'a mut dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), E>;
