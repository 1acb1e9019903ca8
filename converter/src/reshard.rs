//! Reshards a package set for another number of ranks, without the source: stored tensors are put
//! together and sharded again, one block of rows at a time. No weight is computed, so the result is
//! byte for byte what a conversion of the source for as many ranks writes.

mod event;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use shardpack_manifests::{
    PackageSet, canonical::CanonicalError, manifest::FORMAT, signature::SignError,
};

pub use event::{ReshardEvent, ReshardObserver};

use crate::{
    convert::{
        Finished,
        documents::{self, DocumentError, Written},
        output::Output,
    },
    package::{WriteError, at, write_small},
    plan::{BLOCK_BYTES, ConvertOptions, Nodes, Plan, RankMemory, TensorConversion},
    report::{PAGE_FILE, Report, Run, TensorReport, page},
    shard_writer::ShardWriter,
    staging::{Staging, StagingError},
    unsharded::{Scratch, UnshardError, UnshardedModel},
};

/// What the program needs besides its blocks and chunks.
const BASE_BYTES: u64 = 64 << 20;

/// Why there is no new set. Nothing is left under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ReshardError {
    /// The packages.
    #[error(transparent)]
    Join(#[from] UnshardError),
    /// The output cannot be begun.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The output cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A document has no canonical form: a bug of ours.
    #[error("a document cannot be written")]
    Canonical(#[from] CanonicalError),
    /// A package cannot be signed.
    #[error(transparent)]
    Sign(Box<SignError>),
    /// The chat template cannot be tried.
    #[error("{file}: {problem}")]
    Template {
        /// Its file.
        file: &'static str,
        /// What it did.
        problem: String,
    },
}

impl From<DocumentError> for ReshardError {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::Write(error) => Self::Write(error),
            DocumentError::Canonical(error) => Self::Canonical(error),
            DocumentError::Sign(error) => Self::Sign(error),
            DocumentError::Template { file, problem } => Self::Template { file, problem },
        }
    }
}

impl ReshardError {
    /// Whether the packages were looked at and are wrong (else it could not be done).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        matches!(self, Self::Join(error) if error.is_wrong())
    }
}

/// What the user asks for.
#[derive(Clone, Debug)]
pub struct ReshardOptions {
    /// Folder that is written; must not exist or be empty.
    pub output: PathBuf,
    /// The nodes to shard for.
    pub nodes: Nodes,
    /// Pipeline stages into which they are divided; 1 where every node runs all layers.
    pub stages: u32,
    /// Tokens of context to plan the nodes' memory for; the model's own longest when absent.
    pub context: Option<u32>,
    /// Bytes that may be held in memory.
    pub memory_bytes: u64,
}

impl ReshardOptions {
    /// The options of a conversion that ends in the same set.
    pub(crate) fn of_conversion(&self) -> ConvertOptions {
        ConvertOptions {
            nodes: self.nodes.clone(),
            stages: self.stages,
            context: self.context,
            memory_bytes: self.memory_bytes,
            ..ConvertOptions::new(self.output.clone(), 1)
        }
    }
}

/// A finished set.
#[derive(Debug)]
pub struct Resharded {
    /// The folder with the packages.
    pub output: PathBuf,
    /// What `set.json` says.
    pub set: PackageSet,
    /// What each rank needs to run.
    pub memory: Vec<RankMemory>,
    /// What `report.json` says; absent when the packages came without their set's, which alone
    /// knows what the conversion did to the weights.
    pub report: Option<Report>,
    /// What `run.json` says.
    pub run: Run,
}

/// Shards a model again, for another number of ranks. The output appears under its name complete
/// or not at all.
pub fn reshard(
    model: &UnshardedModel,
    options: &ReshardOptions,
    observe: ReshardObserver,
) -> Result<Resharded, ReshardError> {
    let started = Instant::now();
    let plan = model.plan(options.of_conversion())?;
    let staging = Staging::begin(&options.output)?;
    clear(staging.directory())?;
    let written = write(model, &plan, staging.directory(), observe)?;
    let report = report(model, &plan);
    if let Some(report) = &report {
        let text = documents::pretty(report)?;
        write_small(staging.directory(), "report.json", text.as_bytes())?;
        write_small(staging.directory(), PAGE_FILE, page(report, &written.set).as_bytes())?;
    }
    let run = Run {
        seconds: started.elapsed().as_secs_f64(),
        source_bytes: model.size_bytes(),
        resumed_bytes: 0,
        written_bytes: written.bytes,
        threads: rayon::current_num_threads(),
    };
    write_small(staging.directory(), "run.json", documents::pretty(&run)?.as_bytes())?;
    observe(ReshardEvent::Publishing);
    staging.publish()?;
    let (output, memory) = (options.output.clone(), plan.memory);
    Ok(Resharded { output, set: written.set, memory, report, run })
}

/// Writes packages and `set.json` into a directory.
pub(crate) fn write(
    model: &UnshardedModel,
    plan: &Plan,
    directory: &Path,
    observe: ReshardObserver,
) -> Result<Written, ReshardError> {
    observe(ReshardEvent::Planned { size_bytes: model.size_bytes() });
    let output = Output::open(directory, plan)?;
    let finished = move_tensors(model, plan, &output, observe)?;
    observe(ReshardEvent::Hashing);
    let files = output.finish(plan)?;
    let record = model.manifest().source.clone();
    let written = documents::write(&model.texts, plan, record, &finished, &files, directory)?;
    check_ids(model, &written.set)?;
    Ok(written)
}

/// The unsharded tensors must be those that the packages name, tensor by tensor. The ids of an earlier format
/// cover other names of the architecture, so there the digests of chunks alone vouch for the bytes.
fn check_ids(model: &UnshardedModel, set: &PackageSet) -> Result<(), UnshardError> {
    if model.manifest().format != FORMAT {
        return Ok(());
    }
    let (expected, found) = (&model.manifest().ids, &set.ids);
    let differs =
        [("weights", expected.weights, found.weights), ("model", expected.model, found.model)];
    match differs.into_iter().find(|(_, expected, found)| expected != found) {
        Some((what, expected, found)) => Err(UnshardError::WrongId { what, expected, found }),
        None => Ok(()),
    }
}

/// The report of the conversion, with what depends on the sharding computed anew.
fn report(model: &UnshardedModel, plan: &Plan) -> Option<Report> {
    model.report.as_ref().map(|report| plan.report(report.tensors.clone()))
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    block: Vec<u8>,
    gathered: Vec<u8>,
    scratch: Scratch,
}

/// Moves every tensor, on as many threads as the memory allows; returns what became of each.
fn move_tensors(
    model: &UnshardedModel,
    plan: &Plan,
    output: &Output,
    observe: ReshardObserver,
) -> Result<Vec<Finished>, ReshardError> {
    let workers = share_memory(model, plan);
    let finished: Vec<OnceLock<Finished>> = plan.steps.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    // The failure of the earliest tensor, so that the message does not depend on timing.
    let failure: Mutex<Option<(usize, ReshardError)>> = Mutex::new(None);
    rayon::broadcast(|context| {
        let mut buffers = Buffers::default();
        while context.index() < workers && !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(step) = plan.steps.get(index) else { return };
            match move_tensor(model, output, (index, step), &mut buffers, observe) {
                Ok(moved) => {
                    finished[index].get_or_init(|| moved);
                }
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                    if failure.as_ref().is_none_or(|(earlier, _)| index < *earlier) {
                        *failure = Some((index, error));
                    }
                }
            }
        }
    });
    if let Some((_, error)) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let taken = "every tensor was moved";
    Ok(finished.into_iter().map(|cell| cell.into_inner().expect(taken)).collect())
}

/// Threads that may work at a time: each holds a block, a rank's shard of it to be read and one to
/// be written. The other half of the memory keeps checked chunks.
pub(crate) fn share_memory(model: &UnshardedModel, plan: &Plan) -> usize {
    let row =
        |step: &TensorConversion| step.parts.iter().map(crate::plan::StoredTensor::row_bytes).max();
    let block = plan.steps.iter().filter_map(row).max().unwrap_or(0).max(BLOCK_BYTES);
    let half = plan.options.memory_bytes.saturating_sub(BASE_BYTES) / 2;
    model.keep_bytes(half);
    (half / (3 * block)).max(1).try_into().unwrap_or(usize::MAX)
}

/// Moves one tensor: each of its stored parts, in blocks of rows.
fn move_tensor(
    model: &UnshardedModel,
    output: &Output,
    (index, step): (usize, &TensorConversion),
    buffers: &mut Buffers,
    observe: ReshardObserver,
) -> Result<Finished, ReshardError> {
    let found = model.report.as_ref().and_then(|report| report.tensors.get(&step.tensor.name));
    let report = found.cloned().unwrap_or_else(TensorReport::plain);
    let mut finished = Finished { identities: Vec::new(), shards: Vec::new(), report };
    for (number, part) in step.parts.iter().enumerate() {
        let mut writer = ShardWriter::new(part, output.regions(index, number));
        let rows = part.shape.first().copied().unwrap_or(1);
        let rows_per_block = (BLOCK_BYTES / part.row_bytes().max(1)).clamp(1, rows);
        let mut row = 0;
        while row < rows {
            let count = rows_per_block.min(rows - row);
            model.rows(&part.name, (row, count), &mut buffers.block, &mut buffers.scratch)?;
            writer.write(&buffers.block, &mut buffers.gathered)?;
            observe(ReshardEvent::Moved { size_bytes: buffers.block.len() as u64 });
            row += count;
        }
        let (identity, held) = writer.finish();
        finished.identities.push(identity);
        finished.shards.push(held);
    }
    Ok(finished)
}

/// Removes what an earlier run has left; nothing of it can be taken up. The directory itself
/// stays: it is locked.
pub(crate) fn clear(directory: &Path) -> Result<(), WriteError> {
    let entries = at(directory, fs::read_dir(directory))?;
    for entry in entries {
        let path = at(directory, entry)?.path();
        let is_folder = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
        at(&path, if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) })?;
    }
    Ok(())
}
