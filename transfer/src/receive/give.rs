//! Files of a push that another node fetches from this one, against a ticket: from the stored package, or
//! from one that is still being received, chunk by chunk as they come.
//!
//! Every chunk is read and verified before it leaves. Knows the store; does not know who else has the files.

use std::{
    collections::BTreeMap,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use shardpack_identity::Peer;

use super::{
    node::Node,
    operations::OperationError,
    serve_chunks::Served,
    stage::Staged,
    store::{Store, StoreError},
};
use crate::{
    protocol::{ChunkPlace, Failure, FailureCode, PackageKey},
    ticket::{SignedTicket, TicketError, TicketFile},
};

/// The operation that shows a ticket.
pub(super) const OPEN: &str = "relay.open";

/// How long a chunk is waited for that is yet to come here. Shorter than the fetching node is waited for by
/// its controller, which then sends the chunk itself.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(40);

/// Interval at which such a chunk is looked for: a chunk of 4 MiB takes longer on most networks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Parameters of [`OPEN`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct OpenRequest {
    /// Which files, for whom.
    pub(super) ticket: SignedTicket,
}

/// What a ticket lets its bearer fetch.
pub(super) struct Giver {
    store: Arc<Store>,
    package: PackageKey,
    files: BTreeMap<u32, TicketFile>,
    /// The stored package, once it is one.
    served: Option<Served>,
}

impl Giver {
    /// Checks the ticket that a caller shows; `caller` is known where the connection is TLS.
    pub(super) fn open(
        node: &Node,
        caller: Option<Peer>,
        request: &OpenRequest,
    ) -> Result<Self, OperationError> {
        let ticket = &request.ticket;
        match &node.guard {
            Some(guard) => {
                // A node that has left its cluster since gives nothing.
                let credentials = guard.credentials().ok_or(TicketError::Unsigned)?;
                let caller = caller.ok_or(TicketError::Unsigned)?;
                ticket.verify(&credentials, caller.key)?;
            }
            None => ticket.check_time()?,
        }
        let package = ticket.ticket().package;
        let files = ticket.ticket().files.iter().map(|file| (file.file, *file)).collect();
        Ok(Self { store: Arc::clone(&node.store), package, files, served: None })
    }

    /// Reads a chunk, once it is here.
    pub(super) fn read(&mut self, place: ChunkPlace) -> Result<Vec<u8>, Failure> {
        let file = self.files.get(&place.file).copied();
        let Some(file) = file.filter(|_| place.package == self.package) else {
            let ChunkPlace { package, file, chunk } = place;
            let message = format!(
                "the ticket does not name chunk {chunk} of file number {file} of package {package}"
            );
            return Err(Failure { code: FailureCode::Refused, message });
        };
        let begun = Instant::now();
        while begun.elapsed() < CHUNK_TIMEOUT {
            if let Some(bytes) = self.look(place, &file).map_err(Failure::from)? {
                return Ok(bytes);
            }
            thread::sleep(POLL_INTERVAL);
        }
        let (seconds, chunk) = (CHUNK_TIMEOUT.as_secs(), place.chunk);
        let message = format!(
            "chunk {chunk} of file number {} did not come here within {seconds} s",
            place.file
        );
        Err(Failure { code: FailureCode::Incomplete, message })
    }

    /// The chunk, or nothing as long as it is to be expected.
    fn look(
        &mut self,
        place: ChunkPlace,
        file: &TicketFile,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let ChunkPlace { file: index, chunk, .. } = place;
        let is_it = |entry: &shardpack_manifests::manifest::FileEntry| {
            (entry.blake3, entry.size) == (file.blake3, file.size)
        };
        let stage = self.store.under_way(self.package);
        if let Some(stage) = &stage {
            let listed = stage.incoming().manifest.files.get(index as usize);
            if listed.is_some_and(is_it) {
                match stage.read(index, chunk)? {
                    Staged::Here(bytes) => return Ok(Some(bytes)),
                    Staged::Awaited => return Ok(None),
                    Staged::Elsewhere => {}
                }
            }
        }
        let served = match self.served.take() {
            Some(served) if served.is_current()? => served,
            _ => match Served::open(&self.store, self.package) {
                // Between the two names that it has when it is moved.
                Err(StoreError::Unknown { .. }) if stage.is_some() => return Ok(None),
                opened => opened?,
            },
        };
        let served = self.served.insert(served);
        if !served.entry(index).is_some_and(is_it) {
            return Err(StoreError::NoSuchChunk { key: self.package, file: index, chunk });
        }
        served.read(place).map(Some)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        OperationError::from(error).into()
    }
}
