//! Loads a rank's package, from its disk or from its front, and opens the engine on it.

use std::{
    fs,
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use shardpack_chat::{OpenModelError, PromptHome};
use shardpack_cluster::{LoadError, Progress};
use shardpack_engine::{
    engine::RankEngine,
    loading::{OpenError, OpenProgress, Package, WeightStreams},
};
use shardpack_manifests::Manifest;

use crate::{
    args::EngineChoice,
    commands::{draft, ranks::StreamedPackage, text_worker},
    engines::say_copies,
    failure::Failure,
};

/// Where a rank's package is.
pub(super) enum Source {
    /// In the rank's folder, with this manifest.
    Folder(Box<Manifest>),
    /// Its front has it.
    Front(StreamedPackage, WeightStreams),
}

/// What a rank loads, and with what.
pub(super) struct Loading {
    pub(super) source: Source,
    /// The package's folder, or one for the documents of a package that its front sends.
    pub(super) folder: PathBuf,
    pub(super) engine: EngineChoice,
    pub(super) threads: usize,
}

impl Loading {
    /// Loads.
    pub(super) fn run(
        self,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Box<dyn RankEngine>, LoadError> {
        let Self { source, folder, engine, threads } = self;
        let manifest = source.manifest()?;
        engine.check_layout(&manifest.layout)?;
        let opened = engine.open(threads, [manifest.rank, manifest.layout.ranks])?;
        opened.check_memory(&manifest)?;
        // Only rank 0 samples under constraints and proposes draft tokens; a package without a
        // tokenizer has no constraints.
        let leads = manifest.rank == 0;
        let draft = engine.draft_model.as_deref().filter(|_| leads).map(draft::folder);
        let draft = draft.transpose().map_err(Failure::into_error)?;
        if let (Some(draft), Source::Folder(_)) = (&draft, &source) {
            draft::compare(draft, &folder)?;
        }
        let style = manifest.chat.as_ref().map(|chat| chat.output);
        let opening = engine.opening(threads)?;
        let package = match source {
            Source::Folder(_) => {
                read("reading weights", progress, |note| Package::open(&folder, &opening, &note))?
            }
            Source::Front(_, streams) => {
                let package = read("receiving weights", progress, |note| {
                    Package::stream(*manifest, &streams, opening.packing, &note)
                })?;
                write_documents(&package, &folder)?;
                if let Some(draft) = &draft {
                    draft::compare(draft, &folder)?;
                }
                package
            }
        };
        let draft = draft.map(|draft| {
            read("reading the draft model", progress, |note| Package::open(&draft, &opening, &note))
        });
        let draft = draft.transpose()?;
        let sandbox = text_worker::program();
        let home = PromptHome::Sandboxed(&sandbox);
        let constraints = match leads.then(|| shardpack_chat::constraints(&folder, style, home)) {
            Some(Err(OpenModelError::Sandbox(error))) => {
                return Err(anyhow::Error::from(error).into());
            }
            Some(Ok(constraints)) => constraints,
            Some(Err(_)) | None => None,
        };
        let (draft, options) = (draft.as_ref(), engine.options());
        Ok(opened.rank_engine(&package, draft, options, constraints, &mut say_copies)?)
    }
}

impl Source {
    fn manifest(&self) -> Result<Box<Manifest>, LoadError> {
        match self {
            Self::Folder(manifest) => Ok(manifest.clone()),
            Self::Front(described, streams) => {
                let manifest = streams.manifest()?;
                if described.is_of(&manifest) {
                    return Ok(Box::new(manifest));
                }
                let (layout, rank) = (manifest.ids.layout.short(), manifest.rank);
                Err(anyhow!(
                    "the front sent the manifest of rank {rank} of layout {layout}, not of rank {} \
                     of layout {}",
                    described.rank,
                    described.layout.short()
                )
                .into())
            }
        }
    }
}

/// Puts the documents of a package where the text side reads them: the manifest names no path.
fn write_documents(package: &Package, folder: &Path) -> Result<(), LoadError> {
    for (name, bytes) in package.documents() {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Interval between two progress reports.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Reads and verifies a package by `open`, which tells its progress from threads of its own.
fn read(
    doing: &str,
    progress: &mut dyn FnMut(Progress),
    open: impl FnOnce(Box<dyn Fn(OpenProgress) + Send + Sync>) -> Result<Package, OpenError> + Send,
) -> Result<Package, LoadError> {
    // The reading threads send progress to this thread, which reports it.
    let (notes, noted) = mpsc::channel();
    let package = thread::scope(|scope| {
        let opening = scope.spawn(move || {
            open(Box::new(move |progress| {
                // If nobody receives progress, nobody waits for the package either.
                let _ = notes.send(progress);
            }))
        });
        let mut next = Instant::now();
        while let Ok(OpenProgress { done_bytes, total_bytes }) = noted.recv() {
            if Instant::now() >= next || done_bytes == total_bytes {
                next = Instant::now() + REPORT_EVERY;
                progress(Progress { doing: doing.to_owned(), done_bytes, total_bytes });
            }
        }
        opening.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;
    Ok(package)
}
