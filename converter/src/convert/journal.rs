//! The journal of a running conversion: what it has finished.
//!
//! One line each: 16 hex digits of the BLAKE3 of the rest, a space, JSON. The first line's JSON is
//! the key: a digest of everything that decides the output but the weights themselves. Each other
//! line is a finished tensor, or a file that came from elsewhere and was verified. A line that is
//! torn or does not have its digest ends the journal. Lines are not synced one by one: what they
//! promise is read back and hashed before it is believed.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use shardpack_formats::OwnRules;
use shardpack_manifests::{Digest, canonical::CanonicalError};

use super::Finished;
use crate::{
    package::{WriteError, at},
    plan::Plan,
    source::Source,
};

/// Name of the journal within the staging directory.
const JOURNAL_FILE: &str = ".journal";

/// Hex digits of a line's check.
const CHECK_DIGITS: usize = 16;

/// The journal of a running conversion.
pub(super) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry {
    Step { step: usize, finished: Finished },
    File { file: usize, chunks: Vec<Digest> },
}

/// What an earlier run has done.
#[derive(Default)]
pub(super) struct Earlier {
    /// Finished tensors.
    pub(super) steps: BTreeMap<usize, Finished>,
    /// Files from elsewhere that were whole and verified, with the values of their chunks: the key
    /// names their checksums and sizes, so they are what they were.
    pub(super) files: BTreeMap<usize, Vec<Digest>>,
}

/// A digest of the source's headers and times, the options, and the program.
pub(super) fn key(source: &Source, plan: &Plan) -> Result<Digest, CanonicalError> {
    #[derive(Serialize)]
    struct Input<'a> {
        program: &'static str,
        config: Digest,
        files: Vec<(&'a str, u64, String)>,
        tensors: Vec<(&'a str, &'static str, &'a [u64], u64)>,
        quantization: &'a shardpack_manifests::manifest::Quantization,
        layout: &'a shardpack_manifests::Layout,
        adapters: Vec<(u64, String)>,
        rules: Option<&'a str>,
    }
    let tensors = source
        .tensors()
        .map(|info| (info.name.as_str(), info.dtype.name(), &*info.shape, info.offset));
    let files = source
        .weights
        .files
        .iter()
        .map(|file| (file.name.as_str(), file.size, file.modified.clone()));
    // Plain JSON and not canonical: it is compared on one machine and kept by nobody.
    let text = serde_json::to_vec(&Input {
        program: concat!("convert ", env!("CARGO_PKG_VERSION")),
        config: Digest::of(source.config.to_string().as_bytes()),
        files: files.collect(),
        tensors: tensors.collect(),
        quantization: &plan.quantization,
        layout: &plan.layout,
        adapters: source.adapters.key(),
        rules: plan.own_rules().map(OwnRules::text),
    })?;
    Ok(Digest::of(&text))
}

impl Journal {
    /// Opens the journal of `directory` and returns what it says was finished, if it is of the
    /// same conversion; else begins a new one.
    pub(super) fn open(directory: &Path, key: &Digest) -> Result<(Self, Earlier), WriteError> {
        let path = directory.join(JOURNAL_FILE);
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.split_inclusive('\n').map_while(checked);
        let same = lines.next().is_some_and(|line| {
            serde_json::from_str::<Digest>(line).is_ok_and(|found| found == *key)
        });
        let entries: Vec<Entry> = if same {
            lines.map_while(|line| serde_json::from_str(line).ok()).collect()
        } else {
            Vec::new()
        };
        // Written anew without what was torn.
        let temporary = directory.join(".journal.new");
        let mut new = line(&key);
        let mut earlier = Earlier::default();
        for entry in entries {
            new += &line(&entry);
            match entry {
                Entry::Step { step, finished } => _ = earlier.steps.insert(step, finished),
                Entry::File { file, chunks } => _ = earlier.files.insert(file, chunks),
            }
        }
        at(&temporary, fs::write(&temporary, new))?;
        at(&path, fs::rename(&temporary, &path))?;
        let file = Mutex::new(at(&path, File::options().append(true).open(&path))?);
        Ok((Self { path, file }, earlier))
    }

    /// Adds a finished tensor, whose bytes have been written.
    pub(super) fn add(&self, step: usize, finished: &Finished) -> Result<(), WriteError> {
        self.append(&Entry::Step { step, finished: finished.clone() })
    }

    /// Adds a file from elsewhere that was verified.
    pub(super) fn add_file(&self, file: usize, chunks: Vec<Digest>) -> Result<(), WriteError> {
        self.append(&Entry::File { file, chunks })
    }

    fn append(&self, entry: &Entry) -> Result<(), WriteError> {
        let line = line(entry);
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        at(&self.path, file.write_all(line.as_bytes()))
    }

    /// Removes the journal of a complete conversion.
    pub(super) fn remove(&self) -> Result<(), WriteError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => at(&self.path, Err(error)),
            _ => Ok(()),
        }
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("digests and finite numbers are JSON");
    format!("{} {json}\n", check(&json))
}

fn check(json: &str) -> String {
    let mut digits = Digest::of(json.as_bytes()).to_string();
    digits.truncate(CHECK_DIGITS);
    digits
}

/// The JSON of a whole line that has its digest.
fn checked(line: &str) -> Option<&str> {
    let (digits, json) = line.strip_suffix('\n')?.split_once(' ')?;
    (digits == check(json)).then_some(json)
}
