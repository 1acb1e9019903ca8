//! Carrying a plan out: tensor by tensor from the source into the packages' files.

mod quantized;
mod text;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use rayon::prelude::*;
use serde::Serialize;
use shardpack_manifests::{
    Cut, Digest, Manifest, PackageSet, canonical,
    ids::{self, Ids, TensorIdentity},
    manifest::{
        FORMAT, FileEntry, MANIFEST_FILE, MatrixFormat, Source as SourceRecord, TensorEntry,
    },
    set::{PackageEntry, SET_FILE},
};

use crate::{
    cut,
    package::{FilePlan, FileWriter, WriteError, at, share, sync_directory, write_small},
    plan::{Destination, Plan, PlanError, Step},
    report::{Report, Run, TensorReport},
    source::{Source, SourceError},
    staging::{Staging, StagingError},
};

/// Why a conversion ended without a result. Nothing is left under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// No plan can be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The output cannot be begun.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The output cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A weight that is no number, or does not fit the stored type.
    #[error("tensor {tensor:?} in {file:?}: {problem}; the checkpoint is damaged")]
    Weight {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        file: String,
        /// Which element is what.
        problem: String,
    },
    /// A document has no canonical form: a bug of ours.
    #[error("a document cannot be written")]
    Canonical(#[from] canonical::CanonicalError),
}

impl ConvertError {
    /// Whether the source was looked at and is wrong (else the conversion could not run).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        match self {
            Self::Source(error) => error.is_wrong(),
            Self::Plan(error) => !matches!(error, PlanError::Option { .. }),
            Self::Weight { .. } => true,
            Self::Staging(_) | Self::Write(_) | Self::Canonical(_) => false,
        }
    }
}

/// What is happening, for progress displays. Paths and clocks stay out of packages; they may be
/// shown here.
#[derive(Clone, Copy, Debug)]
pub enum ConvertEvent<'a> {
    /// The plan stands; nothing is written yet.
    Planned(&'a PlanSummary),
    /// Bytes of the source were hashed.
    Hashed(u64),
    /// A tensor begins.
    TensorStarted {
        /// Its name.
        name: &'a str,
        /// Its place in the order of writing.
        index: usize,
    },
    /// A tensor is in the packages' files.
    TensorFinished {
        /// Bytes of it in the source.
        source_bytes: u64,
    },
    /// Everything but the final name is written.
    Publishing,
}

/// Figures of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlanSummary {
    /// Tensors to convert.
    pub tensors: usize,
    /// Bytes of weight files, which are hashed.
    pub file_bytes: u64,
    /// Bytes of tensors to read.
    pub source_bytes: u64,
    /// Weight bytes of each rank's package.
    pub bytes_per_rank: Vec<u64>,
    /// Things the user should know.
    pub warnings: Vec<String>,
}

/// A finished conversion.
#[derive(Debug)]
pub struct Converted {
    /// The folder with the packages.
    pub output: PathBuf,
    /// What `set.json` says.
    pub set: PackageSet,
    /// What `report.json` says.
    pub report: Report,
    /// What `run.json` says.
    pub run: Run,
}

/// Told of every event, from any thread.
pub type Observer<'a> = &'a (dyn Fn(&ConvertEvent) + Sync);

/// Converts an open source. The output appears under its name complete or not at all.
pub fn convert(source: &Source, plan: &Plan, observe: Observer) -> Result<Converted, ConvertError> {
    let started = Instant::now();
    let staging = Staging::begin(&plan.options.output)?;
    observe(&ConvertEvent::Planned(&PlanSummary {
        tensors: plan.steps.len(),
        file_bytes: source.weight_bytes(),
        source_bytes: plan.source_bytes(),
        bytes_per_rank: plan.weight_bytes_per_rank(),
        warnings: plan.warnings.clone(),
    }));
    let record = source.digest(&|bytes| observe(&ConvertEvent::Hashed(bytes)));
    let weights = write_weights(source, plan, staging.directory(), observe)?;
    let (set, written_bytes) =
        write_documents(source, plan, record, &weights, staging.directory())?;
    let stored_bytes =
        plan.steps.iter().flat_map(|step| &step.parts).map(crate::plan::Part::size_bytes).sum();
    let parameters = plan.steps.iter().map(|step| step.tensor.shape.iter().product::<u64>()).sum();
    let report = Report::new(
        weights.tensors,
        (parameters, stored_bytes),
        plan.weight_bytes_per_rank(),
        plan.warnings.clone(),
    );
    write_small(staging.directory(), "report.json", pretty(&report)?.as_bytes())?;
    let run = Run {
        seconds: started.elapsed().as_secs_f64(),
        source_bytes: plan.source_bytes(),
        written_bytes,
        threads: rayon::current_num_threads(),
    };
    write_small(staging.directory(), "run.json", pretty(&run)?.as_bytes())?;
    observe(&ConvertEvent::Publishing);
    staging.publish()?;
    Ok(Converted { output: plan.options.output.clone(), set, report, run })
}

/// What writing the weights has found out.
struct Weights {
    identities: Vec<TensorIdentity>,
    tensors: BTreeMap<String, TensorReport>,
    /// Files and tensors of all packages, and of each rank's own.
    shared: (Vec<FileEntry>, Vec<TensorEntry>),
    own: Vec<(Vec<FileEntry>, Vec<TensorEntry>)>,
}

/// Name of a rank's package within the set.
fn package_name(rank: usize) -> String {
    format!("node-{rank}")
}

fn write_weights(
    source: &Source,
    plan: &Plan,
    directory: &Path,
    observe: Observer,
) -> Result<Weights, ConvertError> {
    let directories: Vec<PathBuf> =
        (0..plan.packages.own.len()).map(|rank| directory.join(package_name(rank))).collect();
    for directory in &directories {
        at(directory, fs::create_dir(directory))?;
    }
    let mut shared = Files::new(&directories[0], &plan.packages.shared);
    let mut own: Vec<Files> = plan
        .packages
        .own
        .iter()
        .zip(&directories)
        .map(|(files, directory)| Files::new(directory, files))
        .collect();
    let mut identities = Vec::new();
    let mut tensors = BTreeMap::new();
    for (index, step) in plan.steps.iter().enumerate() {
        observe(&ConvertEvent::TensorStarted { name: &step.tensor.name, index });
        let stored = quantized::store(source, plan, step)?;
        for (stored, part) in stored.parts.iter().zip(&step.parts) {
            identities.push(identity(step, part, stored));
            match &part.destination {
                Destination::Shared => shared.tensor(&[stored])?,
                Destination::Once => own[0].tensor(&[stored])?,
                Destination::Cut(cuts) => {
                    own.par_iter_mut().zip(cuts).try_for_each(|(files, cut)| match cut {
                        Cut::Range { dim, start, end, .. } if start < end => {
                            let range = *start..*end;
                            let pieces = cut::pieces(
                                stored,
                                &part.shape,
                                part.dtype.size_bytes(),
                                *dim as usize,
                                range,
                            );
                            files.tensor(&pieces.collect::<Vec<_>>())
                        }
                        _ => Ok(()),
                    })?;
                }
            }
        }
        tensors.insert(step.tensor.name.clone(), stored.report);
        observe(&ConvertEvent::TensorFinished {
            source_bytes: crate::plan::source_size(&step.tensor),
        });
    }
    let shared = shared.finish()?;
    for directory in &directories[1..] {
        for file in &shared.0 {
            share(&directories[0].join(&file.name), &directory.join(&file.name))?;
        }
    }
    let own = own.into_iter().map(Files::finish).collect::<Result<_, _>>()?;
    Ok(Weights { identities, tensors, shared, own })
}

fn identity(step: &Step, part: &crate::plan::Part, bytes: &[u8]) -> TensorIdentity {
    let (bits, group) = match step.format {
        MatrixFormat::Plain => (0, 0),
        MatrixFormat::Affine { bits, group_size } => (bits, group_size),
    };
    let blake3 = Digest::of_parallel(bytes, &|_| ());
    TensorIdentity {
        name: part.name.clone(),
        dtype: part.dtype,
        shape: part.shape.clone(),
        bits,
        group,
        blake3,
    }
}

/// The weight files of one package, opened one after the other.
struct Files<'a> {
    directory: &'a Path,
    waiting: std::slice::Iter<'a, FilePlan>,
    current: Option<FileWriter>,
    finished: (Vec<FileEntry>, Vec<TensorEntry>),
}

impl<'a> Files<'a> {
    fn new(directory: &'a Path, files: &'a [FilePlan]) -> Self {
        Self { directory, waiting: files.iter(), current: None, finished: Default::default() }
    }

    /// Writes the next tensor of the package, given in pieces.
    fn tensor(&mut self, pieces: &[&[u8]]) -> Result<(), WriteError> {
        if self.current.as_ref().is_none_or(|writer| writer.next().is_none()) {
            self.close()?;
            let plan = self.waiting.next().expect("every tensor was planned into a file").clone();
            self.current = Some(FileWriter::create(self.directory, plan)?);
        }
        self.current.as_mut().expect("opened above").tensor(pieces)
    }

    fn close(&mut self) -> Result<(), WriteError> {
        if let Some(writer) = self.current.take() {
            let (file, tensors) = writer.finish()?;
            self.finished.0.push(file);
            self.finished.1.extend(tensors);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(Vec<FileEntry>, Vec<TensorEntry>), WriteError> {
        self.close()?;
        Ok(self.finished)
    }
}

/// Writes everything that is not weights, and `set.json`. Returns the set and the bytes written.
fn write_documents(
    source: &Source,
    plan: &Plan,
    record: SourceRecord,
    weights: &Weights,
    directory: &Path,
) -> Result<(PackageSet, u64), ConvertError> {
    let texts = text::package_texts(source, plan)?;
    let digests = texts.iter().filter(|(name, _)| ids::TEXT_FILES.contains(&name.as_str()));
    let digests = digests.map(|(name, bytes)| (name.clone(), Digest::of(bytes))).collect();
    let weights_id = ids::weights_id(&weights.identities, &plan.normalised.spec)?;
    let model = ids::model_id(weights_id, &digests)?;
    let ids = Ids { weights: weights_id, model, layout: ids::layout_id(model, &plan.layout)? };
    let mut packages = Vec::new();
    let mut written = weights.shared.0.iter().map(|file| file.size).sum();
    for (rank, own) in weights.own.iter().enumerate() {
        let name = package_name(rank);
        let package = directory.join(&name);
        let mut tensors: Vec<TensorEntry> =
            weights.shared.1.iter().chain(&own.1).cloned().collect();
        tensors.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
        let mut files: Vec<FileEntry> = weights.shared.0.iter().chain(&own.0).cloned().collect();
        for (name, bytes) in &texts {
            files.push(write_small(&package, name, bytes)?);
        }
        let index = text::index(&tensors);
        files.push(write_small(&package, "model.safetensors.index.json", index.as_bytes())?);
        files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        written += files
            .iter()
            .filter(|file| !weights.shared.0.contains(file))
            .map(|file| file.size)
            .sum::<u64>();
        let size_bytes = files.iter().map(|file| file.size).sum();
        let manifest = Manifest {
            format: FORMAT,
            requires: Vec::new(),
            name: plan.options.name.clone(),
            ids: ids.clone(),
            source: record.clone(),
            architecture: plan.normalised.spec.clone(),
            quantization: plan.quantization.clone(),
            layout: plan.layout.clone(),
            rank: rank as u32,
            files,
            tensors,
        };
        let text = canonical::to_string(&manifest)? + "\n";
        write_small(&package, MANIFEST_FILE, text.as_bytes())?;
        sync_directory(&package)?;
        packages.push(PackageEntry {
            directory: name,
            manifest: Digest::of(text.as_bytes()),
            size_bytes,
        });
    }
    let set = PackageSet {
        format: FORMAT,
        requires: Vec::new(),
        name: plan.options.name.clone(),
        ids,
        source: record,
        quantization: plan.quantization.clone(),
        packages,
    };
    write_small(directory, SET_FILE, (canonical::to_string(&set)? + "\n").as_bytes())?;
    Ok((set, written))
}

fn pretty<T: Serialize>(value: &T) -> Result<String, ConvertError> {
    let text = serde_json::to_string_pretty(value).map_err(canonical::CanonicalError::from)?;
    Ok(text + "\n")
}
