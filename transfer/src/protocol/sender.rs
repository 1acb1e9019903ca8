//! The controller's side of a push to one node: what to send next on which stream, and what the
//! answers mean.
//!
//! A package goes over one stream or several. Stream 0 offers it; the others join once chunks are
//! sent, take chunks from the same list, and may be lost: their chunks then go to those that are
//! left, as those of stream 0 do. Whichever finds the last chunk answered commits.

mod relayed;

use std::{collections::BTreeSet, mem, ops::Range};

use shardpack_manifests::{digest::chunk_range, manifest::Manifest};

use super::{
    failure::Failure,
    held::ChunkMap,
    message::{Intent, Join, Message, Offer},
    version::{Greeting, NoCommonVersion},
};

/// What the driver of a [`Sender`] does next on a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// Send this.
    Message(Message),
    /// Read these bytes of the file and send them as this chunk.
    Chunk {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
        /// Bytes within the file.
        range: Range<u64>,
    },
    /// Nothing to send until the next message comes in.
    Wait,
    /// Nothing to send or receive until another stream is lost or all is done: ask again
    /// when anything has happened on one.
    Rest,
    /// All has been said: the package is prepared, or the question was answered, or another stream
    /// does the rest.
    Done,
}

/// What an answer means.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// The node speaks this protocol.
    Greeted {
        /// Its program.
        program: String,
    },
    /// The node takes chunks on this stream too.
    Joined,
    /// The node can take the package.
    Status {
        /// Free bytes of its disk.
        free_bytes: u64,
        /// Bytes taken from its other packages.
        reused_bytes: u64,
        /// Bytes that it holds.
        held_bytes: u64,
        /// Chunks that it lacks.
        missing_chunks: u64,
        /// Bytes that it lacks.
        missing_bytes: u64,
    },
    /// A chunk has been verified and written.
    Stored {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
        /// Bytes of the chunk.
        size_bytes: u64,
    },
    /// The node is still working.
    Working {
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// The package is verified and on the node's disk.
    Prepared,
}

/// Why a push to a node, or a stream of it, ended early.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The node speaks other versions.
    #[error(transparent)]
    Version(#[from] NoCommonVersion),
    /// A chunk did not arrive as it was packaged.
    #[error("{file}: chunk {chunk} was refused: {reason}")]
    ChunkRefused {
        /// Name of the file.
        file: String,
        /// Index of the file.
        index: u32,
        /// Index of the chunk.
        chunk: u32,
        /// The node's reason.
        reason: String,
    },
    /// The node reported a failure.
    #[error("the node refused: {0}")]
    Refused(Failure),
    /// The node refused another stream, or its version has one stream only.
    #[error("the node refused another stream: {0}")]
    NotJoined(Failure),
    /// A message that does not fit here.
    #[error("the node sent message type {kind} {when}")]
    Unexpected {
        /// Its type.
        kind: u8,
        /// What was under way.
        when: &'static str,
    },
    /// A bitmap that does not fit the package.
    #[error("the node's answer does not fit the package: {problem}")]
    Status {
        /// What is wrong.
        problem: &'static str,
    },
}

/// The controller's state machine for one node.
pub struct Sender {
    manifest: Manifest,
    window_chunks: usize,
    /// What further streams say.
    join: Join,
    /// Chunks that are on no stream, last first.
    rest: Vec<ChunkIndex>,
    /// Chunks that the node fetches elsewhere.
    withheld: Vec<ChunkIndex>,
    streams: Vec<Stream>,
    committed: bool,
    prepared: bool,
}

/// Index of a file and of a chunk within it.
type ChunkIndex = (u32, u32);

/// One connection.
struct Stream {
    state: State,
    /// Chunks not yet answered.
    in_flight: BTreeSet<ChunkIndex>,
}

enum State {
    Start(Opening),
    Greeting(Opening),
    Greeted(Opening),
    Offered(Intent),
    Joining,
    Sending,
    Committed,
    Done,
}

/// How a stream begins.
enum Opening {
    Offer(Box<Offer>),
    Join,
}

impl Sender {
    /// A push of the package of `manifest`, whose bytes are in `offer`, on stream 0. At most
    /// `window_chunks` chunks of a stream are sent ahead of their answers.
    ///
    /// # Panics
    /// When the window is empty.
    #[must_use]
    pub fn new(manifest: Manifest, offer: Offer, window_chunks: usize) -> Self {
        assert!(window_chunks > 0, "an empty window sends nothing");
        let join = Join::of(&manifest, &offer.manifest);
        let first = Stream::new(Opening::Offer(Box::new(offer)));
        Self {
            manifest,
            window_chunks,
            join,
            rest: Vec::new(),
            withheld: Vec::new(),
            streams: vec![first],
            committed: false,
            prepared: false,
        }
    }

    /// Begins a further stream, and returns its number. Sensible while chunks are sent.
    pub fn join(&mut self) -> usize {
        self.streams.push(Stream::new(Opening::Join));
        self.streams.len() - 1
    }

    /// A stream has ended too early: what it had in flight goes to the others. Whether the push
    /// goes on; it does not where no stream is left that could, or where the node was asked on this
    /// one to do something that is said once.
    pub fn lose(&mut self, stream: usize) -> bool {
        let Stream { state, in_flight } = &mut self.streams[stream];
        let state = mem::replace(state, State::Done);
        // They come off the list from its end.
        self.rest.extend(mem::take(in_flight).into_iter().rev());
        let said_once = match state {
            State::Sending | State::Joining | State::Done => false,
            State::Offered(_) | State::Committed => true,
            opening => !opening.is_joining(),
        };
        // One that is joining may have been taken already.
        let goes_on = |it: &Stream| {
            matches!(it.state, State::Sending | State::Committed) || it.state.is_joining()
        };
        self.prepared || !said_once && self.streams.iter().any(goes_on)
    }

    /// What to do now on a stream. Call it again after each step until it says [`Outgoing::Wait`]
    /// or [`Outgoing::Rest`].
    pub fn next(&mut self, stream: usize) -> Outgoing {
        let this = &mut self.streams[stream];
        match mem::replace(&mut this.state, State::Done) {
            State::Start(opening) => {
                this.state = State::Greeting(opening);
                Outgoing::Message(Message::hello())
            }
            State::Greeted(Opening::Offer(offer)) => {
                this.state = State::Offered(offer.intent);
                Outgoing::Message(Message::Offer(*offer))
            }
            State::Greeted(Opening::Join) => {
                this.state = State::Joining;
                Outgoing::Message(Message::Join(self.join))
            }
            State::Sending => self.next_chunk(stream),
            State::Done => Outgoing::Done,
            waiting => {
                this.state = waiting;
                Outgoing::Wait
            }
        }
    }

    /// What to do on a stream that takes chunks; its state is to be set.
    fn next_chunk(&mut self, stream: usize) -> Outgoing {
        let all_answered = self.streams.iter().all(|it| it.in_flight.is_empty());
        let this = &mut self.streams[stream];
        if self.rest.is_empty() && self.withheld.is_empty() && all_answered {
            if mem::replace(&mut self.committed, true) {
                return Outgoing::Done;
            }
            this.state = State::Committed;
            return Outgoing::Message(Message::Commit);
        }
        this.state = State::Sending;
        let has_room = this.in_flight.len() < self.window_chunks;
        match if has_room { self.rest.pop() } else { None } {
            Some((file, chunk)) => {
                this.in_flight.insert((file, chunk));
                let size_bytes = self.manifest.files[file as usize].size;
                let range = chunk_range(size_bytes, u64::from(chunk));
                Outgoing::Chunk { file, chunk, range }
            }
            None if this.in_flight.is_empty() => Outgoing::Rest,
            None => Outgoing::Wait,
        }
    }

    /// Takes an answer that came on a stream. An error ends the push, or what its driver makes of
    /// it; what the node has stored stays stored.
    pub fn handle(&mut self, stream: usize, message: Message) -> Result<Heard, SendError> {
        let this = &mut self.streams[stream];
        match (mem::replace(&mut this.state, State::Done), message) {
            (state, Message::Failed(failure)) if state.is_joining() => {
                Err(SendError::NotJoined(failure))
            }
            (_, Message::Failed(failure)) => Err(SendError::Refused(failure)),
            (State::Greeting(opening), Message::Hello { protocol, program }) => {
                let Greeting { program, .. } = Greeting::of_hello(protocol, &program)?;
                this.state = State::Greeted(opening);
                Ok(Heard::Greeted { program })
            }
            (State::Joining, Message::Joined) => {
                this.state = State::Sending;
                Ok(Heard::Joined)
            }
            (
                state @ (State::Offered(_) | State::Committed),
                Message::Working { done_bytes, total_bytes },
            ) => {
                this.state = state;
                Ok(Heard::Working { done_bytes, total_bytes })
            }
            (State::Offered(intent), Message::Status { free_bytes, reused_bytes, held }) => {
                let held = ChunkMap::parse(&self.manifest, &held)
                    .map_err(|problem| SendError::Status { problem })?;
                let mut rest: Vec<ChunkIndex> =
                    held.missing().map(|(file, chunk, _)| (file, chunk)).collect();
                rest.reverse();
                let heard = Heard::Status {
                    free_bytes,
                    reused_bytes,
                    held_bytes: held.held_bytes(),
                    missing_chunks: rest.len() as u64,
                    missing_bytes: held.missing_bytes(),
                };
                if intent == Intent::Send {
                    self.rest = rest;
                    this.state = State::Sending;
                }
                Ok(heard)
            }
            (State::Sending, message) => self.handle_chunk(stream, message),
            (State::Committed, Message::Prepared) => {
                self.prepared = true;
                Ok(Heard::Prepared)
            }
            (state, message) => {
                Err(SendError::Unexpected { kind: message.kind(), when: state.name() })
            }
        }
    }

    fn handle_chunk(&mut self, stream: usize, message: Message) -> Result<Heard, SendError> {
        let (kind, this) = (message.kind(), &mut self.streams[stream]);
        match message {
            Message::ChunkStored { file, chunk } if this.in_flight.remove(&(file, chunk)) => {
                this.state = State::Sending;
                let range = chunk_range(self.manifest.files[file as usize].size, u64::from(chunk));
                Ok(Heard::Stored { file, chunk, size_bytes: range.end - range.start })
            }
            Message::ChunkRefused { file, chunk, reason }
                if this.in_flight.contains(&(file, chunk)) =>
            {
                let name = self.manifest.files[file as usize].name.clone();
                Err(SendError::ChunkRefused { file: name, index: file, chunk, reason })
            }
            _ => Err(SendError::Unexpected { kind, when: "while chunks were sent" }),
        }
    }
}

impl Stream {
    fn new(opening: Opening) -> Self {
        Self { state: State::Start(opening), in_flight: BTreeSet::new() }
    }
}

impl State {
    /// Whether the stream is a further one that the node has not yet taken.
    fn is_joining(&self) -> bool {
        let opening = match self {
            Self::Start(opening) | Self::Greeting(opening) | Self::Greeted(opening) => opening,
            other => return matches!(other, Self::Joining),
        };
        matches!(opening, Opening::Join)
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Start(_) => "before the greeting",
            Self::Greeting(_) | Self::Greeted(_) => "during the greeting",
            Self::Offered(_) => "in answer to the offer",
            Self::Joining => "in answer to another stream",
            Self::Sending => "while chunks were sent",
            Self::Committed => "in answer to the commit",
            Self::Done => "after the end",
        }
    }
}
