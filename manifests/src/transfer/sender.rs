//! The controller's side of a push to one node: what to send next, and what the answers mean.

use std::{collections::BTreeSet, mem, ops::Range};

use super::{
    failure::Failure,
    held::ChunkMap,
    message::{Intent, Message, Offer, PROTOCOL},
};
use crate::{digest::chunk_range, manifest::Manifest};

/// What the driver of a [`Sender`] does next.
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
    /// All has been said: the package is prepared, or the question was answered.
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
    /// The node is at it.
    Working {
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// The package is verified and on the node's disk.
    Prepared,
}

/// Why a push to a node ended early.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The node speaks another version.
    #[error("the node runs {program} with protocol {found}, this program speaks {PROTOCOL}")]
    Version {
        /// Its program.
        program: String,
        /// Its protocol.
        found: u16,
    },
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
    state: State,
}

enum State {
    Start(Box<Offer>),
    Greeting(Box<Offer>),
    Offering(Box<Offer>),
    Offered(Intent),
    /// Chunks still to send, last first, and those not yet answered.
    Sending {
        rest: Vec<(u32, u32)>,
        in_flight: BTreeSet<(u32, u32)>,
    },
    Committed,
    Done,
}

impl Sender {
    /// A push of the package of `manifest`, whose bytes are in `offer`. At most `window_chunks`
    /// chunks are sent ahead of their answers.
    ///
    /// # Panics
    /// When the window is empty.
    #[must_use]
    pub fn new(manifest: Manifest, offer: Offer, window_chunks: usize) -> Self {
        assert!(window_chunks > 0, "an empty window sends nothing");
        Self { manifest, window_chunks, state: State::Start(Box::new(offer)) }
    }

    /// What to do now. Call it again after each step until it says [`Outgoing::Wait`].
    #[expect(clippy::should_implement_trait, reason = "waiting is not the end of an iteration")]
    pub fn next(&mut self) -> Outgoing {
        match mem::replace(&mut self.state, State::Done) {
            State::Start(offer) => {
                self.state = State::Greeting(offer);
                Outgoing::Message(Message::hello())
            }
            State::Offering(offer) => {
                self.state = State::Offered(offer.intent);
                Outgoing::Message(Message::Offer(*offer))
            }
            State::Sending { rest, in_flight } if rest.is_empty() && in_flight.is_empty() => {
                self.state = State::Committed;
                Outgoing::Message(Message::Commit)
            }
            State::Sending { mut rest, mut in_flight } => {
                let next = if in_flight.len() < self.window_chunks { rest.pop() } else { None };
                in_flight.extend(next);
                self.state = State::Sending { rest, in_flight };
                next.map_or(Outgoing::Wait, |(file, chunk)| {
                    let size_bytes = self.manifest.files[file as usize].size;
                    let range = chunk_range(size_bytes, u64::from(chunk));
                    Outgoing::Chunk { file, chunk, range }
                })
            }
            State::Done => Outgoing::Done,
            waiting => {
                self.state = waiting;
                Outgoing::Wait
            }
        }
    }

    /// Takes an answer. An error ends the push; what the node has stored stays stored.
    pub fn handle(&mut self, message: Message) -> Result<Heard, SendError> {
        match (mem::replace(&mut self.state, State::Done), message) {
            (_, Message::Failed(failure)) => Err(SendError::Refused(failure)),
            (State::Greeting(offer), Message::Hello { protocol, program }) => {
                if protocol != PROTOCOL {
                    return Err(SendError::Version { program, found: protocol });
                }
                self.state = State::Offering(offer);
                Ok(Heard::Greeted { program })
            }
            (
                state @ (State::Offered(_) | State::Committed),
                Message::Working { done_bytes, total_bytes },
            ) => {
                self.state = state;
                Ok(Heard::Working { done_bytes, total_bytes })
            }
            (State::Offered(intent), Message::Status { free_bytes, reused_bytes, held }) => {
                let held = ChunkMap::parse(&self.manifest, &held)
                    .map_err(|problem| SendError::Status { problem })?;
                let mut rest: Vec<(u32, u32)> =
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
                    self.state = State::Sending { rest, in_flight: BTreeSet::new() };
                }
                Ok(heard)
            }
            (State::Sending { rest, in_flight }, message) => {
                self.handle_chunk(rest, in_flight, message)
            }
            (State::Committed, Message::Prepared) => Ok(Heard::Prepared),
            (state, message) => {
                Err(SendError::Unexpected { kind: message.kind(), when: state.name() })
            }
        }
    }

    fn handle_chunk(
        &mut self,
        rest: Vec<(u32, u32)>,
        mut in_flight: BTreeSet<(u32, u32)>,
        message: Message,
    ) -> Result<Heard, SendError> {
        let kind = message.kind();
        match message {
            Message::ChunkStored { file, chunk } if in_flight.remove(&(file, chunk)) => {
                self.state = State::Sending { rest, in_flight };
                let range = chunk_range(self.manifest.files[file as usize].size, u64::from(chunk));
                Ok(Heard::Stored { file, chunk, size_bytes: range.end - range.start })
            }
            Message::ChunkRefused { file, chunk, reason } if in_flight.contains(&(file, chunk)) => {
                let name = self.manifest.files[file as usize].name.clone();
                Err(SendError::ChunkRefused { file: name, index: file, chunk, reason })
            }
            _ => Err(SendError::Unexpected { kind, when: "while chunks were sent" }),
        }
    }
}

impl State {
    fn name(&self) -> &'static str {
        match self {
            Self::Start(_) => "before the greeting",
            Self::Greeting(_) | Self::Offering(_) => "during the greeting",
            Self::Offered(_) => "in answer to the offer",
            Self::Sending { .. } => "while chunks were sent",
            Self::Committed => "in answer to the commit",
            Self::Done => "after the end",
        }
    }
}
