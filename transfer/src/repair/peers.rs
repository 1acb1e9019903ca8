//! The nodes that chunks may come from.

use std::collections::HashMap;

use shardpack_identity::Endpoint;
use shardpack_manifests::digest::chunk_value;

use crate::{
    error_chain::chain,
    protocol::{ChunkPlace, Timeouts},
    receive::{ClientError, DamagedChunk, FindAnswer, FindRequest, NodeClient, WantedChunk},
};

/// Most chunks that are looked for at a time.
pub(super) use crate::receive::MAX_WANTED;

/// Where chunks are, by their position in the question.
pub(super) struct Places(HashMap<usize, Vec<(usize, ChunkPlace)>>);

impl Places {
    /// Places of one chunk: the peer's number, and where it is there.
    pub(super) fn of(&self, index: usize) -> &[(usize, ChunkPlace)] {
        self.0.get(&index).map_or(&[], Vec::as_slice)
    }
}

/// Peers and the connections to them.
pub(super) struct Peers {
    peers: Vec<Peer>,
    timeouts: Timeouts,
}

struct Peer {
    node: Endpoint,
    /// Absent before the first question, and after a failure, which ends a connection.
    client: Option<NodeClient>,
    /// Why it was not reached; it is not tried again.
    gone: Option<String>,
}

impl Peers {
    pub(super) fn new(nodes: &[Endpoint], timeouts: Timeouts) -> Self {
        let peer = |node: &Endpoint| Peer { node: node.clone(), client: None, gone: None };
        Self { peers: nodes.iter().map(peer).collect(), timeouts }
    }

    /// What a peer is called.
    pub(super) fn name(&self, peer: usize) -> String {
        self.peers[peer].node.to_string()
    }

    /// Whether a peer is this node.
    pub(super) fn is(&self, peer: usize, node: &Endpoint) -> bool {
        self.peers[peer].node.address() == node.address()
    }

    /// Asks every peer for chunks. One that does not answer has none.
    pub(super) fn find(&mut self, chunks: &[DamagedChunk]) -> Places {
        let wanted = chunks.iter().map(|it| WantedChunk { value: it.value, chunk: it.chunk });
        let request = FindRequest { chunks: wanted.collect() };
        let request = serde_json::to_value(request).expect("requests have text keys");
        let mut places = Places(HashMap::new());
        for number in 0..self.peers.len() {
            let asked = self.ask(number, |client| client.operate("chunks.find", &request));
            let answer = asked.ok().and_then(|it| serde_json::from_value::<FindAnswer>(it).ok());
            for (index, found) in answer.into_iter().flat_map(|it| it.places).enumerate() {
                let found = found.into_iter().map(|place| (number, place));
                places.0.entry(index).or_default().extend(found);
            }
        }
        places
    }

    /// Reads a chunk and verifies it.
    pub(super) fn fetch(
        &mut self,
        peer: usize,
        place: ChunkPlace,
        chunk: &DamagedChunk,
    ) -> Result<Vec<u8>, String> {
        let bytes = self.ask(peer, |client| client.fetch(place))?;
        let expected_bytes = chunk.size_bytes();
        if bytes.len() as u64 == expected_bytes
            && chunk_value(&bytes, chunk.file_bytes, u64::from(chunk.chunk)) == chunk.value
        {
            return Ok(bytes);
        }
        Err(format!("{} sent other bytes than the chunk's", self.peers[peer].node))
    }

    fn ask<T>(
        &mut self,
        peer: usize,
        question: impl FnOnce(&mut NodeClient) -> Result<T, ClientError>,
    ) -> Result<T, String> {
        let timeouts = self.timeouts;
        let peer = &mut self.peers[peer];
        if let Some(gone) = &peer.gone {
            return Err(gone.clone());
        }
        let connected = match peer.client.take() {
            Some(client) => Ok(client),
            None => NodeClient::connect(peer.node.clone(), timeouts),
        };
        let asked = connected.and_then(|mut client| {
            let answer = question(&mut client)?;
            peer.client = Some(client);
            Ok(answer)
        });
        asked.map_err(|error| {
            let text = chain(&error);
            // A refusal concerns the question; anything else would be waited for again and again.
            if !matches!(error, ClientError::Refused { .. }) {
                peer.gone = Some(text.clone());
            }
            text
        })
    }
}
