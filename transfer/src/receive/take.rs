//! Fetches files of a package that is being received from another node, which has them or gets them: the
//! controller then sends them once for all nodes.
//!
//! Nothing is believed: every chunk is compared with this node's own manifest, as one that comes from the
//! controller is. What does not come is told, and the controller sends it.

use std::{
    collections::VecDeque,
    io,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::json;
use shardpack_identity::{Channel, ConnectError, Endpoint, PeerKey, Service};
use shardpack_manifests::{Digest, digest::chunk_range};

use super::{
    event::ReceiveEvent,
    give,
    node::Node,
    operations::OperationError,
    stage::{Meter, Stage},
    store::StoreError,
};
use crate::{
    error_chain::chain,
    protocol::{
        ChunkPlace, Failure, Join, Message, Operation, PackageKey, Timeouts, Wire, WireError,
    },
    ticket::SignedTicket,
};

/// The operation that has files fetched.
pub(crate) const TAKE: &str = "relay.take";

/// Chunks that are asked for ahead: two keep the connection busy, two more hide the other node's disk.
const WINDOW_CHUNKS: usize = 4;

/// Longest silence of the other node, which sends keep-alives every second.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long one chunk may take, keep-alives or not: longer than the other node waits for it, and less than
/// the controller waits for progress here.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(45);

/// Which files to fetch, and from whom.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TakeRequest {
    /// The package that is being received here.
    pub(crate) package: PackageKey,
    /// BLAKE3 of its manifest.
    pub(crate) manifest: Digest,
    /// What the other node is called.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) address: String,
    /// Its key; none on this machine without TLS.
    pub(crate) key: Option<PeerKey>,
    /// Which files it serves.
    pub(crate) ticket: SignedTicket,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TakeAnswer {
    /// Chunks that were fetched and stored.
    pub(crate) taken_chunks: u64,
    /// Their bytes.
    pub(crate) taken_bytes: u64,
    /// Chunks of the files that are not here: per run of them file, first chunk, and the one after the last.
    pub(crate) missing: Vec<[u32; 3]>,
    /// Why there are any.
    pub(crate) problem: Option<String>,
}

/// Why no more was fetched.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the connection ended")]
    Wire(#[from] WireError),
    #[error("it refused: {0}")]
    Refused(Failure),
    #[error("it sent message type {0} in answer to another")]
    Unexpected(u8),
    #[error("a chunk did not come within {} s", CHUNK_TIMEOUT.as_secs())]
    Slow,
    #[error("the controller went away")]
    Cancelled,
    #[error("this node is in no cluster, the other one is")]
    NotJoined,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A chunk to fetch: where it is there, and here.
#[derive(Clone, Copy)]
struct Wanted {
    there: ChunkPlace,
    file: u32,
    chunk: u32,
}

/// Carries out [`TAKE`]. Fails only where no such package is being received; what was not fetched stands in
/// the answer.
pub(super) fn take(
    node: &Node,
    request: &TakeRequest,
    meter: &Meter,
) -> Result<TakeAnswer, OperationError> {
    let join = Join { package: request.package, manifest: request.manifest };
    let stage = Stage::find(&node.store, join)?;
    let _relay = stage.relay();
    let wanted = wanted(&stage, request);
    let sizes = wanted.iter().map(|it| size_of(&stage, it.file, it.chunk));
    meter.total_bytes.store(sizes.sum(), Ordering::Relaxed);
    let mut answer = TakeAnswer::default();
    let taken = fetch(node, &stage, request, &wanted, meter, &mut answer);
    // What has been stored counts, however it ended.
    let taken = taken.and_then(|()| Ok(stage.sync()?));
    answer.problem = taken.err().map(|error| chain(&error));
    answer.missing = missing(&stage, &wanted);
    Ok(answer)
}

/// Chunks of the ticket's files that this node lacks.
fn wanted(stage: &Stage, request: &TakeRequest) -> Vec<Wanted> {
    let files = &stage.incoming().manifest.files;
    let held = stage.held().lock();
    let mut wanted = Vec::new();
    for (file, chunk, ..) in held.missing() {
        let entry = &files[file as usize];
        let mut listed = request.ticket.ticket().files.iter();
        if let Some(there) = listed.find(|it| (it.blake3, it.size) == (entry.blake3, entry.size)) {
            let package = request.ticket.ticket().package;
            let there = ChunkPlace { package, file: there.file, chunk };
            wanted.push(Wanted { there, file, chunk });
        }
    }
    wanted
}

/// Runs of the chunks that did not come.
fn missing(stage: &Stage, wanted: &[Wanted]) -> Vec<[u32; 3]> {
    let held = stage.held().lock();
    let mut runs: Vec<[u32; 3]> = Vec::new();
    for Wanted { file, chunk, .. } in wanted.iter().filter(|it| !held.holds(it.file, it.chunk)) {
        match runs.last_mut() {
            Some([of, _, end]) if (*of, *end) == (*file, *chunk) => *end += 1,
            _ => runs.push([*file, *chunk, *chunk + 1]),
        }
    }
    runs
}

fn size_of(stage: &Stage, file: u32, chunk: u32) -> u64 {
    let range = chunk_range(stage.incoming().manifest.files[file as usize].size, chunk.into());
    range.end - range.start
}

fn fetch(
    node: &Node,
    stage: &Stage,
    request: &TakeRequest,
    wanted: &[Wanted],
    meter: &Meter,
    answer: &mut TakeAnswer,
) -> Result<(), TakeError> {
    if wanted.is_empty() {
        return Ok(());
    }
    let mut source = Source::open(node, request, meter)?;
    let mut rest = wanted.iter();
    let mut asked: VecDeque<Wanted> = VecDeque::new();
    loop {
        while asked.len() < WINDOW_CHUNKS
            && let Some(next) = rest.next()
        {
            source.wire.send(&Message::Fetch(next.there))?;
            asked.push_back(*next);
        }
        let Some(Wanted { file, chunk, .. }) = asked.pop_front() else { return Ok(()) };
        let bytes = match source.hear(meter)? {
            Message::Fetched(bytes) => bytes,
            other => return Err(TakeError::Unexpected(other.kind())),
        };
        let size_bytes = stage.write_checked(file, chunk, &bytes)?;
        answer.taken_chunks += 1;
        answer.taken_bytes += size_bytes;
        meter.add(size_bytes);
        let package = request.package;
        let file = stage.incoming().manifest.files[file as usize].name.clone();
        (node.options.observer)(&ReceiveEvent::ChunkStored { package, file, chunk, size_bytes });
    }
}

type SetTimeout = fn(&Channel, Duration) -> io::Result<()>;

/// The connection to the other node.
struct Source {
    wire: Wire<Channel, SetTimeout>,
}

impl Source {
    /// Connects and shows the ticket.
    fn open(node: &Node, request: &TakeRequest, meter: &Meter) -> Result<Self, TakeError> {
        let TakeRequest { name, address, key, ticket, .. } = request;
        let endpoint = match key {
            Some(key) => {
                let guard = node.guard.as_ref().and_then(|guard| guard.credentials());
                let credentials = guard.ok_or(TakeError::NotJoined)?;
                Endpoint::member(name.clone(), address.clone(), credentials, *key)
            }
            // Refused unless it is on this machine.
            None => Endpoint::plain(address.clone()),
        };
        let timeouts = node.options.timeouts;
        let timeouts = Timeouts { idle: timeouts.idle.min(IDLE_TIMEOUT), ..timeouts };
        let channel = endpoint.connect(Service::Relay, timeouts.connect)?;
        let set_timeout: SetTimeout = |channel, timeout| {
            channel.set_read_timeout(Some(timeout))?;
            channel.set_write_timeout(Some(timeout))
        };
        let mut source = Self { wire: Wire::new(channel, set_timeout, timeouts) };
        source.wire.send(&Message::hello())?;
        match source.hear(meter)? {
            Message::Hello { .. } => {}
            other => return Err(TakeError::Unexpected(other.kind())),
        }
        let parameters = json!({ "ticket": ticket }).to_string();
        let operation = Operation { name: give::OPEN.to_owned(), parameters };
        source.wire.send(&Message::Operate(operation))?;
        match source.hear(meter)? {
            Message::Operated(_) => Ok(source),
            other => Err(TakeError::Unexpected(other.kind())),
        }
    }

    /// The next answer that is no keep-alive.
    fn hear(&mut self, meter: &Meter) -> Result<Message, TakeError> {
        let begun = Instant::now();
        loop {
            if meter.is_cancelled.load(Ordering::Relaxed) {
                return Err(TakeError::Cancelled);
            }
            match self.wire.receive()? {
                Message::Working { .. } if begun.elapsed() < CHUNK_TIMEOUT => {}
                Message::Working { .. } => return Err(TakeError::Slow),
                Message::Failed(failure) => return Err(TakeError::Refused(failure)),
                answer => return Ok(answer),
            }
        }
    }
}
