//! Which stored packages have a chunk that somebody lacks.
//!
//! Claims of manifests only: whoever reads such a chunk is told if it is damaged here too.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use shardpack_manifests::Digest;

use super::store::{Store, StoreError};
use crate::protocol::ChunkPlace;

/// Most chunks that are asked for at a time: the answer has as many lists of places.
pub(crate) const MAX_WANTED: usize = 1000;

/// Most places that are told of one chunk: the others are more of the same disk.
const MAX_PLACES: usize = 4;

/// A chunk by what it is: its value and its index, which fixes where in a file it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WantedChunk {
    /// Its value.
    pub value: Digest,
    /// Its index.
    pub chunk: u32,
}

/// Chunks that are looked for, at most a thousand.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FindRequest {
    /// The chunks.
    pub chunks: Vec<WantedChunk>,
}

/// Where they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FindAnswer {
    /// Places of each chunk, in the order of the request; at most four.
    pub places: Vec<Vec<ChunkPlace>>,
}

impl Store {
    /// Looks chunks up in the manifests of all packages.
    pub(super) fn find_chunks(&self, request: &FindRequest) -> Result<FindAnswer, StoreError> {
        let chunks = &request.chunks[..request.chunks.len().min(MAX_WANTED)];
        let wanted: HashMap<WantedChunk, usize> =
            chunks.iter().enumerate().map(|(index, chunk)| (*chunk, index)).collect();
        let mut found: Vec<Vec<ChunkPlace>> = vec![Vec::new(); chunks.len()];
        for package in self.packages()? {
            // A package that cannot be used gives nothing.
            let Ok(manifest) = package.read_manifest() else { continue };
            for (file, entry) in (0..).zip(&manifest.files) {
                for (chunk, value) in (0..).zip(&entry.chunks) {
                    let Some(index) = wanted.get(&WantedChunk { value: *value, chunk }) else {
                        continue;
                    };
                    if found[*index].len() < MAX_PLACES {
                        found[*index].push(ChunkPlace { package: package.key, file, chunk });
                    }
                }
            }
        }
        // Twice the same chunk in a request: both are told.
        let places = chunks.iter().map(|chunk| found[wanted[chunk]].clone()).collect();
        Ok(FindAnswer { places })
    }
}
