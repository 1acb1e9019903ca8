//! The first phase at one node: until its package is prepared.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt, time::Instant};

use shardpack_manifests::{
    digest::{chunk_range, chunk_value},
    transfer::{Heard, Intent, Message, Offer, Outgoing, SendError, Sender, WireError},
};

use super::{
    NodeError, NodeProgress, NodeReport, PushEvent, PushMode, PushObserver, PushOptions, Target,
    Traffic,
    connect::{NodeWire, connect},
    open::{Package, Set},
    watch::{Stalled, Watch},
};

/// Pushes one package, or asks what a push would send.
pub(super) fn send(
    set: &Set,
    package: &Package,
    target: &Target,
    options: &PushOptions,
    observer: PushObserver,
) -> NodeReport {
    let start = Instant::now();
    let package_bytes = package.manifest.files.iter().map(|file| file.size).sum();
    let mut push = NodePush {
        package,
        rank: target.rank,
        observer,
        traffic: Traffic { package_bytes, ..Traffic::default() },
        open: None,
        watch: Watch::new(options.timeouts.progress, package_bytes, start),
    };
    let error = push.run(set, target, options).err();
    if let Some(error) = &error {
        observer(&PushEvent::Failed { rank: target.rank, error });
    }
    let progress = match (&error, options.mode) {
        (Some(_), _) => NodeProgress::NotPrepared,
        (None, PushMode::DryRun) => NodeProgress::Asked,
        (None, PushMode::Send(_)) => NodeProgress::Prepared,
    };
    let traffic = Traffic { seconds: start.elapsed().as_secs_f64(), ..push.traffic };
    NodeReport { target: target.clone(), package: package.key, progress, traffic, error }
}

struct NodePush<'a> {
    package: &'a Package,
    rank: u32,
    observer: PushObserver<'a>,
    traffic: Traffic,
    /// The file that was read last, and its index.
    open: Option<(u32, File)>,
    watch: Watch,
}

impl NodePush<'_> {
    fn run(&mut self, set: &Set, target: &Target, options: &PushOptions) -> Result<(), NodeError> {
        let offer = Offer {
            intent: match options.mode {
                PushMode::Send(_) => Intent::Send,
                PushMode::DryRun => Intent::Ask,
            },
            manifest: self.package.manifest_bytes.clone(),
            set: set.bytes.clone(),
            signature: self.package.signature.clone(),
        };
        let mut wire = connect(&target.node, options.timeouts)?;
        let mut sender =
            Sender::new(self.package.manifest.clone(), offer, options.window_chunks.max(1));
        loop {
            match sender.next() {
                Outgoing::Message(message) => {
                    if message == Message::Commit {
                        (self.observer)(&PushEvent::Committing { rank: self.rank });
                    }
                    self.transmit(&mut wire, &mut sender, &message)?;
                }
                Outgoing::Chunk { file, chunk, range } => {
                    let size_bytes = range.end - range.start;
                    let bytes = self.read(file, range)?;
                    let message = Message::Chunk { file, chunk, bytes };
                    self.transmit(&mut wire, &mut sender, &message)?;
                    self.traffic.sent_bytes += size_bytes;
                    self.traffic.sent_chunks += 1;
                    let (rank, file) = (self.rank, self.name(file));
                    (self.observer)(&PushEvent::ChunkSent { rank, file, chunk, size_bytes });
                }
                Outgoing::Wait => self.hear(&mut wire, &mut sender)?,
                Outgoing::Done => return Ok(()),
            }
        }
    }

    /// Sends a message. When the node has hung up, its last word says why better than the socket.
    fn transmit(
        &mut self,
        wire: &mut NodeWire,
        sender: &mut Sender,
        message: &Message,
    ) -> Result<(), NodeError> {
        let Err(error) = wire.send(message) else { return Ok(()) };
        if matches!(error, WireError::Write(_)) {
            loop {
                match self.hear(wire, sender) {
                    Ok(()) => {}
                    Err(NodeError::Wire(_)) => break,
                    Err(last_word) => return Err(last_word),
                }
            }
        }
        Err(error.into())
    }

    /// Takes one answer.
    fn hear(&mut self, wire: &mut NodeWire, sender: &mut Sender) -> Result<(), NodeError> {
        let heard = sender.handle(wire.receive()?).map_err(|error| self.explain(error))?;
        let (rank, now) = (self.rank, Instant::now());
        if let Heard::Working { done_bytes, total_bytes } = heard {
            (self.observer)(&PushEvent::Working { rank, done_bytes, total_bytes });
            return self.watch.working(done_bytes, total_bytes, now).map_err(
                |Stalled { patience, done_bytes, total_bytes }| NodeError::Stalled {
                    waited: patience,
                    done_bytes,
                    total_bytes,
                },
            );
        }
        self.watch.answered(now);
        match heard {
            Heard::Greeted { program } => {
                (self.observer)(&PushEvent::Connected { rank, program: &program });
            }
            Heard::Status {
                free_bytes,
                reused_bytes,
                held_bytes,
                missing_chunks,
                missing_bytes,
            } => {
                self.traffic = Traffic {
                    held_bytes,
                    reused_bytes,
                    missing_bytes,
                    missing_chunks,
                    free_bytes,
                    ..self.traffic
                };
                (self.observer)(&PushEvent::Offered { rank, held_bytes, missing_bytes });
            }
            Heard::Stored { file, chunk, size_bytes } => {
                let file = self.name(file);
                (self.observer)(&PushEvent::ChunkAcknowledged { rank, file, chunk, size_bytes });
            }
            // Told above.
            Heard::Working { .. } => {}
            Heard::Prepared => (self.observer)(&PushEvent::Prepared { rank }),
        }
        Ok(())
    }

    /// A refused chunk was damaged here or on its way; the difference matters to its owner.
    fn explain(&mut self, error: SendError) -> NodeError {
        let SendError::ChunkRefused { index, chunk, .. } = &error else { return error.into() };
        let (index, chunk) = (*index, *chunk);
        let entry = &self.package.manifest.files[index as usize];
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
        let path = self.package.path.join(self.name(file));
        let mut read = || -> io::Result<Vec<u8>> {
            let opened = match self.open.take() {
                Some((index, opened)) if index == file => opened,
                _ => File::open(&path)?,
            };
            let mut bytes = vec![0; (range.end - range.start) as usize];
            opened.read_exact_at(&mut bytes, range.start)?;
            self.open = Some((file, opened));
            Ok(bytes)
        };
        read().map_err(|source| NodeError::Read { path: path.clone(), source })
    }

    fn name(&self, file: u32) -> &str {
        &self.package.manifest.files[file as usize].name
    }
}
