//! Fetching a file of a package index: found by its name, taken only with the pinned length and
//! SHA-256, resumed after whatever cut it off.

use std::{
    cell::{Cell, RefCell},
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
};

use shardpack_http::{
    Checksum, Cleartext, Client, DownloadEvent, Expected, HttpError, HttpOptions, Request, Retries,
    without_password,
};

use super::{Step, index};

#[cfg(test)]
mod tests;

/// Bytes of a project's page: the public index has 30 kB.
const MAX_PAGE_BYTES: u64 = 64 << 20;

/// JSON of PEP 691; HTML from indexes that have nothing else.
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, \
                      application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Where a wheel comes from. The environment is read by whoever makes these options.
#[derive(Clone, Debug)]
pub struct DownloadOptions {
    /// Base of a package index's simple API.
    pub index_url: String,
    /// A proxy for connections to other machines.
    pub proxy: Option<String>,
    /// Hosts that are reached without the proxy, separated by commas; they and what is below them.
    pub no_proxy: String,
    /// PEM certificates of the authorities to trust instead of Mozilla's.
    pub authorities: Option<PathBuf>,
}

impl DownloadOptions {
    /// The Python package index.
    pub const INDEX_URL: &str = "https://pypi.org/simple";

    fn client(&self, pace: Pace) -> Result<Client, HttpError> {
        Client::new(HttpOptions {
            proxy: self.proxy.clone(),
            no_proxy: self.no_proxy.clone(),
            authorities: self.authorities.clone(),
            accept: ACCEPT,
            // What comes back is compared with a pinned digest.
            cleartext: Cleartext::Anywhere,
            silence: pace.silence,
            retries: Retries { pause: pace.pause, ..Retries::STANDARD },
            ..HttpOptions::new()
        })
    }
}

/// Why a file was not fetched.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The index does not have the file.
    #[error("{url}: no file {file}")]
    Absent {
        /// The project's page.
        url: String,
        /// The file.
        file: String,
    },
    /// The server could not be reached, or gives something else.
    #[error(transparent)]
    Http(#[from] HttpError),
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
    pub(super) silence: std::time::Duration,
    /// Before a failed request is made again; doubled each time.
    pub(super) pause: std::time::Duration,
}

impl Pace {
    pub(super) const STANDARD: Self =
        Self { silence: HttpOptions::SILENCE, pause: Retries::STANDARD.pause };
}

/// Brings the file to `path`, going on with what is there.
pub(super) fn download(
    pinned: &Pinned,
    options: &DownloadOptions,
    pace: Pace,
    path: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<(), DownloadError> {
    let write = |source| DownloadError::Write { path: path.to_owned(), source };
    let mut open = File::options();
    open.read(true).write(true).create(true).truncate(false);
    let locked = open.open(path).map_err(write)?;
    locked.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => DownloadError::Busy(path.to_owned()),
        TryLockError::Error(error) => write(error),
    })?;
    let result = fetch(pinned, options, pace, path, report);
    // What is of no use does not stay: nothing, or bytes of another file.
    let is_spoilt = matches!(
        result,
        Err(DownloadError::Http(HttpError::Content { .. } | HttpError::Length { .. }))
    );
    if is_spoilt || locked.metadata().map_err(write)?.len() == 0 {
        let _ = fs::remove_file(path);
    }
    result
}

fn fetch(
    pinned: &Pinned,
    options: &DownloadOptions,
    pace: Pace,
    path: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<(), DownloadError> {
    let write = |source| DownloadError::Write { path: path.to_owned(), source };
    let checksum = Checksum::sha256(&pinned.sha256).expect("pinned digests have 64 hex digits");
    let total = pinned.size_bytes;
    if fs::metadata(path).map_err(write)?.len() == total {
        report(Step::Verify(path.to_owned()));
        if checksum.matches(path, total).map_err(write)? {
            return Ok(());
        }
        // The leftover of another file.
        File::options().write(true).open(path).and_then(|it| it.set_len(0)).map_err(write)?;
    }
    let report = RefCell::new(report);
    let report = |step: Step| report.borrow_mut()(step);
    let client = options.client(pace)?;
    let url = find(&client, options, pinned, &|problem| report(Step::Retry(problem.to_owned())))?;
    let done = Cell::new(0);
    let observe = |event: &DownloadEvent| match *event {
        DownloadEvent::Arrived(bytes) => {
            done.set(done.get() + bytes);
            report(Step::Bytes { done: done.get(), total });
        }
        DownloadEvent::Lost(bytes) => done.set(done.get() - bytes),
        DownloadEvent::Retrying(problem) => report(Step::Retry(problem.to_owned())),
    };
    let expected = Expected { name: &pinned.file, size: total, checksum: &checksum };
    Ok(shardpack_http::download(&client, &url, &expected, path, &observe)?)
}

/// Asks the index where a file is.
fn find(
    client: &Client,
    options: &DownloadOptions,
    pinned: &Pinned,
    retrying: &dyn Fn(&str),
) -> Result<String, DownloadError> {
    let page = format!("{}/{}/", options.index_url.trim_end_matches('/'), pinned.project);
    let found = client.retry(&page, retrying, &mut |_| {
        let mut answer = client.send(&Request::get(&page))?;
        if answer.status() != 200 {
            return Err(answer.refusal());
        }
        let text = answer.read(MAX_PAGE_BYTES)?;
        Ok(index::find(&String::from_utf8_lossy(&text), &answer.url, &pinned.file))
    })?;
    found.ok_or_else(|| DownloadError::Absent {
        url: without_password(&page),
        file: pinned.file.clone(),
    })
}
