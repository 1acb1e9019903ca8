//! Downloads: a file in pieces, each a range request of its own, so that every request is short and
//! an interrupted download resumes; checked by size and checksum before it counts.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::Path,
};

use crate::{
    Answer, Checksum, Client, Failed, HttpError, Request, address::without_password,
    follow::Follower,
};

/// Bytes of one request: seconds on a fast line, minutes on a slow one.
const PIECE_BYTES: u64 = 64 << 20;
/// Bytes of one read.
const STEP_BYTES: usize = 256 << 10;
/// Times that a file with the wrong bytes is fetched anew.
const FRESH_STARTS: u32 = 1;

/// What a file must be.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// Its bytes.
    pub size: u64,
    /// Its checksum.
    pub checksum: &'a Checksum,
}

/// What is happening, for progress displays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownloadEvent<'a> {
    /// Bytes that have arrived, or were there already.
    Arrived(u64),
    /// Bytes of a file that starts over, which no longer count.
    Lost(u64),
    /// A request failed for this reason and is repeated.
    Retrying(&'a str),
}

/// Called with every event.
type Observe<'a> = &'a dyn Fn(&DownloadEvent);

/// Brings a file to `path`, resuming what is there, and checks size and checksum. On success its
/// bytes are durable; after most errors what arrived stays for the next run.
pub fn download(
    client: &Client,
    url: &str,
    expected: &Expected,
    path: &Path,
    observe: Observe,
) -> Result<(), HttpError> {
    let mut starts = 0;
    loop {
        let mut partial = Partial::open(path, expected, observe)?;
        while partial.size < expected.size {
            let retrying = |problem: &str| observe(&DownloadEvent::Retrying(problem));
            client.retry(url, &retrying, &mut |failures| {
                let before = partial.size;
                let result = partial.piece(client, url);
                if partial.size > before {
                    *failures = 0;
                }
                result
            })?;
        }
        let found = partial.finish()?;
        if found == *expected.checksum {
            return Ok(());
        }
        // None of it is of use: which byte is wrong cannot be known.
        let emptied = File::options().write(true).open(path).and_then(|file| file.set_len(0));
        emptied.map_err(|source| HttpError::Write { path: path.to_owned(), source })?;
        observe(&DownloadEvent::Lost(expected.size));
        if starts == FRESH_STARTS {
            return Err(HttpError::Content {
                file: expected.name.to_owned(),
                size: expected.size,
                algorithm: found.algorithm(),
                expected: expected.checksum.text(),
                found: found.text(),
            });
        }
        starts += 1;
    }
}

/// A file that is not complete yet.
struct Partial<'a> {
    expected: &'a Expected<'a>,
    path: &'a Path,
    observe: Observe<'a>,
    handle: File,
    follower: Follower,
    size: u64,
}

impl<'a> Partial<'a> {
    /// Takes up what an earlier run has left.
    fn open(
        path: &'a Path,
        expected: &'a Expected<'a>,
        observe: Observe<'a>,
    ) -> Result<Self, HttpError> {
        let error = |source| HttpError::Write { path: path.to_owned(), source };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut handle = options.open(path).map_err(error)?;
        let mut hasher = expected.checksum.hasher(expected.size);
        if handle.metadata().map_err(error)?.len() > expected.size {
            handle.set_len(0).map_err(error)?;
        }
        let size = hasher.read_from(&mut handle).map_err(error)?;
        observe(&DownloadEvent::Arrived(size));
        let follower = handle.try_clone().and_then(|copy| Follower::start(copy, hasher, size));
        let follower = follower.map_err(error)?;
        Ok(Self { expected, path, observe, handle, follower, size })
    }

    /// Requests the next piece and writes what arrives of it. A server without ranges sends the
    /// whole file, which then starts over.
    fn piece(&mut self, client: &Client, url: &str) -> Result<(), Failed> {
        let total = self.expected.size;
        let range = self.size..(self.size + PIECE_BYTES).min(total);
        let mut answer = client.send(&Request::range(url, &range))?;
        let end = match answer.status() {
            206 => {
                check_range(&answer, &range, total)?;
                range.end
            }
            200 => {
                let length = answer.header("content-length");
                if !length.is_empty() && length != total.to_string() {
                    let problem = format!("{length} bytes, expected {total}");
                    return Err(wrong_length(&answer, problem));
                }
                self.restart()?;
                total
            }
            // What is there is no beginning of what the server has.
            416 => {
                self.restart()?;
                return Err(Failed::again("the server does not have the requested range"));
            }
            _ => return Err(answer.refusal()),
        };
        let shown = without_password(&answer.url);
        let mut body = answer.body();
        let mut buffer = vec![0; STEP_BYTES];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failed::again(error.to_string())),
            };
            if self.size + count as u64 > end {
                let problem = format!("the server sends more than {end} bytes");
                return Err(Failed::Final(HttpError::Length { url: shown, problem }));
            }
            self.handle.write_all(&buffer[..count]).map_err(|source| self.failed(source))?;
            self.size += count as u64;
            self.follower.tell(self.size);
            (self.observe)(&DownloadEvent::Arrived(count as u64));
            if client.is_cancelled() {
                return Err(Failed::Final(HttpError::Cancelled));
            }
        }
        if self.size < end {
            let problem = format!("the connection ended after {} of {end} bytes", self.size);
            return Err(Failed::again(problem));
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Failed {
        Failed::Final(HttpError::Write { path: self.path.to_owned(), source })
    }

    fn restart(&mut self) -> Result<(), Failed> {
        if self.size == 0 {
            return Ok(());
        }
        let hasher = self.expected.checksum.hasher(self.expected.size);
        // The follower of what is given up ends by itself.
        let follower = self.handle.try_clone().and_then(|copy| Follower::start(copy, hasher, 0));
        self.follower = follower.map_err(|source| self.failed(source))?;
        let emptied = self.handle.set_len(0).and_then(|()| self.handle.seek(SeekFrom::Start(0)));
        emptied.map_err(|source| self.failed(source))?;
        (self.observe)(&DownloadEvent::Lost(self.size));
        self.size = 0;
        Ok(())
    }

    /// Makes the file durable; returns the checksum of what it holds.
    fn finish(self) -> Result<Checksum, HttpError> {
        let found = self.follower.finish(self.size);
        found.map_err(|source| HttpError::Write { path: self.path.to_owned(), source })
    }
}

/// Fills `buffer` with a range of a remote file of `total` bytes. After a broken connection it
/// continues where that was.
pub fn read_range(
    client: &Client,
    url: &str,
    total: u64,
    offset: u64,
    buffer: &mut [u8],
    retrying: &dyn Fn(&str),
) -> Result<(), HttpError> {
    let mut filled = 0;
    while filled < buffer.len() {
        client.retry(url, retrying, &mut |failures| {
            let before = filled;
            let range = offset + filled as u64..offset + buffer.len() as u64;
            let result = part(client, url, total, range, &mut filled, buffer);
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
    total: u64,
    range: Range<u64>,
    filled: &mut usize,
    buffer: &mut [u8],
) -> Result<(), Failed> {
    let mut answer = client.send(&Request::range(url, &range))?;
    match answer.status() {
        206 => check_range(&answer, &range, total)?,
        // The whole file is the range.
        200 if range == (0..total) => {}
        200 => return Err(Failed::Final(HttpError::NoRanges { url: without_password(url) })),
        _ => return Err(answer.refusal()),
    }
    let mut body = answer.body();
    while *filled < buffer.len() {
        match body.read(&mut buffer[*filled..]) {
            Ok(0) => {
                let problem =
                    format!("the connection ended after {filled} of {} bytes", buffer.len());
                return Err(Failed::again(problem));
            }
            Ok(count) => *filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failed::again(error.to_string())),
        }
    }
    Ok(())
}

/// Compares `Content-Range` with what was asked for.
fn check_range(answer: &Answer, asked: &Range<u64>, total: u64) -> Result<(), Failed> {
    let Range { start, end } = asked;
    let found = answer.header("content-range");
    let range = format!("bytes {start}-{}/", end - 1);
    let size = found.strip_prefix(&range);
    if size.is_some_and(|size| size == "*" || size == total.to_string()) {
        return Ok(());
    }
    let problem = format!(
        "asked for bytes {start} to {} of {total}, the server sends {found:?}; the file has changed or the server is broken",
        end - 1
    );
    Err(wrong_length(answer, problem))
}

fn wrong_length(answer: &Answer, problem: String) -> Failed {
    Failed::Final(HttpError::Length { url: without_password(&answer.url), problem })
}
