//! Chunks that a node fetches from another one: they are withheld until it is known which came.

use std::collections::BTreeSet;

use super::{ChunkIndex, Sender};

impl Sender {
    /// Files of which the node lacks chunks, once it has said what it holds.
    #[must_use]
    pub fn missing_files(&self) -> BTreeSet<u32> {
        self.rest.iter().map(|(file, _)| *file).collect()
    }

    /// Chunks that are to be sent and on no stream.
    #[must_use]
    pub fn waiting_chunks(&self) -> usize {
        self.rest.len()
    }

    /// Sends the chunks of these files before all others: other nodes wait for them.
    pub fn hurry(&mut self, files: &BTreeSet<u32>) {
        // The list is sent from its end.
        self.rest.sort_by_key(|(file, _)| files.contains(file));
    }

    /// Does not send the chunks of these files until [`Sender::relayed`] says which did not come.
    pub fn withhold(&mut self, files: &BTreeSet<u32>) {
        self.withheld.extend(self.rest.extract_if(.., |(file, _)| files.contains(file)));
    }

    /// The node has fetched what it could of these files; chunks that are `missing` yet are sent.
    pub fn relayed(&mut self, files: &BTreeSet<u32>, missing: impl Fn(u32, u32) -> bool) {
        let of_these = |(file, _): &ChunkIndex| files.contains(file);
        let back = self.withheld.iter().filter(|it| of_these(it) && missing(it.0, it.1));
        self.rest.extend(back);
        self.withheld.retain(|it| !of_these(it));
    }
}
