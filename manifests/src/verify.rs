//! Whether the bytes of a package, or of a package set, are those that its manifest promises.
//!
//! Everything wrong is reported, not only the first. Knows files and digests; does not know how
//! to repair them, and prints nothing.

mod problem;
mod read;
mod survey;
#[cfg(test)]
mod tests;

use std::{path::Path, time::Instant};

pub use problem::{Finding, Problem};
pub use survey::{EXTRA_FILES, check_member, read_document, read_set};

use crate::{digest::Digest, manifest::Manifest};
use survey::Survey;

/// Whether tensors are hashed beside the chunks that hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorCheck {
    /// Chunks alone; they cover every byte.
    Skip,
    /// Every tensor against its own digest too, which finds a manifest that contradicts itself;
    /// reads the weights a second time.
    Hash,
}

/// How a verification goes about it.
#[derive(Clone, Copy, Debug)]
pub struct VerifyOptions {
    /// Whether tensors are hashed on their own.
    pub tensors: TensorCheck,
}

/// What a verification tells while it runs, from any of its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyEvent {
    /// So many bytes will be read; said once, before the first is.
    Planned {
        /// Bytes to read.
        size_bytes: u64,
    },
    /// So many more bytes have been read and hashed.
    Read {
        /// Bytes since the last such event.
        size_bytes: u64,
    },
}

/// Hears what a verification tells.
pub type VerifyObserver<'a> = &'a (dyn Fn(VerifyEvent) + Sync);

/// What a verification found.
#[derive(Debug, Default)]
pub struct Report {
    /// Everything wrong, by package, then in the manifest's order.
    pub findings: Vec<Finding>,
    /// Packages whose manifest was read.
    pub packages: u64,
    /// Files that were hashed.
    pub files: u64,
    /// Chunks that were hashed.
    pub chunks: u64,
    /// Bytes that were read and hashed.
    pub read_bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

impl Report {
    /// Whether every byte is as promised.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Verifies the package in `directory`. `expected` is the digest of its manifest where a set, or
/// a controller, states it.
#[must_use]
pub fn verify_package(
    directory: &Path,
    expected: Option<Digest>,
    options: VerifyOptions,
    observer: VerifyObserver,
) -> Report {
    let start = Instant::now();
    let name = directory.file_name().map(|name| name.to_string_lossy().into_owned());
    let survey = Survey::of(directory, &name.unwrap_or_default(), expected);
    hash_surveys(vec![survey], Report::default(), start, options, observer)
}

/// Verifies the package set in `directory`: its `set.json`, every package, and that the packages
/// belong together.
#[must_use]
pub fn verify_set(directory: &Path, options: VerifyOptions, observer: VerifyObserver) -> Report {
    let start = Instant::now();
    let mut report = Report::default();
    let set = match read_set(directory) {
        Ok((set, _)) => set,
        Err(problem) => {
            report.findings.push(Finding { package: None, problem });
            report.seconds = start.elapsed().as_secs_f64();
            return report;
        }
    };
    let mut surveys = Vec::with_capacity(set.packages.len());
    let mut first: Option<Manifest> = None;
    for (rank, entry) in set.packages.iter().enumerate() {
        let path = directory.join(&entry.directory);
        let mut survey = Survey::of_member(&path, &entry.directory, entry.manifest);
        if let Some(manifest) = &survey.manifest {
            let problems = check_member(&set, rank as u32, manifest, first.as_ref());
            survey.problems.extend(problems);
            first = first.or_else(|| survey.manifest.clone());
        }
        surveys.push(survey);
    }
    hash_surveys(surveys, report, start, options, observer)
}

/// Hashes what the surveys found readable and completes the report.
fn hash_surveys(
    surveys: Vec<Survey>,
    mut report: Report,
    start: Instant,
    options: VerifyOptions,
    observer: VerifyObserver,
) -> Report {
    let planned = surveys.iter().map(|survey| survey.planned_bytes(options.tensors)).sum();
    observer(VerifyEvent::Planned { size_bytes: planned });
    for mut survey in surveys {
        let package = Some(survey.name.clone());
        let mut problems = std::mem::take(&mut survey.problems);
        if let Some(manifest) = &survey.manifest {
            report.packages += 1;
            let hashed = read::hash_files(&survey.directory, manifest, &survey.readable, observer);
            report.files += survey.readable.len() as u64;
            report.chunks += hashed.chunks;
            report.read_bytes += hashed.read_bytes;
            problems.extend(hashed.problems);
            if options.tensors == TensorCheck::Hash {
                let tensors =
                    read::hash_tensors(&survey.directory, manifest, &survey.readable, observer);
                report.read_bytes += tensors.read_bytes;
                problems.extend(tensors.problems);
            }
        }
        report.findings.extend(
            problems.into_iter().map(|problem| Finding { package: package.clone(), problem }),
        );
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}
