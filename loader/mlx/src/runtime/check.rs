//! Whether a folder is a whole runtime for this program on this machine.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::{MLX_VERSION, Platform, record};
use crate::{runtime::Record, table::ABI};

const INSTALL: &str = "run `shardpack engine install mlx`";

/// Why a folder is no runtime.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is none.
    #[error("no MLX runtime in {}; {INSTALL}, or use `--engine cpu`", .0.display())]
    Absent(PathBuf),
    /// MLX has no build for this machine.
    #[error("{}", super::platform::ABSENT)]
    Platform,
    /// The record cannot be understood.
    #[error("{}: not a runtime record ({problem}); {INSTALL} again", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The runtime is another one.
    #[error("{}: {what} is {found}, this program needs {expected}; {INSTALL} again", .path.display())]
    Other {
        /// The folder.
        path: PathBuf,
        /// What was compared.
        what: &'static str,
        /// What this program needs.
        expected: String,
        /// What the record says.
        found: String,
    },
    /// A file is missing, cut or changed.
    #[error("{}: {problem}; the runtime is damaged: {INSTALL} again, or copy the whole folder", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// A runtime whose every byte is as it was installed.
#[derive(Debug)]
pub struct Checked {
    /// What it says of itself.
    pub record: Record,
    /// Our C layer.
    pub(crate) shim: PathBuf,
}

/// Compares every byte of the runtime in `folder` with its record, and the record with what this
/// program needs.
pub fn check(folder: &Path) -> Result<Checked, CheckError> {
    let platform = Platform::current().ok_or(CheckError::Platform)?;
    let record = read_record(folder)?;
    compare(folder, &record, platform)?;
    for file in &record.files {
        let path = folder.join(&file.path);
        let problem = |problem: String| CheckError::File { path: path.clone(), problem };
        if !file.is_inside() {
            return Err(problem("its path leaves the folder".to_owned()));
        }
        let FileDigest { size, blake3 } =
            digest(&path).map_err(|error| problem(error.to_string()))?;
        if size != file.size {
            return Err(problem(format!("{size} bytes, expected {}", file.size)));
        }
        if blake3 != file.blake3 {
            return Err(problem("its content was changed".to_owned()));
        }
    }
    refuse_strangers(folder, &record)?;
    let shim = platform.shim();
    let path = folder.join(shim);
    if !record.files.iter().any(|file| file.path == shim) {
        return Err(CheckError::File { path, problem: "missing from the record".to_owned() });
    }
    Ok(Checked { record, shim: path })
}

/// A library that lies beside ours could be loaded instead of the system's. Names with a leading
/// dot are what copying programs leave behind, and no library is found by them.
fn refuse_strangers(folder: &Path, record: &Record) -> Result<(), CheckError> {
    let mut folders = vec![PathBuf::new()];
    while let Some(within) = folders.pop() {
        let path = folder.join(&within);
        let problem =
            |error: io::Error| CheckError::File { path: path.clone(), problem: error.to_string() };
        for entry in fs::read_dir(&path).map_err(problem)? {
            let entry = entry.map_err(problem)?;
            let name = within.join(entry.file_name());
            let shown = name.to_string_lossy().replace('\\', "/");
            let is_known = shown == record::NAME
                || entry.file_name().to_string_lossy().starts_with('.')
                || record.files.iter().any(|file| file.path == shown);
            if is_known {
                continue;
            }
            if entry.file_type().map_err(problem)?.is_dir() {
                folders.push(name);
                continue;
            }
            let problem = "it does not belong to the runtime".to_owned();
            return Err(CheckError::File { path: folder.join(name), problem });
        }
    }
    Ok(())
}

fn read_record(folder: &Path) -> Result<Record, CheckError> {
    let path = folder.join(record::NAME);
    let problem = |problem: String| CheckError::Record { path: path.clone(), problem };
    let size = match fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CheckError::Absent(folder.to_owned()));
        }
        Err(error) => return Err(problem(error.to_string())),
    };
    if size > record::MAX_BYTES {
        return Err(problem(format!("{size} bytes")));
    }
    let bytes = fs::read(&path).map_err(|error| problem(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| problem(error.to_string()))
}

fn compare(folder: &Path, record: &Record, platform: Platform) -> Result<(), CheckError> {
    let pins: Vec<_> = platform.wheels().iter().map(|wheel| wheel.sha256).collect();
    let pin = pins.iter().find(|pin| **pin == record.wheel_sha256).unwrap_or(&pins[0]);
    let source = super::layer::source_digest();
    let rows = [
        ("the record's format", record::FORMAT.to_string(), record.format.to_string()),
        ("MLX's version", MLX_VERSION.to_owned(), record.mlx.clone()),
        ("the platform", platform.name().to_owned(), record.platform.clone()),
        ("the C layer's version", ABI.to_string(), record.abi.to_string()),
        ("the C layer's source", source, record.source_sha256.clone()),
        ("the digest of MLX's wheel", (*pin).to_owned(), record.wheel_sha256.clone()),
    ];
    for (what, expected, found) in rows {
        if expected != found {
            return Err(CheckError::Other { path: folder.to_owned(), what, expected, found });
        }
    }
    Ok(())
}

/// Size and digest of a file.
pub(crate) struct FileDigest {
    /// Size in bytes.
    pub(crate) size: u64,
    /// BLAKE3, in hex.
    pub(crate) blake3: String,
}

/// Reads a file for its size and digest.
pub(crate) fn digest(path: &Path) -> io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(FileDigest { size, blake3: hasher.finalize().to_hex().to_string() });
        }
        hasher.update(&buffer[..read]);
        size += read as u64;
    }
}
