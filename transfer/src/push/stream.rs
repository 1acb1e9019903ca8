//! One connection of a push to a node.

use std::{
    fs::File, io, net::Shutdown as Direction, ops::Range, os::unix::fs::FileExt, time::Instant,
};

use shardpack_manifests::digest::{chunk_range, chunk_value};

use super::{
    NodeError, PushEvent, Traffic,
    connect::{NodeWire, connect},
    send::NodePush,
    watch::{Stalled, Watch},
};
use crate::protocol::{Heard, Message, SendError, WireError};

/// An open file of the package.
struct OpenFile {
    index: u32,
    file: File,
}

/// A stream, driven by one thread.
pub(super) struct Stream<'a> {
    push: &'a NodePush<'a>,
    number: usize,
    wire: NodeWire,
    /// The file that was read last.
    open: Option<OpenFile>,
    watch: Watch,
}

impl<'a> Stream<'a> {
    /// Connects to the push's node.
    pub(super) fn open(push: &'a NodePush<'a>, number: usize) -> Result<Self, NodeError> {
        let timeouts = push.options.timeouts;
        let wire = connect(&push.target.node, timeouts)?;
        if let Ok(socket) = wire.stream().socket().try_clone() {
            let end = move || drop(socket.shutdown(Direction::Both));
            if !push.register(end) {
                return Err(WireError::Write(io::ErrorKind::Interrupted.into()).into());
            }
        }
        let package_bytes = push.package.manifest.files.iter().map(|file| file.size).sum();
        let watch = Watch::new(timeouts.progress, package_bytes, Instant::now());
        Ok(Self { push, number, wire, open: None, watch })
    }

    /// Sends a message. If the node has closed the connection, its last message is the error.
    pub(super) fn say(&mut self, message: &Message) -> Result<(), NodeError> {
        if *message == Message::Commit {
            (self.push.observer)(&PushEvent::Committing { rank: self.rank() });
        }
        let Err(error) = self.wire.send(message) else { return Ok(()) };
        if matches!(error, WireError::Write(_)) {
            loop {
                match self.hear() {
                    Ok(()) => {}
                    Err(NodeError::Wire(_)) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Err(error.into())
    }

    /// Reads a chunk and sends it.
    pub(super) fn send(
        &mut self,
        file: u32,
        chunk: u32,
        range: Range<u64>,
    ) -> Result<(), NodeError> {
        let size_bytes = range.end - range.start;
        if let Some(limit) = self.push.limit {
            limit.wait_for(size_bytes);
        }
        let bytes = self.read(file, range)?;
        self.say(&Message::Chunk { file, chunk, bytes })?;
        self.push.with(|shared| {
            shared.traffic.sent_bytes += size_bytes;
            shared.traffic.sent_chunks += 1;
        });
        let (rank, file) = (self.rank(), self.name(file));
        (self.push.observer)(&PushEvent::ChunkSent { rank, file, chunk, size_bytes });
        Ok(())
    }

    /// Takes one answer.
    pub(super) fn hear(&mut self) -> Result<(), NodeError> {
        let message = self.wire.receive()?;
        let heard = self.push.with(|shared| shared.sender.handle(self.number, message));
        let heard = heard.map_err(|error| self.explain(error))?;
        let (rank, now) = (self.rank(), Instant::now());
        if let Heard::Working { done_bytes, total_bytes } = heard {
            (self.push.observer)(&PushEvent::Working { rank, done_bytes, total_bytes });
            return self.watch.working(done_bytes, total_bytes, now).map_err(
                |Stalled { timeout, done_bytes, total_bytes }| NodeError::Stalled {
                    waited: timeout,
                    done_bytes,
                    total_bytes,
                },
            );
        }
        self.watch.answered(now);
        let event = match &heard {
            Heard::Greeted { program } if self.number == 0 => {
                PushEvent::Connected { rank, program }
            }
            // Reported above; another stream is reported when it has joined.
            Heard::Greeted { .. } | Heard::Working { .. } => return Ok(()),
            Heard::Joined => {
                self.push.with(|shared| shared.traffic.streams += 1);
                PushEvent::StreamJoined { rank, stream: self.number }
            }
            Heard::Status { .. } => self.offered(&heard),
            Heard::Stored { file, chunk, size_bytes } => PushEvent::ChunkAcknowledged {
                rank,
                file: self.name(*file),
                chunk: *chunk,
                size_bytes: *size_bytes,
            },
            Heard::Prepared => PushEvent::Prepared { rank },
        };
        (self.push.observer)(&event);
        Ok(())
    }

    /// Notes what the node says of the package.
    fn offered(&self, heard: &Heard) -> PushEvent<'static> {
        let &Heard::Status { free_bytes, reused_bytes, held_bytes, missing_chunks, missing_bytes } =
            heard
        else {
            unreachable!("the caller has looked")
        };
        self.push.with(|shared| {
            shared.traffic = Traffic {
                held_bytes,
                reused_bytes,
                missing_bytes,
                missing_chunks,
                free_bytes,
                ..shared.traffic
            };
        });
        self.push.plan_relays();
        PushEvent::Offered { rank: self.rank(), held_bytes, missing_bytes }
    }

    /// A refused chunk was damaged here or on its way; the difference matters to its owner.
    fn explain(&mut self, error: SendError) -> NodeError {
        let SendError::ChunkRefused { index, chunk, .. } = &error else { return error.into() };
        let (index, chunk) = (*index, *chunk);
        let entry = &self.push.package.manifest.files[index as usize];
        let range = chunk_range(entry.size, u64::from(chunk));
        match self.read(index, range) {
            Ok(bytes)
                if chunk_value(&bytes, entry.size, u64::from(chunk))
                    == entry.chunks[chunk as usize] =>
            {
                error.into()
            }
            Ok(_) => NodeError::SourceDamaged { file: entry.name.clone(), chunk },
            Err(unreadable) => unreadable,
        }
    }

    fn read(&mut self, file: u32, range: Range<u64>) -> Result<Vec<u8>, NodeError> {
        let path = self.push.package.path.join(self.name(file));
        let mut read = || -> io::Result<Vec<u8>> {
            let opened = match self.open.take() {
                Some(opened) if opened.index == file => opened.file,
                _ => File::open(&path)?,
            };
            let mut bytes = vec![0; (range.end - range.start) as usize];
            opened.read_exact_at(&mut bytes, range.start)?;
            self.open = Some(OpenFile { index: file, file: opened });
            Ok(bytes)
        };
        read().map_err(|source| NodeError::Read { path: path.clone(), source })
    }

    fn name(&self, file: u32) -> &'a str {
        &self.push.package.manifest.files[file as usize].name
    }

    fn rank(&self) -> u32 {
        self.push.target.rank
    }
}
