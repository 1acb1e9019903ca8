//! `manifest.json`: what a package says of itself. Canonical JSON, see [`crate::canonical`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use shardpack_formats::{Spec, chat::Chat};
use shardpack_quantize::{Dtype, FloatFormat};

use crate::{
    digest::{Digest, chunk_count, merge_chunks},
    format1::{self, FORMAT_1},
    ids::Ids,
    layout::{Layout, STAGES_FEATURE, TensorShard},
};

/// Version of the package format.
///
/// 1: first version. `requires` named collections of features.
///
/// 2: `requires` names one feature per operator, and the architecture and the layout use the names
/// that model configs and papers use. Weight files are those of format 1. A package of format 1 is
/// not loaded, pushed or verified: its ids cover the old names. `reshard` rewrites it.
pub const FORMAT: u32 = 2;

/// Name of the manifest within a package.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Whether this version knows a feature; a manifest that requires another one is refused.
#[must_use]
pub fn is_known_feature(feature: &str) -> bool {
    feature == STAGES_FEATURE
        || FloatFormat::ALL.iter().any(|format| format.name() == feature)
        || Spec::known_features().any(|known| known == feature)
}

/// Largest manifest that is read: a trillion-parameter package has about 300,000 chunks and as
/// many tensors as its layers and experts ask for, together below 100 MB.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// The document of one package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version of the document that it was read from or is written to, usually [`FORMAT`].
    pub format: u32,
    /// Features a reader must know.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Name to serve the model under, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the package holds.
    pub ids: Ids,
    /// Where the weights came from.
    pub source: Source,
    /// What the engine computes.
    pub architecture: Spec,
    /// How the weights were quantized.
    pub quantization: Quantization,
    /// What the chat template can do; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<Chat>,
    /// How the model is sharded.
    pub layout: Layout,
    /// Which rank this package is for.
    pub rank: u32,
    /// Every file but the manifest, sorted by name.
    pub files: Vec<FileEntry>,
    /// Every stored tensor in file order.
    pub tensors: Vec<TensorEntry>,
}

/// Where weights came from. No paths: the same weights give the same manifest anywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Repository on the hub (`org/model`), if it came from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Commit of the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The folder of the repository that the model stands in; absent at its root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subfolder: Option<String>,
    /// Every file that was read, sorted by name.
    pub files: Vec<SourceFile>,
    /// Adapters that were merged into the weights, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterRecord>,
    /// Keys of `config.json` that were left out because the user said so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignored_config_keys: Vec<String>,
}

/// An adapter that was merged into a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterRecord {
    /// Whose form it has: `"peft"` or `"mlx"`.
    pub form: String,
    /// Its files, sorted by name.
    pub files: Vec<SourceFile>,
}

/// One file of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Name within the source.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3.
    pub blake3: Digest,
    /// SHA-256, if the hub states it; the file was checked against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Digest>,
}

/// How a model was quantized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantization {
    /// Main bits per weight: 4, 6, 8, or 16 for not quantized.
    pub bits: u32,
    /// Main group size; absent at 16 bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// The main format, where it is one of float groups: `bits` and `group_size` are its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub float: Option<FloatFormat>,
    /// How scale, bias and integers of affine groups were chosen (`"mlx-cpu"`); absent without such
    /// groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounding: Option<String>,
    /// Element type of scales, biases and unquantized weights.
    pub dtype: Dtype,
    /// BLAKE3 of the importance file that weighted the errors, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub importance: Option<Digest>,
    /// Matrices that differ from the main choice, by module name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub overrides: BTreeMap<String, MatrixFormat>,
}

impl Quantization {
    /// Format of the matrix of module `name` (a tensor's name without `.weight`).
    #[must_use]
    pub fn format_of(&self, name: &str) -> MatrixFormat {
        self.overrides.get(name).copied().unwrap_or(match (self.float, self.group_size) {
            (Some(format), _) => MatrixFormat::Float(format),
            (None, Some(group)) => MatrixFormat::Affine { bits: self.bits, group_size: group },
            (None, None) => MatrixFormat::Plain,
        })
    }

    /// The formats of float groups that matrices have.
    #[must_use]
    pub fn float_formats(&self) -> BTreeSet<FloatFormat> {
        let of_overrides = self.overrides.values().filter_map(|format| match format {
            MatrixFormat::Float(format) => Some(*format),
            MatrixFormat::Plain | MatrixFormat::Affine { .. } => None,
        });
        self.float.into_iter().chain(of_overrides).collect()
    }
}

/// How one matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatrixFormat {
    /// As floats.
    Plain,
    /// Affine groups: `weight` (u32, packed), `scales`, `biases`.
    Affine {
        /// Bits per weight.
        bits: u32,
        /// Weights per group.
        group_size: u32,
    },
    /// Float groups: `weight` (u32, packed), `scales` (u8).
    Float(FloatFormat),
}

impl MatrixFormat {
    /// Bits of one packed value and weights of a group; none of what is in no groups.
    #[must_use]
    pub const fn groups(self) -> Option<(u32, u32)> {
        match self {
            Self::Plain => None,
            Self::Affine { bits, group_size } => Some((bits, group_size)),
            Self::Float(format) => Some((format.bits(), format.group_size())),
        }
    }
}

impl fmt::Display for MatrixFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => formatter.write_str("not quantized"),
            Self::Affine { bits, group_size } => {
                write!(formatter, "{bits} bits in groups of {group_size}")
            }
            Self::Float(format) => format.fmt(formatter),
        }
    }
}

/// One file of a package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name within the package; a plain file name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Ordinary BLAKE3.
    pub blake3: Digest,
    /// One value per chunk, see [`crate::digest`].
    pub chunks: Vec<Digest>,
}

/// One stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Normalised name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of what is stored here.
    pub shape: Vec<u64>,
    /// The file that holds it.
    pub file: String,
    /// First byte within the file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Which part of the whole tensor this is.
    pub shard: TensorShard,
    /// BLAKE3 of these bytes: the key under which a node finds what it already holds.
    pub blake3: Digest,
}

/// A manifest that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Not JSON of this shape.
    #[error("not a manifest")]
    Json(#[from] serde_json::Error),
    /// Made by an earlier version.
    #[error(
        "package format {found}, this program reads {FORMAT}; rewrite the package set with \
         `shardpack reshard SET -o NEW --nodes N` (its weights stay as they are), or convert the \
         model again"
    )]
    Earlier {
        /// Its version.
        found: u32,
    },
    /// Made by a later version.
    #[error("package format {found}, this program reads {FORMAT}; a newer shardpack is needed")]
    Format {
        /// Its version.
        found: u32,
    },
    /// Needs something this version does not know.
    #[error(
        "the package requires {feature:?}, which this program does not know; a newer shardpack is needed"
    )]
    Feature {
        /// The feature.
        feature: String,
    },
    /// Says something impossible.
    #[error("{what}: {problem}")]
    Invalid {
        /// The file, tensor or field.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Version and features alone: read before the rest, so that a manifest of a later version is
/// refused as such and not as malformed.
#[derive(Deserialize)]
struct Preamble {
    format: u32,
    #[serde(default)]
    requires: Vec<String>,
}

impl Manifest {
    /// Parses and checks the bytes of a manifest. Every value returned is consistent in itself:
    /// plain file names, chunk lists that merge to the files' digests, tensors inside their
    /// files, ranges inside their axes.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let preamble: Preamble = serde_json::from_slice(bytes)?;
        check_version(preamble.format, &preamble.requires)?;
        let manifest: Self = serde_json::from_slice(bytes)?;
        manifest.check()
    }

    /// [`Manifest::parse`], for what rewrites packages: a manifest of format 1 is read too. Its
    /// `format` stays 1, since its ids do not cover what it says now, and the names in `requires`
    /// are those of this format.
    pub fn parse_any_format(bytes: &[u8]) -> Result<Self, ManifestError> {
        let preamble: Preamble = serde_json::from_slice(bytes)?;
        if preamble.format != FORMAT_1 {
            return Self::parse(bytes);
        }
        check_features(&preamble.requires, format1::is_feature)?;
        let mut document = serde_json::from_slice(bytes)?;
        format1::rename(&mut document);
        // Parsed from text again: deserializing from a `Value` would compile every type of a manifest twice.
        let mut manifest: Self = serde_json::from_slice(&serde_json::to_vec(&document)?)?;
        manifest.requires =
            requires(&manifest.architecture, &manifest.layout, &manifest.quantization);
        manifest.check()
    }

    fn check(self) -> Result<Self, ManifestError> {
        self.check_layout()?;
        self.check_files()?;
        self.check_tensors()?;
        Ok(self)
    }

    /// The entry of a file.
    #[must_use]
    pub fn file(&self, name: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.name == name)
    }

    fn check_layout(&self) -> Result<(), ManifestError> {
        let layout = &self.layout;
        if layout.ranks == 0 || self.rank >= layout.ranks {
            return invalid("rank", format!("rank {} of {} ranks", self.rank, layout.ranks));
        }
        let layers = u32::try_from(self.architecture.layers.len()).unwrap_or(u32::MAX);
        if let Err(problem) = layout.stages.check(layers, layout.ranks) {
            return invalid("stages", problem);
        }
        for (name, axis) in &layout.axes {
            let bad = axis.ranges.iter().any(|[start, end]| start > end || *end > axis.size);
            if bad || axis.ranges.len() != layout.ranks as usize {
                return invalid(&format!("axis {name}"), "its ranges do not fit".to_owned());
            }
        }
        Ok(())
    }

    fn check_files(&self) -> Result<(), ManifestError> {
        let mut seen = BTreeSet::new();
        for file in &self.files {
            if let Err(problem) = check_file_name(&file.name) {
                return invalid(&format!("file {:?}", file.name), problem.to_owned());
            }
            // Case-insensitive file systems would let one file overwrite the other.
            if !seen.insert(file.name.to_lowercase()) || file.name == MANIFEST_FILE {
                return invalid(&format!("file {:?}", file.name), "listed twice".to_owned());
            }
            if file.chunks.len() as u64 != chunk_count(file.size) {
                let problem = format!(
                    "{} bytes have {} chunks, {} listed",
                    file.size,
                    chunk_count(file.size),
                    file.chunks.len()
                );
                return invalid(&format!("file {:?}", file.name), problem);
            }
            if merge_chunks(&file.chunks, file.size) != file.blake3 {
                return invalid(
                    &format!("file {:?}", file.name),
                    "its chunk values do not merge to its digest".to_owned(),
                );
            }
        }
        Ok(())
    }

    fn check_tensors(&self) -> Result<(), ManifestError> {
        let mut seen = BTreeSet::new();
        for tensor in &self.tensors {
            let what = || format!("tensor {:?}", tensor.name);
            let elements =
                tensor.shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
            let size = elements
                .and_then(|elements| elements.checked_mul(tensor.dtype.size_bytes() as u64));
            if size != Some(tensor.size) {
                return invalid(
                    &what(),
                    format!("{:?} of {} is not {} bytes", tensor.shape, tensor.dtype, tensor.size),
                );
            }
            let end = tensor.offset.checked_add(tensor.size);
            let fits =
                self.file(&tensor.file).is_some_and(|file| end.is_some_and(|end| end <= file.size));
            if !fits {
                return invalid(&what(), format!("does not lie inside file {:?}", tensor.file));
            }
            if !seen.insert(&tensor.name) {
                return invalid(&what(), "listed twice".to_owned());
            }
            if let TensorShard::Range { dim, start, end, full, .. } = &tensor.shard {
                let held = tensor.shape.get(*dim as usize).copied();
                if start > end || end > full || held != Some(end - start) {
                    return invalid(
                        &what(),
                        format!("{:?} is not the shard {start}..{end} of {full}", tensor.shape),
                    );
                }
            }
        }
        Ok(())
    }
}

/// Refuses a format version or a feature that this program does not know.
pub fn check_version(format: u32, requires: &[String]) -> Result<(), ManifestError> {
    match format {
        FORMAT => check_features(requires, is_known_feature),
        FORMAT_1 => Err(ManifestError::Earlier { found: format }),
        found => Err(ManifestError::Format { found }),
    }
}

pub(crate) fn check_features(
    requires: &[String],
    is_known: fn(&str) -> bool,
) -> Result<(), ManifestError> {
    match requires.iter().find(|feature| !is_known(feature)) {
        Some(feature) => Err(ManifestError::Feature { feature: feature.clone() }),
        None => Ok(()),
    }
}

/// What a reader must know of a package with this architecture, layout and quantization.
#[must_use]
pub fn requires(spec: &Spec, layout: &Layout, quantization: &Quantization) -> Vec<String> {
    let of_layout = (!layout.stages.is_empty()).then_some(STAGES_FEATURE);
    let floats = quantization.float_formats();
    let of_groups = floats.iter().map(|format| format.name());
    of_layout.into_iter().chain(of_groups).chain(spec.features()).map(str::to_owned).collect()
}

/// Says why `name` may not be the name of a file in a package, if so: it must be one plain
/// component that means the same on every file system.
pub fn check_file_name(name: &str) -> Result<(), &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > 255 {
        Err("a file name has 1 to 255 characters")
    } else if name.starts_with('.') || name.ends_with('.') {
        Err("a file name neither starts nor ends with a dot")
    } else if !name.chars().all(plain) {
        Err("a file name consists of letters, digits, '.', '-' and '_'")
    } else {
        Ok(())
    }
}

fn invalid<T>(what: &str, problem: String) -> Result<T, ManifestError> {
    Err(ManifestError::Invalid { what: what.to_owned(), problem })
}
