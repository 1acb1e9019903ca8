//! Fetching a file of a package index: found by its name, taken only with the pinned length and
//! SHA-256, resumed after whatever cut it off.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use ureq::http::header;

use super::{
    DownloadOptions, Step,
    client::{Client, Failed, shown},
    index,
    program::sha256_of,
};

#[cfg(test)]
mod tests;

/// Times that a request is made without a further byte having arrived.
const ATTEMPTS: u32 = 5;

/// Times that a download is cut off at all.
const MAX_CUTS: u32 = 100;

/// Bytes of a project's page: the public index has 30 kB.
const MAX_PAGE_BYTES: u64 = 64 << 20;

/// Bytes between two reports.
const STEP_BYTES: usize = 256 << 10;

/// Why a file was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The options name nothing that can be used.
    #[error("{0}")]
    Option(String),
    /// The index does not have the file.
    #[error("{url}: no file {file}")]
    Absent {
        /// The project's page.
        url: String,
        /// The file.
        file: String,
    },
    /// The server gives something else.
    #[error("{url}: {problem}")]
    Answer {
        /// The address.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The server's file is of another length than the pinned one. What there is of it is removed.
    #[error("{url}: {problem}")]
    Length {
        /// The address.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The network fails.
    #[error("{url}: {problem} (tried {attempts} times)")]
    Network {
        /// The address.
        url: String,
        /// What failed last.
        problem: String,
        /// Number of requests that failed.
        attempts: u32,
    },
    /// The content is not the pinned one. The file is removed.
    #[error("{url}: SHA-256 is {found}, expected {expected}")]
    Content {
        /// The address.
        url: String,
        /// The pinned digest.
        expected: String,
        /// The file's.
        found: String,
    },
    /// Another process downloads the same file.
    #[error("{}: another process is downloading it; wait for it to end", .0.display())]
    Busy(PathBuf),
    /// The file cannot be written.
    #[error("{}: cannot be written", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A file of an index, and what it must be.
#[derive(Clone, Debug)]
pub(super) struct Pinned {
    pub(super) project: String,
    pub(super) file: String,
    pub(super) sha256: String,
    pub(super) size_bytes: u64,
}

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Without a byte, until a connection is given up.
    pub(super) silence: Duration,
    /// Before a failed request is made again; doubled each time.
    pub(super) pause: Duration,
}

impl Pace {
    pub(super) const STANDARD: Self =
        Self { silence: Duration::from_secs(30), pause: Duration::from_secs(1) };
}

/// Brings the file to `path`, going on with what is there.
pub(super) fn download(
    pinned: &Pinned,
    options: &DownloadOptions,
    pace: Pace,
    path: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<(), DownloadError> {
    let mut partial = Partial::open(pinned, path)?;
    let result = partial.complete(options, pace, report);
    // What is of no use does not stay: nothing, or bytes of another file.
    let is_spoilt =
        matches!(result, Err(DownloadError::Content { .. } | DownloadError::Length { .. }));
    if partial.size == 0 || is_spoilt {
        let _ = fs::remove_file(path);
    }
    result
}

/// A file that may not be complete yet.
struct Partial<'a> {
    pinned: &'a Pinned,
    path: &'a Path,
    handle: File,
    size: u64,
}

impl<'a> Partial<'a> {
    /// Takes up what an earlier run has left.
    fn open(pinned: &'a Pinned, path: &'a Path) -> Result<Self, DownloadError> {
        let write = |source| DownloadError::Write { path: path.to_owned(), source };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut handle = options.open(path).map_err(write)?;
        handle.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => DownloadError::Busy(path.to_owned()),
            TryLockError::Error(error) => write(error),
        })?;
        if handle.metadata().map_err(write)?.len() > pinned.size_bytes {
            handle.set_len(0).map_err(write)?;
        }
        let size = handle.seek(SeekFrom::End(0)).map_err(write)?;
        Ok(Self { pinned, path, handle, size })
    }

    fn complete(
        &mut self,
        options: &DownloadOptions,
        pace: Pace,
        report: &mut dyn FnMut(Step),
    ) -> Result<(), DownloadError> {
        let mut url = String::new();
        if self.size < self.pinned.size_bytes {
            let client = Client::new(options, &pace)?;
            let index = options.index_url.trim_end_matches('/');
            let page = format!("{index}/{}/", self.pinned.project);
            url = self.retry(&page, pace, report, |partial, _| {
                let url = find(&client, &page, &partial.pinned.file)?;
                Ok(Some(url))
            })?;
            let place = url.clone();
            self.retry(&place, pace, report, |partial, report| {
                partial.receive(&client, &place, report)?;
                Ok((partial.size == partial.pinned.size_bytes).then_some(()))
            })?;
        }
        let write = |source| DownloadError::Write { path: self.path.to_owned(), source };
        self.handle.sync_all().map_err(write)?;
        report(Step::Verify(self.path.to_owned()));
        let found = sha256_of(self.path).map_err(write)?;
        let expected = self.pinned.sha256.clone();
        if found == expected {
            return Ok(());
        }
        let url = if url.is_empty() { self.path.display().to_string() } else { shown(&url) };
        Err(DownloadError::Content { url, expected, found })
    }

    /// Makes a request until it succeeds or it makes no sense to go on.
    fn retry<T>(
        &mut self,
        url: &str,
        pace: Pace,
        report: &mut dyn FnMut(Step),
        mut request: impl FnMut(&mut Self, &mut dyn FnMut(Step)) -> Result<Option<T>, Failed>,
    ) -> Result<T, DownloadError> {
        // Counted anew by requests that get further than those before.
        let (mut failures, mut cuts) = (0, 0);
        loop {
            let before = self.size;
            let problem = match request(self, report) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => "the connection ended early".to_owned(),
                Err(Failed::Final(error)) => return Err(error),
                Err(Failed::Again(problem)) => problem,
            };
            failures = if self.size > before { 1 } else { failures + 1 };
            cuts += 1;
            if failures >= ATTEMPTS || cuts >= MAX_CUTS {
                return Err(DownloadError::Network { url: shown(url), problem, attempts: cuts });
            }
            report(Step::Retry(problem));
            std::thread::sleep(pace.pause * (1 << (failures - 1)));
        }
    }

    /// Requests what is missing and writes what arrives of it.
    fn receive(
        &mut self,
        client: &Client,
        url: &str,
        report: &mut dyn FnMut(Step),
    ) -> Result<(), Failed> {
        let total = self.pinned.size_bytes;
        let mut answer = client.get(url, (self.size > 0).then_some(self.size))?;
        let wrong =
            |problem: String| Failed::Final(DownloadError::Length { url: shown(url), problem });
        match answer.status() {
            206 => {
                let range = answer.header(header::CONTENT_RANGE);
                let expected = format!("bytes {}-{}/{total}", self.size, total - 1);
                if range != expected {
                    return Err(wrong(format!("sends {range:?}, expected {expected:?}")));
                }
            }
            200 => {
                let length = answer.header(header::CONTENT_LENGTH);
                if !length.is_empty() && length != total.to_string() {
                    return Err(wrong(format!("{length} bytes, expected {total}")));
                }
                self.restart()?;
            }
            status => {
                self.restart()?;
                return Err(Failed::Again(format!("the server answered {status}")));
            }
        }
        let mut body = answer.response.body_mut().as_reader();
        let mut buffer = vec![0; STEP_BYTES];
        loop {
            report(Step::Bytes { done: self.size, total });
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failed::Again(error.to_string())),
            };
            if self.size + count as u64 > total {
                return Err(wrong(format!("more than {total} bytes")));
            }
            self.handle.write_all(&buffer[..count]).map_err(|source| self.failed(source))?;
            self.size += count as u64;
        }
    }

    fn restart(&mut self) -> Result<(), Failed> {
        let emptied = self.handle.set_len(0).and_then(|()| self.handle.rewind());
        emptied.map_err(|source| self.failed(source))?;
        self.size = 0;
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Failed {
        Failed::Final(DownloadError::Write { path: self.path.to_owned(), source })
    }
}

/// Asks the index where a file is.
fn find(client: &Client, page: &str, file: &str) -> Result<String, Failed> {
    let mut answer = client.get(page, None)?;
    let mut text = Vec::new();
    let body = answer.response.body_mut().as_reader();
    let read = body.take(MAX_PAGE_BYTES).read_to_end(&mut text);
    read.map_err(|error| Failed::Again(error.to_string()))?;
    index::find(&String::from_utf8_lossy(&text), &answer.url, file).ok_or_else(|| {
        Failed::Final(DownloadError::Absent { url: shown(page), file: file.to_owned() })
    })
}
