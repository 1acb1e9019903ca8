//! The audit log: one line of JSON for each request, each with the BLAKE3 of the line before it, so that a
//! change of any line but the last shows. Prompts and answers are not in it.
//!
//! A line is an object with `seq` (one more than the line before), `time`, `prev` (the hash of the line
//! before without its end of line, zeros for the first of all), and what there is to say. Lines with
//! `event` are about the log itself: `opened`, `torn_line` (a crash left half a line, which was cut off),
//! `lost` (lines that could not be written) and `closed`.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufRead, BufReader, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use serde_json::{Map, Value, json};

use super::dates::rfc3339;

/// Longest line: names are short, and nothing of a prompt is in it.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// The log cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// It cannot be read or written.
    #[error("{}: cannot be used as an audit log", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another server writes it.
    #[error("{}: another server writes this audit log: give each its own", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// Its last line is no line of an audit log.
    #[error("{}: its last line is no line of an audit log: expected JSON with seq and prev", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
}

/// What follows the last line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    seq: u64,
    /// Hash of the last line.
    hash: blake3::Hash,
}

const NOTHING: Head = Head { seq: 0, hash: blake3::Hash::from_bytes([0; 32]) };

/// An audit log that is written.
pub(super) struct AuditLog {
    path: PathBuf,
    file: Arc<File>,
    size_bytes: u64,
    head: Head,
    /// Lines that could not be written since the last that was.
    lost: u64,
    is_dirty: bool,
}

impl AuditLog {
    /// Opens a log to be continued, or begins it. A torn last line is cut off.
    pub(super) fn open(path: &Path) -> Result<Self, AuditError> {
        Self::open_after(path, None)
    }

    fn open_after(path: &Path, before: Option<Head>) -> Result<Self, AuditError> {
        let failed = |source| AuditError::Io { file: path.to_owned(), source };
        let mut options = OpenOptions::new();
        options.create(true).read(true).append(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(AuditError::InUse { file: path.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let size = file.metadata().map_err(failed)?.len();
        let (whole, last) = last_line(&mut file, size).map_err(failed)?;
        if whole < size {
            file.set_len(whole).map_err(failed)?;
        }
        let found = match &last {
            None => None,
            Some(line) => {
                Some(head_of(line).ok_or_else(|| AuditError::Foreign { file: path.to_owned() })?)
            }
        };
        let head = found.or(before).unwrap_or(NOTHING);
        let file = Arc::new(file);
        let path = path.to_owned();
        let mut log = Self { path, file, size_bytes: whole, head, lost: 0, is_dirty: false };
        if whole < size {
            log.event("torn_line", json!({ "bytes": size - whole }));
        }
        log.event("opened", json!({ "program": concat!("shardpack ", env!("CARGO_PKG_VERSION")) }));
        Ok(log)
    }

    /// Appends a line about a request; whether it could be written.
    pub(super) fn add(&mut self, fields: Map<String, Value>) -> bool {
        if self.lost > 0 {
            let lost = Map::from_iter([("lines".to_owned(), self.lost.into())]);
            if !self.write(Some("lost"), lost) {
                self.lost += 1;
                return false;
            }
            self.lost = 0;
        }
        let is_written = self.write(None, fields);
        self.lost += u64::from(!is_written);
        is_written
    }

    /// Appends a line about the log.
    pub(super) fn event(&mut self, name: &str, fields: Value) -> bool {
        let Value::Object(fields) = fields else { return false };
        self.write(Some(name), fields)
    }

    fn write(&mut self, event: Option<&str>, fields: Map<String, Value>) -> bool {
        let seq = self.head.seq + 1;
        let mut line = Map::new();
        line.insert("seq".to_owned(), seq.into());
        line.insert("time".to_owned(), rfc3339(SystemTime::now()).into());
        if let Some(event) = event {
            line.insert("event".to_owned(), event.into());
        }
        line.extend(fields);
        line.insert("prev".to_owned(), self.head.hash.to_hex().as_str().into());
        let mut text = Value::Object(line).to_string();
        let hash = blake3::hash(text.as_bytes());
        text.push('\n');
        if (&*self.file).write_all(text.as_bytes()).is_err() {
            // Half a line would spoil the next.
            let _ = self.file.set_len(self.size_bytes);
            return false;
        }
        self.size_bytes += text.len() as u64;
        self.head = Head { seq, hash };
        self.is_dirty = true;
        true
    }

    /// Opens the file anew where it has been moved away or replaced; the chain goes on in it.
    pub(super) fn reopen(&mut self) -> Result<bool, AuditError> {
        let failed = |source| AuditError::Io { file: self.path.clone(), source };
        let is_same = std::fs::metadata(&self.path).is_ok_and(|metadata| {
            self.file.metadata().is_ok_and(|own| identity(&own) == identity(&metadata))
                && metadata.len() >= self.size_bytes
        });
        if is_same {
            return Ok(false);
        }
        self.file.sync_data().map_err(failed)?;
        // One that was truncated in place is locked by this process.
        let _ = self.file.unlock();
        *self = Self::open_after(&self.path, Some(self.head))?;
        Ok(true)
    }

    /// What is to be synced to disk, if anything was written since.
    pub(super) fn dirty(&mut self) -> Option<Arc<File>> {
        std::mem::take(&mut self.is_dirty).then(|| Arc::clone(&self.file))
    }
}

#[cfg(unix)]
fn identity(metadata: &std::fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity(_: &std::fs::Metadata) -> (u64, u64) {
    (0, 0)
}

/// Where the whole lines of a file end, and the last of them.
fn last_line(file: &mut File, size: u64) -> io::Result<(u64, Option<Vec<u8>>)> {
    let from = size.saturating_sub(2 * LINE_BYTES_MAX);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(size - from).read_to_end(&mut bytes)?;
    let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else { return Ok((0, None)) };
    let begin = bytes[..end].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    Ok((from + end as u64 + 1, Some(bytes[begin..end].to_vec())))
}

/// What follows a line, if it is one of a log.
fn head_of(line: &[u8]) -> Option<Head> {
    let value: Value = serde_json::from_slice(line).ok()?;
    blake3::Hash::from_hex(value["prev"].as_str()?).ok()?;
    Some(Head { seq: value["seq"].as_u64()?, hash: blake3::hash(line) })
}

/// What is wrong with an audit log.
#[derive(Debug, thiserror::Error)]
#[error("{}: line {line}: {what}", file.display())]
pub struct AuditFault {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: u64,
    /// What was found, and what was expected.
    pub what: String,
}

/// An audit log whose chain is whole.
#[derive(Debug, PartialEq, Eq)]
pub struct AuditSummary {
    /// Lines.
    pub lines: u64,
    /// Lines about requests.
    pub requests: u64,
    /// Sequence numbers of the first and the last line.
    pub seq: [u64; 2],
    /// BLAKE3 of the last line, in hex: kept elsewhere, it shows that lines were taken from the end.
    pub head: String,
}

/// Checks the chain through logs, the oldest first.
pub fn verify_audit(files: &[PathBuf]) -> Result<AuditSummary, AuditFault> {
    let (mut head, mut first, mut lines, mut requests) = (None::<Head>, 0, 0, 0);
    for path in files {
        let fault = |line: u64, what: String| AuditFault { file: path.clone(), line, what };
        let cannot = |error: io::Error| fault(0, format!("cannot be read: {error}"));
        let mut reader = BufReader::new(File::open(path).map_err(cannot)?);
        for number in 1.. {
            let mut line = Vec::new();
            let mut limited = (&mut reader).take(LINE_BYTES_MAX);
            if limited
                .read_until(b'\n', &mut line)
                .map_err(|error| fault(number, error.to_string()))?
                == 0
            {
                break;
            }
            if line.pop() != Some(b'\n') {
                return Err(fault(number, "the line is torn: expected an end of line".to_owned()));
            }
            let value: Value = serde_json::from_slice(&line)
                .map_err(|error| fault(number, format!("not JSON: {error}")))?;
            let after = head_of(&line)
                .ok_or_else(|| fault(number, "expected a line with seq and prev".to_owned()))?;
            check_link(head, &value, after.seq).map_err(|what| fault(number, what))?;
            first = if head.is_none() { after.seq } else { first };
            requests += u64::from(value.get("event").is_none());
            (head, lines) = (Some(after), lines + 1);
        }
    }
    let head = head.unwrap_or(NOTHING);
    let seq = [first, head.seq];
    Ok(AuditSummary { lines, requests, seq, head: head.hash.to_hex().to_string() })
}

/// Whether a line follows the one before; the first of a file may follow another file's.
fn check_link(before: Option<Head>, line: &Value, seq: u64) -> Result<(), String> {
    let prev = line["prev"].as_str().unwrap_or_default();
    let is_first = before.is_none();
    if is_first && seq > 1 && line["event"] != "opened" {
        return Err(format!("begins with seq {seq}: lines before it are missing"));
    }
    let before = match before {
        Some(before) => before,
        None if seq > 1 => return Ok(()),
        None => NOTHING,
    };
    if seq != before.seq + 1 {
        return Err(format!("seq {seq} where {} was expected", before.seq + 1));
    }
    let expected = before.hash.to_hex();
    if prev != expected.as_str() {
        return Err(format!(
            "prev {prev} is not the hash of the line before, {expected}: that line was changed"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
