//! One file, piece by piece: each piece is a range request of its own, so that every request is
//! short, and an interrupted download goes on where it was.

use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    ops::Range,
    path::Path,
};

use super::{
    HubError, HubEvent, HubObserver, RepoFile,
    checksum::Checksum,
    follow::Follower,
    http::{Address, Client, Failed},
};

/// Bytes of one request: seconds on a fast line, minutes on a slow one.
const PIECE_BYTES: u64 = 64 << 20;

/// Times that a file with the wrong bytes is fetched anew.
const FRESH_STARTS: u32 = 1;

/// Brings `file` to `path`, going on with what is there, and checks size and checksum. On success
/// the bytes are durable.
pub(super) fn fetch(
    client: &Client,
    address: &Address,
    file: &RepoFile,
    path: &Path,
    observe: &HubObserver,
) -> Result<(), HubError> {
    let checksum = Checksum::of(file);
    let mut starts = 0;
    loop {
        let mut partial = Partial::open(path, file, &checksum, observe)?;
        while partial.size < file.size {
            client.retry(&address.url, |failures| {
                let before = partial.size;
                let result = partial.piece(client, address);
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
    follower: Follower,
    size: u64,
    /// Whether the server sends the whole file whatever is asked for.
    is_whole: bool,
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
        let follower = handle.try_clone().and_then(|copy| Follower::start(copy, hasher, size));
        let follower = follower.map_err(error)?;
        Ok(Self { file, path, checksum, observe, handle, follower, size, is_whole: false })
    }

    /// Requests the next piece and writes what arrives of it.
    fn piece(&mut self, client: &Client, address: &Address) -> Result<(), Failed> {
        if self.is_whole && self.size > 0 {
            self.restart()?;
        }
        let start = self.size;
        let end =
            if self.is_whole { self.file.size } else { (start + PIECE_BYTES).min(self.file.size) };
        let mut body = match client.stream(address, (!self.is_whole).then_some(start..end)) {
            // What is there is no beginning of what the server has.
            Err(Failed::Range) => {
                self.restart()?;
                return Err(Failed::Range);
            }
            body => body?,
        };
        check_length(&address.url, self.file, start..end, body.length)?;
        let mut is_too_long = false;
        while !is_too_long
            && body.next(|bytes| {
                is_too_long = bytes.len() as u64 > end - self.size;
                if is_too_long { Ok(()) } else { self.add(bytes) }
            })?
        {}
        if is_too_long && self.is_whole {
            let problem = format!("the server sends more than {end} bytes");
            return Err(Failed::Final(HubError::Answer { url: address.url.clone(), problem }));
        }
        if is_too_long {
            // The server does not support range requests and sends everything.
            self.is_whole = true;
            return self.restart();
        }
        if self.size < end {
            let problem = format!("the connection ended after {} of {end} bytes", self.size);
            return Err(Failed::Again { problem, after: None });
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), Failed> {
        self.handle.write_all(bytes).map_err(|source| self.failed(source))?;
        self.size += bytes.len() as u64;
        self.follower.tell(self.size);
        (self.observe)(&HubEvent::Arrived(bytes.len() as u64));
        Ok(())
    }

    fn failed(&self, source: io::Error) -> Failed {
        Failed::Final(HubError::Write { path: self.path.to_owned(), source })
    }

    fn restart(&mut self) -> Result<(), Failed> {
        let hasher = self.checksum.hasher(self.file.size);
        // The follower of what is given up ends by itself.
        let follower = self.handle.try_clone().and_then(|copy| Follower::start(copy, hasher, 0));
        self.follower = follower.map_err(|source| self.failed(source))?;
        let emptied = self.handle.set_len(0).and_then(|()| self.handle.seek(SeekFrom::Start(0)));
        emptied.map_err(|source| self.failed(source))?;
        (self.observe)(&HubEvent::Lost(self.size));
        self.size = 0;
        Ok(())
    }

    /// Makes the file durable; returns the checksum of what it holds.
    fn finish(self) -> Result<Checksum, HubError> {
        let found = self.follower.finish(self.size);
        found.map_err(|source| HubError::Write { path: self.path.to_owned(), source })
    }
}

/// A range of a remote file, in memory. After a broken connection it goes on where that was.
pub(super) fn range(
    client: &Client,
    address: &Address,
    file: &RepoFile,
    offset: u64,
    buffer: &mut [u8],
) -> Result<(), HubError> {
    let mut filled = 0;
    while filled < buffer.len() {
        client.retry(&address.url, |failures| {
            let before = filled;
            let result = part(client, address, file, offset, &mut filled, buffer);
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
    address: &Address,
    file: &RepoFile,
    offset: u64,
    filled: &mut usize,
    buffer: &mut [u8],
) -> Result<(), Failed> {
    let range = offset + *filled as u64..offset + buffer.len() as u64;
    let mut body = client.stream(address, Some(range.clone()))?;
    check_length(&address.url, file, range, body.length)?;
    let mut is_too_long = false;
    while !is_too_long
        && body.next(|bytes| {
            let room = buffer.get_mut(*filled..*filled + bytes.len());
            match room {
                Some(room) => {
                    room.copy_from_slice(bytes);
                    *filled += bytes.len();
                }
                None => is_too_long = true,
            }
            Ok(())
        })?
    {}
    if is_too_long {
        let problem = "the server does not support range requests, which --no-keep-source needs";
        let (url, problem) = (address.url.clone(), problem.to_owned());
        return Err(Failed::Final(HubError::Answer { url, problem }));
    }
    if *filled < buffer.len() {
        let problem = format!("the connection ended after {filled} of {} bytes", buffer.len());
        return Err(Failed::Again { problem, after: None });
    }
    Ok(())
}

/// hf-hub does not tell a range from a whole file, nor one range from another: the number of bytes
/// is that of what was asked for, or that of the file, of which more arrives then than was asked
/// for.
fn check_length(
    url: &str,
    file: &RepoFile,
    range: Range<u64>,
    length: Option<u64>,
) -> Result<(), Failed> {
    let Some(length) =
        length.filter(|length| ![range.end - range.start, file.size].contains(length))
    else {
        return Ok(());
    };
    let Range { start, end } = range;
    let problem = format!(
        "asked for bytes {start} to {} of {}, the server sends {length} bytes; the file has changed or the server is broken",
        end - 1,
        file.size
    );
    Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }))
}
