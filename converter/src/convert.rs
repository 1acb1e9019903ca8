//! Runs a plan. Every thread takes the next item of one list: a range of the source to
//! hash, or a tensor to bring from the source into the packages' files, block by block. What is
//! read for a tensor is hashed as it comes, so the source is read once.

pub(crate) mod documents;
mod items;
mod journal;
pub(crate) mod output;
mod read;
mod tensor;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use rayon::prelude::*;
use serde::Serialize;
use shardpack_manifests::{Digest, PackageSet, canonical, signature::SignError};
use shardpack_quantize::Rounding;

use crate::{
    learned::ScalesError,
    moments::MomentsError,
    package::{WriteError, write_small},
    plan::{Plan, PlanError},
    recipe::{RECIPE_FILE, recipe_file},
    report::{PAGE_FILE, Report, Run, TensorReport, Threshold, Violation, page, violations},
    source::{FileHashes, Follower, Source, SourceError},
    staging::{Staging, StagingError},
};
use documents::DocumentError;
use items::Item;
use journal::{Earlier, Journal};
use output::Output;
use tensor::Converter;

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
    /// What `calibrate` has measured cannot be read.
    #[error("--stats")]
    Moments(#[from] MomentsError),
    /// Learned scales cannot be read, or belong to other integers.
    #[error(transparent)]
    Scales(#[from] ScalesError),
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
    /// The result is beyond a threshold that was asked to hold.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Threshold(Vec<Violation>),
    /// A document has no canonical form: a bug of ours.
    #[error("a document cannot be written")]
    Canonical(#[from] canonical::CanonicalError),
    /// A package cannot be signed.
    #[error(transparent)]
    Sign(Box<SignError>),
    /// Another thread has asked for the end.
    #[error("cancelled; the same conversion goes on from here")]
    Cancelled,
}

impl From<DocumentError> for ConvertError {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::Write(error) => Self::Write(error),
            DocumentError::Canonical(error) => Self::Canonical(error),
            DocumentError::Sign(error) => Self::Sign(error),
            DocumentError::Template { file, problem } => {
                Self::Plan(PlanError::Template { file, problem })
            }
        }
    }
}

impl ConvertError {
    /// Whether the source was looked at and is wrong (else the conversion could not run).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        match self {
            Self::Source(error) | Self::Plan(PlanError::Source(error)) => error.is_wrong(),
            Self::Moments(error) | Self::Plan(PlanError::Moments(error)) => error.is_wrong(),
            Self::Scales(error) | Self::Plan(PlanError::Scales(error)) => error.is_wrong(),
            Self::Plan(PlanError::Budget(error)) => error.is_wrong(),
            Self::Plan(
                PlanError::Option { .. }
                | PlanError::NoStats
                | PlanError::UnusedStats(_)
                | PlanError::Stages { .. }
                | PlanError::Recipe(_)
                | PlanError::Threshold(_),
            )
            | Self::Staging(_)
            | Self::Write(_)
            | Self::Sign(_)
            | Self::Cancelled
            | Self::Canonical(_) => false,
            Self::Plan(_) | Self::Weight { .. } | Self::Threshold(_) => true,
        }
    }

    /// Whether running the same conversion again can go on where this one ended.
    #[must_use]
    pub const fn is_resumable(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Cancelled | Self::Source(SourceError::Read { .. }))
    }
}

/// What is happening, for progress displays. Paths and clocks stay out of packages; they may be
/// shown here.
#[derive(Clone, Copy, Debug)]
pub enum ConvertEvent<'a> {
    /// The plan stands; nothing is written yet.
    Planned(&'a PlanSummary),
    /// An earlier, interrupted run has left this many finished tensors, which were checked.
    Resumed {
        /// Finished tensors.
        tensors: usize,
        /// Their bytes in the source.
        source_bytes: u64,
    },
    /// A tensor begins.
    TensorStarted {
        /// Its name.
        name: &'a str,
        /// Its place in the order of writing.
        index: usize,
    },
    /// Bytes of a tensor are in the packages' files.
    Converted(u64),
    /// A tensor is in the packages' files and in the journal.
    TensorFinished {
        /// Its place in the order of writing.
        index: usize,
    },
    /// All tensors are written; the files are being hashed and made durable.
    Hashing,
    /// Everything but the final name is written.
    Publishing,
}

/// Figures of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlanSummary {
    /// Tensors to convert.
    pub tensors: usize,
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

/// Called with every event, from any thread.
pub type Observer<'a> = &'a (dyn Fn(&ConvertEvent) + Sync);

/// What the stored form of one tensor turned out to be.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize)]
pub(crate) struct Finished {
    /// Digest of each part before sharding.
    pub(crate) identities: Vec<Digest>,
    /// Digest of each rank's shard of each part; absent where a rank holds nothing. A shared
    /// part has one entry per stage.
    #[serde(rename = "pieces")]
    pub(crate) shards: Vec<Vec<Option<Digest>>>,
    pub(crate) report: TensorReport,
}

/// Converts an open source. The output appears under its name complete or not at all; a run that
/// was killed, or ended for want of space, is taken up where it was.
pub fn convert(source: &Source, plan: &Plan, observe: Observer) -> Result<Converted, ConvertError> {
    let started = Instant::now();
    if plan.options.rounding == Rounding::Gptq.name() && plan.options.stats.is_none() {
        return Err(PlanError::NoStats.into());
    }
    let staging = Staging::begin(&plan.options.output)?;
    let result = fill(source, plan, &staging, observe, started);
    let (set, report, run) = match result {
        Ok(parts) => parts,
        Err(error) => {
            if error.is_resumable() {
                staging.keep();
            }
            return Err(error);
        }
    };
    observe(&ConvertEvent::Publishing);
    staging.publish()?;
    Ok(Converted { output: plan.options.output.clone(), set, report, run })
}

fn fill(
    source: &Source,
    plan: &Plan,
    staging: &Staging,
    observe: Observer,
    started: Instant,
) -> Result<(PackageSet, Report, Run), ConvertError> {
    let directory = staging.directory();
    observe(&ConvertEvent::Planned(&PlanSummary {
        tensors: plan.steps.len(),
        source_bytes: plan.source_bytes(),
        bytes_per_rank: plan.weight_bytes_per_rank(),
        warnings: plan.warnings.clone(),
    }));
    let (journal, earlier) = Journal::open(directory, &journal::key(source, plan)?)?;
    let output = Output::open(directory, plan)?;
    let earlier = Earlier { steps: output.check(plan, earlier.steps), files: earlier.files };
    let resumed = earlier
        .steps
        .keys()
        .map(|index| crate::plan::source_size(&plan.steps[*index].tensor))
        .sum();
    if !earlier.steps.is_empty() {
        observe(&ConvertEvent::Resumed { tensors: earlier.steps.len(), source_bytes: resumed });
    }
    let run = Pass::new(source, plan, &output, &journal, earlier, observe);
    let (finished, digests) = run.run()?;
    observe(&ConvertEvent::Hashing);
    let files = output.finish(plan)?;
    let record = source.record(&digests)?;
    let texts = documents::package_texts(source, plan)?;
    let written = documents::write(&texts, plan, record, &finished, &files, directory)?;
    let tensors: BTreeMap<String, TensorReport> = plan
        .steps
        .iter()
        .zip(finished)
        .map(|(step, finished)| (step.tensor.name.clone(), finished.report))
        .collect();
    let report = plan.report(tensors);
    let thresholds: Vec<Threshold> =
        plan.options.fail_on.iter().filter_map(|text| text.parse().ok()).collect();
    let violations = violations(&report, &thresholds);
    if !violations.is_empty() {
        return Err(ConvertError::Threshold(violations));
    }
    if plan.options.budget.is_some() {
        let text = recipe_file(&plan.quantization, plan.options.group_size);
        write_small(directory, RECIPE_FILE, text.as_bytes())?;
    }
    write_small(directory, PAGE_FILE, page(&report, &written.set).as_bytes())?;
    write_small(directory, "report.json", documents::pretty(&report)?.as_bytes())?;
    let run = Run {
        seconds: started.elapsed().as_secs_f64(),
        source_bytes: plan.source_bytes(),
        resumed_bytes: resumed,
        written_bytes: written.bytes,
        threads: rayon::current_num_threads(),
    };
    write_small(directory, "run.json", documents::pretty(&run)?.as_bytes())?;
    journal.remove()?;
    Ok((written.set, report, run))
}

/// One pass over the list of items, shared by all threads.
struct Pass<'a> {
    source: &'a Source,
    plan: &'a Plan,
    converter: Converter<'a>,
    journal: &'a Journal,
    observe: Observer<'a>,
    items: Vec<Item>,
    next: AtomicUsize,
    failed: AtomicBool,
    /// The failure of the earliest item, so that the message does not depend on timing.
    failure: Mutex<Option<(usize, ConvertError)>>,
    finished: Vec<OnceLock<Finished>>,
    hashes: Arc<FileHashes>,
    /// Tensors that the journal may not name yet.
    unproven: Mutex<Unproven>,
}

/// Tensors made of files whose checksum has not been compared.
#[derive(Default)]
struct Unproven {
    verified: BTreeSet<usize>,
    /// Steps, and the files that they wait for.
    steps: Vec<(usize, BTreeSet<usize>)>,
}

impl<'a> Pass<'a> {
    fn new(
        source: &'a Source,
        plan: &'a Plan,
        output: &'a Output,
        journal: &'a Journal,
        Earlier { steps: earlier, files: mut known }: Earlier,
        observe: Observer<'a>,
    ) -> Self {
        let is_done = |index| earlier.contains_key(&index);
        // What a tensor is still to be made of is verified again as it comes.
        for index in (0..plan.steps.len()).filter(|index| !is_done(*index)) {
            for file in items::remote_files(source, plan, index) {
                known.remove(&file);
            }
        }
        let items = items::list(source, plan, is_done, |file| known.contains_key(&file));
        let finished: Vec<OnceLock<Finished>> =
            plan.steps.iter().map(|_| OnceLock::new()).collect();
        for (index, earlier) in earlier {
            finished[index].get_or_init(|| earlier);
        }
        let hashes = FileHashes::new(source.weights.files.iter().map(|file| file.size));
        for (file, chunks) in &known {
            for (chunk, value) in chunks.iter().enumerate() {
                hashes.set_chunk(*file, chunk as u64, *value);
            }
        }
        Self {
            source,
            plan,
            converter: Converter { source, plan, output },
            journal,
            observe,
            items,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            finished,
            hashes: Arc::new(hashes),
            unproven: Mutex::default(),
        }
    }

    /// Works on as many threads as the memory budget allows; returns what became of every
    /// tensor, and the digest of every weight file of the source.
    fn run(self) -> Result<(Vec<Finished>, Vec<Digest>), ConvertError> {
        let workers = self.plan.workers();
        rayon::broadcast(|context| {
            if context.index() < workers {
                self.work();
            }
        });
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((_, error)) = failure {
            return Err(error);
        }
        self.hash_the_rest()?;
        let taken = "every item was carried out";
        let finished =
            self.finished.into_iter().map(|cell| cell.into_inner().expect(taken)).collect();
        Ok((finished, self.hashes.digests()))
    }

    /// Hashes what should have been hashed on the way.
    fn hash_the_rest(&self) -> Result<(), ConvertError> {
        let missing = self.hashes.missing();
        debug_assert!(missing.is_empty(), "the list of items left out {missing:?}");
        missing
            .into_par_iter()
            .try_for_each(|(file, piece)| self.hash(file, piece..piece + 1, &mut Vec::new()))
    }

    /// Reads pieces of a weight file for its hash.
    fn hash(
        &self,
        file: usize,
        pieces: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ConvertError> {
        let weights = &self.source.weights.files[file];
        let read = |bytes: &mut [u8], at| weights.read(bytes, at);
        self.hashes.hash(file, pieces, read, buffer).map_err(|error| {
            SourceError::Read { path: self.source.path_of(file), source: error }.into()
        })
    }

    fn work(&self) {
        let mut scratch = tensor::Scratch::default();
        while !self.failed.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = self.items.get(index) else { return };
            if let Err(error) = self.carry_out(item, &mut scratch) {
                self.failed.store(true, Ordering::Relaxed);
                let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                if failure.as_ref().is_none_or(|(earlier, _)| index < *earlier) {
                    *failure = Some((index, error));
                }
                return;
            }
            item.done(self.source, self.plan);
        }
    }

    fn carry_out(&self, item: &Item, scratch: &mut tensor::Scratch) -> Result<(), ConvertError> {
        if self.plan.options.cancel.is_cancelled() {
            return Err(ConvertError::Cancelled);
        }
        match item {
            Item::Hash { file, pieces } => self.hash(*file, pieces.clone(), &mut scratch.hashed)?,
            Item::Convert(index) => {
                let step = &self.plan.steps[*index];
                (self.observe)(&ConvertEvent::TensorStarted {
                    name: &step.tensor.name,
                    index: *index,
                });
                let followed = items::is_followed(self.source, self.plan, *index);
                scratch.rows.follower = followed.then(|| Follower::new(Arc::clone(&self.hashes)));
                let done = |bytes| (self.observe)(&ConvertEvent::Converted(bytes));
                let finished = self.converter.convert(*index, scratch, &done)?;
                self.finished[*index].get_or_init(|| finished);
                self.prove(None, Some(*index))?;
                (self.observe)(&ConvertEvent::TensorFinished { index: *index });
            }
            Item::Verify(file) => {
                let weights = &self.source.weights.files[*file];
                let path = || self.source.path_of(*file);
                let values = weights
                    .verify()
                    .map_err(|source| SourceError::Read { path: path(), source })?;
                for (chunk, value) in values.iter().enumerate() {
                    self.hashes.set_chunk(*file, chunk as u64, *value);
                }
                self.journal.add_file(*file, values)?;
                self.prove(Some(*file), None)?;
            }
        }
        Ok(())
    }

    /// Takes down a file that was verified, a tensor that was made, and puts into the journal what
    /// is made of verified files alone: a later run goes on from there.
    fn prove(&self, file: Option<usize>, step: Option<usize>) -> Result<(), ConvertError> {
        let mut unproven = self.unproven.lock().unwrap_or_else(PoisonError::into_inner);
        unproven.verified.extend(file);
        let files = |step| (step, items::remote_files(self.source, self.plan, step));
        unproven.steps.extend(step.map(files));
        let Unproven { verified, steps } = &mut *unproven;
        let proven: Vec<usize> = steps
            .extract_if(.., |(_, files)| files.is_subset(verified))
            .map(|(step, _)| step)
            .collect();
        for step in proven {
            let finished = self.finished[step].get().expect("it was made before it was proven");
            self.journal.add(step, finished)?;
        }
        Ok(())
    }
}
