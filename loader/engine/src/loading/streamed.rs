//! A package that comes over connections, straight into memory: who has it answers requests for its
//! manifest and its chunks, one after the other on each connection. What the connections are, and whom
//! they are with, is not known here.
//!
//! A request is 9 bytes: its kind (0: the manifest, 1: a chunk), the file's position in the manifest and
//! the chunk's within the file, both little-endian in 4 bytes. An answer is 9 bytes: 0 and the length
//! of what follows (8 bytes, little-endian), or 1 and the length of a sentence that says why not.

use std::{
    collections::VecDeque,
    error::Error,
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

use shardpack_manifests::{
    Manifest,
    digest::chunk_range,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
};

use super::{OpenError, chunks::ChunkReader};

const MANIFEST: u8 = 0;
const CHUNK: u8 = 1;
const GIVEN: u8 = 0;
const REFUSED: u8 = 1;

/// Kind, file and chunk; or what is answered, and its length.
const HEAD_BYTES: usize = 9;

/// Longest sentence of a refusal.
const MAX_REASON_BYTES: u64 = 4 << 10;

/// How long a connection is waited for, at first and in place of one that ended.
const STREAM_TIMEOUT: Duration = Duration::from_secs(30);

/// Chunks that are asked for on a connection before the first of them has come: the way there and back
/// passes while the one before is read.
const CHUNKS_AHEAD: usize = 2;

/// A connection on which chunks come. It has deadlines of its own for reading and writing.
pub trait WeightStream: Read + Write + Send {}

impl<T: Read + Write + Send> WeightStream for T {}

/// Connections to who has a package.
pub struct WeightStreams {
    /// New ones.
    arriving: Mutex<Receiver<Box<dyn WeightStream>>>,
    /// Those that nobody uses.
    idle: Mutex<Vec<Box<dyn WeightStream>>>,
    count: usize,
}

impl WeightStreams {
    /// Of `count` connections, which arrive one by one, and others in place of those that end.
    #[must_use]
    pub fn new(arriving: Receiver<Box<dyn WeightStream>>, count: usize) -> Self {
        Self { arriving: Mutex::new(arriving), idle: Mutex::default(), count: count.max(1) }
    }

    /// Asks for the manifest and checks what it can by itself; what it must be of is the caller's to
    /// check.
    pub fn manifest(&self) -> Result<Manifest, OpenError> {
        let mut reader = StreamReader::new(self);
        let failed = |source| OpenError::ManifestStream { source };
        let bytes = loop {
            match reader.manifest() {
                Ok(bytes) => break bytes,
                Err(error) if reader.recover(&error) => {}
                Err(error) => return Err(failed(error)),
            }
        };
        let manifest = Manifest::parse(&bytes).map_err(|error| failed(io::Error::other(error)))?;
        if let Some(stream) = reader.stream.take() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
        Ok(manifest)
    }

    pub(super) fn readers(&self) -> Vec<StreamReader<'_>> {
        (0..self.count).map(|_| StreamReader::new(self)).collect()
    }

    fn next(&self) -> io::Result<Box<dyn WeightStream>> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(stream) = idle {
            return Ok(stream);
        }
        // Others wait for the lock as long as this one for a connection, and then have theirs at once.
        let arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        arriving.recv_timeout(STREAM_TIMEOUT).map_err(|error| {
            let seconds = STREAM_TIMEOUT.as_secs();
            let why = match error {
                RecvTimeoutError::Timeout => format!("no connection came within {seconds} s"),
                RecvTimeoutError::Disconnected => "no further connection is taken".to_owned(),
            };
            Lost::error(why)
        })
    }
}

/// What another connection would not help against.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Lost(String);

impl Lost {
    fn error(why: String) -> io::Error {
        io::Error::other(Self(why))
    }

    fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(<dyn Error + Send + Sync>::is::<Self>)
    }
}

/// One connection, or the next in its place.
pub(super) struct StreamReader<'a> {
    streams: &'a WeightStreams,
    stream: Option<Box<dyn WeightStream>>,
    /// Asked for on this connection, and not come to their end.
    asked: VecDeque<(usize, u64)>,
    /// Bytes of the present chunk that have not come, once its answer's head has.
    left: Option<u64>,
    /// Why nothing more can be asked on the connection.
    failed: Option<io::Error>,
}

impl<'a> StreamReader<'a> {
    fn new(streams: &'a WeightStreams) -> Self {
        Self { streams, stream: None, asked: VecDeque::new(), left: None, failed: None }
    }

    fn stream(&mut self) -> io::Result<&mut Box<dyn WeightStream>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        match &mut self.stream {
            Some(stream) => Ok(stream),
            none => Ok(none.insert(self.streams.next()?)),
        }
    }

    fn request(&mut self, kind: u8, file: u32, chunk: u32) -> io::Result<()> {
        let mut head = [0; HEAD_BYTES];
        head[0] = kind;
        head[1..5].copy_from_slice(&file.to_le_bytes());
        head[5..].copy_from_slice(&chunk.to_le_bytes());
        self.stream()?.write_all(&head)
    }

    /// The length of what follows.
    fn answer(&mut self) -> io::Result<u64> {
        let stream = self.stream()?;
        let mut head = [0; HEAD_BYTES];
        stream.read_exact(&mut head)?;
        let [status, length @ ..] = head;
        let length = u64::from_le_bytes(length);
        match status {
            GIVEN => Ok(length),
            REFUSED => {
                let mut reason = Vec::new();
                stream.take(length.min(MAX_REASON_BYTES)).read_to_end(&mut reason)?;
                Err(Lost::error(String::from_utf8_lossy(&reason).into_owned()))
            }
            other => Err(Lost::error(format!("an answer of kind {other}, which is none"))),
        }
    }

    fn manifest(&mut self) -> io::Result<Vec<u8>> {
        self.request(MANIFEST, 0, 0)?;
        let length = self.answer()?;
        if length > MAX_MANIFEST_BYTES {
            return Err(Lost::error(format!("a manifest of {length} bytes is larger than any")));
        }
        let mut bytes = Vec::new();
        self.stream()?.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 == length { Ok(bytes) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }
}

impl ChunkReader for StreamReader<'_> {
    const AHEAD: usize = CHUNKS_AHEAD;

    fn ask(&mut self, file: usize, chunk: u64) {
        self.asked.push_back((file, chunk));
        // A file has fewer chunks than that, and a package fewer files: both are in its manifest.
        if let Err(error) = self.request(CHUNK, file as u32, chunk as u32) {
            self.failed = Some(error);
        }
    }

    fn read_exact_at(&mut self, _: usize, into: &mut [u8], _: u64) -> io::Result<()> {
        let left = match self.left {
            Some(left) => left,
            None => self.answer()?,
        };
        let rest = left.checked_sub(into.len() as u64).ok_or_else(|| {
            Lost::error(format!("{left} bytes of a chunk are left where {} are due", into.len()))
        })?;
        self.stream()?.read_exact(into)?;
        self.left = (rest > 0).then_some(rest);
        if rest == 0 {
            self.asked.pop_front();
        }
        Ok(())
    }

    fn recover(&mut self, failed: &io::Error) -> bool {
        (self.stream, self.left, self.failed) = (None, None, None);
        self.asked.clear();
        !Lost::is(failed)
    }
}

impl Drop for StreamReader<'_> {
    fn drop(&mut self) {
        // One with nothing under way may serve another.
        if let Some(stream) = self.stream.take().filter(|_| self.asked.is_empty()) {
            self.streams.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
    }
}

/// Answers requests for the package in `folder` on one connection, until the other side closes it. The
/// other side checks every byte.
pub fn send_package(folder: &Path, stream: &mut dyn WeightStream) -> io::Result<()> {
    let bytes = std::fs::read(folder.join(MANIFEST_FILE))?;
    let manifest = Manifest::parse(&bytes).map_err(io::Error::other)?;
    let mut files: Vec<Option<File>> = manifest.files.iter().map(|_| None).collect();
    let mut buffer = Vec::new();
    loop {
        let mut head = [0; HEAD_BYTES];
        match stream.read_exact(&mut head) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let number = |at: usize| -> usize {
            let bytes = [head[at], head[at + 1], head[at + 2], head[at + 3]];
            u32::from_le_bytes(bytes) as usize
        };
        let (file, chunk) = (number(1), number(5));
        match head[0] {
            MANIFEST => answer(stream, GIVEN, &bytes)?,
            CHUNK => match read_chunk(folder, &manifest, &mut files, (file, chunk), &mut buffer) {
                Ok(()) => answer(stream, GIVEN, &buffer)?,
                Err(error) => answer(stream, REFUSED, error.to_string().as_bytes())?,
            },
            other => return Err(io::Error::other(format!("a request of kind {other}"))),
        }
    }
}

fn answer(stream: &mut dyn WeightStream, status: u8, bytes: &[u8]) -> io::Result<()> {
    let mut head = [0; HEAD_BYTES];
    head[0] = status;
    head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

fn read_chunk(
    folder: &Path,
    manifest: &Manifest,
    files: &mut [Option<File>],
    (file, chunk): (usize, usize),
    into: &mut Vec<u8>,
) -> io::Result<()> {
    let entry = manifest.files.get(file).filter(|entry| chunk < entry.chunks.len());
    let entry = entry.ok_or_else(|| {
        io::Error::other(format!("the package has no chunk {chunk} of a file {file}"))
    })?;
    let path = folder.join(&entry.name);
    let named = |error: io::Error| io::Error::other(format!("{}: {error}", path.display()));
    let handle = match &mut files[file] {
        Some(handle) => handle,
        none => none.insert(File::open(&path).map_err(named)?),
    };
    let range = chunk_range(entry.size, chunk as u64);
    into.resize((range.end - range.start) as usize, 0);
    handle.read_exact_at(into, range.start).map_err(named)
}

#[cfg(test)]
mod tests;
