//! One file, piece by piece: each piece is a range request of its own, so that every request is
//! short, and an interrupted download goes on where it was.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
};

use ureq::{
    Body,
    http::{Response, header},
};

use super::{
    HubError, HubEvent, HubObserver, RepoFile,
    checksum::{Checksum, Hasher},
    http::{Client, Failed},
};

/// Bytes of one request: seconds on a fast line, minutes on a slow one.
const PIECE_BYTES: u64 = 64 << 20;

/// Bytes of one read.
const STEP_BYTES: usize = 1 << 20;

/// Times that a file with the wrong bytes is fetched anew.
const FRESH_STARTS: u32 = 1;

/// Brings `file` to `path`, going on with what is there, and checks size and checksum. On success
/// the bytes are durable.
pub(super) fn fetch(
    client: &Client,
    url: &str,
    file: &RepoFile,
    path: &Path,
    observe: &HubObserver,
) -> Result<(), HubError> {
    let checksum = Checksum::of(file);
    let mut starts = 0;
    loop {
        let mut partial = Partial::open(path, file, &checksum, observe)?;
        while partial.size < file.size {
            client.retry(url, |failures| {
                let before = partial.size;
                let result = partial.piece(client, url);
                if partial.size > before {
                    *failures = 0;
                }
                result
            })?;
        }
        let found = partial.finish()?;
        if found == checksum {
            return Ok(());
        }
        // Nothing of it is of use: which byte is wrong cannot be told.
        fs::remove_file(path)
            .map_err(|source| HubError::Write { path: path.to_owned(), source })?;
        observe(&HubEvent::Lost(file.size));
        if starts == FRESH_STARTS {
            return Err(HubError::Content {
                file: file.path.clone(),
                size: file.size,
                algorithm: checksum.algorithm(),
                expected: checksum.text(),
                found: found.text(),
            });
        }
        starts += 1;
    }
}

/// A file that is not complete yet.
struct Partial<'a> {
    file: &'a RepoFile,
    path: &'a Path,
    checksum: &'a Checksum,
    observe: &'a HubObserver,
    handle: File,
    hasher: Hasher,
    size: u64,
}

impl<'a> Partial<'a> {
    /// Takes up what an earlier run has left.
    fn open(
        path: &'a Path,
        file: &'a RepoFile,
        checksum: &'a Checksum,
        observe: &'a HubObserver,
    ) -> Result<Self, HubError> {
        let error = |source| HubError::Write { path: path.to_owned(), source };
        let options =
            || File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut handle = options().map_err(error)?;
        let mut hasher = checksum.hasher(file.size);
        if handle.metadata().map_err(error)?.len() > file.size {
            handle.set_len(0).map_err(error)?;
        }
        let size = hasher.read_from(&mut handle).map_err(error)?;
        observe(&HubEvent::Arrived(size));
        Ok(Self { file, path, checksum, observe, handle, hasher, size })
    }

    /// Requests the next piece and writes what arrives of it.
    fn piece(&mut self, client: &Client, url: &str) -> Result<(), Failed> {
        let end = (self.size + PIECE_BYTES).min(self.file.size);
        let mut response = client.send(url, Some((self.size, end - 1)), None)?;
        let end = match response.status().as_u16() {
            206 => {
                self.check_range(url, &response, end)?;
                end
            }
            // The server does not support range requests and sends everything.
            200 => {
                self.check_length(url, &response)?;
                self.restart()?;
                self.file.size
            }
            // What is there is no beginning of what the server has.
            416 => {
                self.restart()?;
                let problem = "the server does not have the requested range".to_owned();
                return Err(Failed::Again { problem, after: None });
            }
            _ => return Err(client.refusal(url, &mut response, None)),
        };
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; STEP_BYTES];
        while self.size < end {
            let wanted = (end - self.size).min(STEP_BYTES as u64) as usize;
            match body.read(&mut buffer[..wanted]) {
                Ok(0) => {
                    let problem =
                        format!("the connection ended after {} of {end} bytes", self.size);
                    return Err(Failed::Again { problem, after: None });
                }
                Ok(count) => self.add(&buffer[..count])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Failed::Again { problem: error.to_string(), after: None });
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), Failed> {
        self.handle.write_all(bytes).map_err(|source| self.failed(source))?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        (self.observe)(&HubEvent::Arrived(bytes.len() as u64));
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Failed {
        Failed::Final(HubError::Write { path: self.path.to_owned(), source })
    }

    fn restart(&mut self) -> Result<(), Failed> {
        let emptied = self.handle.set_len(0).and_then(|()| self.handle.seek(SeekFrom::Start(0)));
        emptied.map_err(|source| self.failed(source))?;
        (self.observe)(&HubEvent::Lost(self.size));
        self.hasher = self.checksum.hasher(self.file.size);
        self.size = 0;
        Ok(())
    }

    /// A range other than the one that was asked for would put bytes in the wrong place.
    fn check_range(&self, url: &str, response: &Response<Body>, end: u64) -> Result<(), Failed> {
        let range = response.headers().get(header::CONTENT_RANGE);
        let range = range.and_then(|range| range.to_str().ok()).unwrap_or_default();
        let total = self.file.size;
        if range == format!("bytes {}-{}/{total}", self.size, end - 1) {
            return Ok(());
        }
        let problem = format!(
            "asked for bytes {} to {} of {total}, the server sends {range:?}; the file has changed or the server is broken",
            self.size,
            end - 1
        );
        Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }))
    }

    fn check_length(&self, url: &str, response: &Response<Body>) -> Result<(), Failed> {
        let length = response.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_none_or(|length| length == self.file.size) {
            return Ok(());
        }
        let problem = format!(
            "the hub states {} bytes, the server sends {}",
            self.file.size,
            length.unwrap_or(0)
        );
        Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }))
    }

    /// Makes the file durable; returns the checksum of what it holds.
    fn finish(self) -> Result<Checksum, HubError> {
        let synced = self.handle.sync_all();
        synced.map_err(|source| HubError::Write { path: self.path.to_owned(), source })?;
        Ok(self.hasher.finish())
    }
}

/// A range of a remote file, in memory. After a broken connection it goes on where that was.
pub(super) fn range(
    client: &Client,
    url: &str,
    file: &RepoFile,
    offset: u64,
    buffer: &mut [u8],
) -> Result<(), HubError> {
    let mut filled = 0;
    while filled < buffer.len() {
        client.retry(url, |failures| {
            let before = filled;
            let result = part(client, url, file, offset, &mut filled, buffer);
            if filled > before {
                *failures = 0;
            }
            result
        })?;
    }
    Ok(())
}

/// What arrives of the rest of a range.
fn part(
    client: &Client,
    url: &str,
    file: &RepoFile,
    offset: u64,
    filled: &mut usize,
    buffer: &mut [u8],
) -> Result<(), Failed> {
    let wrong = |problem: String| Failed::Final(HubError::Answer { url: url.to_owned(), problem });
    let (first, last) = (offset + *filled as u64, offset + buffer.len() as u64 - 1);
    let mut response = client.send(url, Some((first, last)), None)?;
    match response.status().as_u16() {
        206 => {
            let range = response.headers().get(header::CONTENT_RANGE);
            let range = range.and_then(|range| range.to_str().ok()).unwrap_or_default();
            if range != format!("bytes {first}-{last}/{}", file.size) {
                return Err(wrong(format!(
                    "the server sends the range {range:?} of {}",
                    file.size
                )));
            }
        }
        200 => {
            let problem =
                "the server does not support range requests, which --no-keep-source needs";
            return Err(wrong(problem.to_owned()));
        }
        _ => return Err(client.refusal(url, &mut response, None)),
    }
    let mut body = response.body_mut().as_reader();
    while *filled < buffer.len() {
        let end = (*filled + STEP_BYTES).min(buffer.len());
        match body.read(&mut buffer[*filled..end]) {
            Ok(0) => {
                let problem =
                    format!("the connection ended after {filled} of {} bytes", buffer.len());
                return Err(Failed::Again { problem, after: None });
            }
            Ok(count) => *filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failed::Again { problem: error.to_string(), after: None }),
        }
    }
    Ok(())
}
