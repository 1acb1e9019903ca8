//! The receiver's state machine: which message may come when, and whether a chunk is accepted.

use std::{mem, sync::Arc};

use shardpack_manifests::{
    digest::{Digest, chunk_range, chunk_value},
    ids,
    manifest::Manifest,
    set::PackageSet,
    verify::check_member,
};

use super::{
    failure::{Failure, FailureCode},
    held::SharedMap,
    message::{ChunkPlace, Intent, Join, Message, Offer, Operation, PackageKey, StartRank},
    version::SPOKEN,
};

/// An offer that has been parsed and agrees with itself.
#[derive(Clone, Debug)]
pub struct Incoming {
    /// Whether chunks will follow.
    pub intent: Intent,
    /// Where the node keeps the package.
    pub key: PackageKey,
    /// Digest of the manifest: two packages with the same one are the same package.
    pub manifest_digest: Digest,
    /// The manifest.
    pub manifest: Arc<Manifest>,
    /// The manifest's bytes.
    pub manifest_bytes: Vec<u8>,
    /// Bytes of `model.sig`; empty without one.
    pub signature: Vec<u8>,
}

impl Incoming {
    /// Parses an offer and checks that it agrees with itself.
    pub fn parse(offer: Offer) -> Result<Self, Failure> {
        let refused = |problem: String| failure(FailureCode::Refused, problem);
        let chain = |what: &str, error: &dyn std::error::Error| {
            let reason = error.source().map_or(String::new(), |source| format!(": {source}"));
            refused(format!("{what}: {error}{reason}"))
        };
        let manifest =
            Manifest::parse(&offer.manifest).map_err(|error| chain("manifest.json", &error))?;
        let manifest_digest = Digest::of(&offer.manifest);
        let layout = ids::layout_id(manifest.ids.model, &manifest.layout)
            .map_err(|error| chain("layout", &error))?;
        if layout != manifest.ids.layout {
            let found = manifest.ids.layout;
            return Err(refused(format!("layout id {found} does not follow from the manifest")));
        }
        if !offer.set.is_empty() {
            let set = PackageSet::parse(&offer.set).map_err(|error| chain("set.json", &error))?;
            if let Some(problem) = check_member(&set, manifest.rank, &manifest, None).first() {
                return Err(refused(format!("the package is not of this set: {problem}")));
            }
            let listed = set.packages.get(manifest.rank as usize).map(|entry| entry.manifest);
            if listed != Some(manifest_digest) {
                let rank = manifest.rank;
                return Err(refused(format!("the set lists another manifest for rank {rank}")));
            }
        }
        Ok(Self {
            intent: offer.intent,
            key: PackageKey { layout, rank: manifest.rank },
            manifest_digest,
            manifest: Arc::new(manifest),
            manifest_bytes: offer.manifest,
            signature: offer.signature,
        })
    }
}

/// What the driver of a [`Receiver`] does next.
#[derive(Debug)]
pub enum ReceiverAction {
    /// Send this.
    Reply(Message),
    /// Prepare to store the package, find out what is held already, then call
    /// [`Receiver::staged`]. With [`Intent::Ask`], change nothing.
    Stage(Box<Incoming>),
    /// Find the package under way on another stream, then call [`Receiver::joined`].
    Join(Join),
    /// Write these bytes, which have been verified, then call [`Receiver::stored`].
    Store {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
        /// First byte within the file.
        offset: u64,
        /// The chunk.
        bytes: Vec<u8>,
    },
    /// Verify the whole package and move it into the store, then call [`Receiver::sealed`].
    Seal,
    /// Make a package the current one and answer [`Message::Activated`].
    Activate(PackageKey),
    /// Answer [`Message::Listing`].
    List,
    /// Start a rank and answer [`Message::RankStarted`].
    StartRank(StartRank),
    /// Carry out an operation and answer [`Message::Operated`].
    Operate(Operation),
    /// Read a stored chunk, verify it and answer [`Message::Fetched`].
    Fetch(ChunkPlace),
    /// Replace a stored chunk that is damaged with these bytes, if they are its own, and answer
    /// [`Message::PutDone`].
    Put {
        /// Which.
        place: ChunkPlace,
        /// The chunk; not verified.
        bytes: Vec<u8>,
    },
}

/// The node's state machine. Any step may instead end in [`Message::Failed`] and the connection's
/// end: the machine is then thrown away and nothing that was stored is lost.
pub struct Receiver {
    state: State,
}

enum State {
    /// Nothing has been said.
    Silent,
    /// Greeted, no package under way.
    Idle,
    /// The driver looks for what is held.
    Staging(Box<Incoming>),
    /// The driver looks for the package of a further stream.
    Joining,
    /// Chunks come in.
    Receiving { manifest: Arc<Manifest>, held: SharedMap },
    /// The driver verifies the package.
    Sealing,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new()
    }
}

impl Receiver {
    /// A connection on which nothing has been said.
    #[must_use]
    pub fn new() -> Self {
        Self { state: State::Silent }
    }

    /// Takes a message. An error ends the connection.
    pub fn handle(&mut self, message: Message) -> Result<ReceiverAction, Failure> {
        match (&mut self.state, message) {
            (State::Silent, Message::Hello { protocol, program }) => {
                let common = SPOKEN.answer(protocol, &program)?;
                self.state = State::Idle;
                Ok(ReceiverAction::Reply(Message::hello_in(common)))
            }
            (State::Idle, Message::Offer(offer)) => {
                let incoming = Box::new(Incoming::parse(offer)?);
                self.state = State::Staging(incoming.clone());
                Ok(ReceiverAction::Stage(incoming))
            }
            (State::Idle, Message::Join(join)) => {
                self.state = State::Joining;
                Ok(ReceiverAction::Join(join))
            }
            (State::Receiving { manifest, held }, Message::Chunk { file, chunk, bytes }) => {
                take_chunk(manifest, held, file, chunk, bytes)
            }
            (State::Receiving { held, .. }, Message::Commit) => {
                let held = held.lock();
                if !held.is_complete() {
                    let problem = format!("{} bytes are missing", held.missing_bytes());
                    return Err(failure(FailureCode::Incomplete, problem));
                }
                drop(held);
                self.state = State::Sealing;
                Ok(ReceiverAction::Seal)
            }
            (State::Idle, Message::Activate(key)) => Ok(ReceiverAction::Activate(key)),
            (State::Idle, Message::List) => Ok(ReceiverAction::List),
            (State::Idle, Message::StartRank(request)) => Ok(ReceiverAction::StartRank(request)),
            (State::Idle, Message::Operate(operation)) => Ok(ReceiverAction::Operate(operation)),
            (State::Idle, Message::Fetch(place)) => Ok(ReceiverAction::Fetch(place)),
            (State::Idle, Message::Put { place, bytes }) => {
                Ok(ReceiverAction::Put { place, bytes })
            }
            (_, message) => {
                let problem = format!("message type {} does not belong here", message.kind());
                Err(failure(FailureCode::Unexpected, problem))
            }
        }
    }

    /// The package can be stored; these chunks of it are held. Returns the answer.
    ///
    /// # Panics
    /// When no offer is waiting for this.
    pub fn staged(&mut self, held: SharedMap, free_bytes: u64, reused_bytes: u64) -> Message {
        let State::Staging(incoming) = mem::replace(&mut self.state, State::Idle) else {
            panic!("an offer waits for its answer");
        };
        let status = Message::Status { free_bytes, reused_bytes, held: held.lock().to_bytes() };
        if incoming.intent == Intent::Send {
            self.state = State::Receiving { manifest: incoming.manifest, held };
        }
        status
    }

    /// The package of this manifest is under way, and these chunks of it are held, whichever stream
    /// brought them. Returns the answer.
    ///
    /// # Panics
    /// When no further stream is waiting for this.
    pub fn joined(&mut self, manifest: Arc<Manifest>, held: SharedMap) -> Message {
        assert!(matches!(self.state, State::Joining), "a stream waits for its package");
        self.state = State::Receiving { manifest, held };
        Message::Joined
    }

    /// A chunk has been written. Returns the answer.
    ///
    /// # Panics
    /// When no package is being received.
    pub fn stored(&mut self, file: u32, chunk: u32) -> Message {
        let State::Receiving { held, .. } = &mut self.state else {
            panic!("chunks are stored while they are received");
        };
        held.lock().insert(file, chunk);
        Message::ChunkStored { file, chunk }
    }

    /// The package is verified and stored. Returns the answer.
    ///
    /// # Panics
    /// When no package is being sealed.
    pub fn sealed(&mut self) -> Message {
        assert!(matches!(self.state, State::Sealing), "a package is sealed after its commit");
        self.state = State::Idle;
        Message::Prepared
    }
}

fn take_chunk(
    manifest: &Manifest,
    held: &SharedMap,
    file: u32,
    chunk: u32,
    bytes: Vec<u8>,
) -> Result<ReceiverAction, Failure> {
    if !held.lock().exists(file, chunk) {
        let problem = format!("there is no chunk {chunk} of file number {file}");
        return Err(failure(FailureCode::Unexpected, problem));
    }
    if held.lock().holds(file, chunk) {
        return Ok(ReceiverAction::Reply(Message::ChunkStored { file, chunk }));
    }
    let entry = &manifest.files[file as usize];
    let index = u64::from(chunk);
    let range = chunk_range(entry.size, index);
    let refuse =
        |reason: String| Ok(ReceiverAction::Reply(Message::ChunkRefused { file, chunk, reason }));
    let expected_bytes = range.end - range.start;
    if bytes.len() as u64 != expected_bytes {
        return refuse(format!("{} bytes, expected {expected_bytes}", bytes.len()));
    }
    let (expected, found) = (entry.chunks[chunk as usize], chunk_value(&bytes, entry.size, index));
    if expected != found {
        return refuse(format!("its BLAKE3 is {found}, expected {expected}"));
    }
    Ok(ReceiverAction::Store { file, chunk, offset: range.start, bytes })
}

fn failure(code: FailureCode, message: String) -> Failure {
    Failure { code, message }
}
