//! A package that this machine fetches from a node, into a store of its own: with the checks, the journal and
//! the verification of one that is pushed here.

use std::{sync::Arc, time::Duration};

use super::{
    stage::{Meter, Stage},
    store::{Store, StoreError},
};
use crate::protocol::Incoming;

/// A package that is being fetched.
pub(crate) struct Intake {
    stage: Arc<Stage>,
}

impl Intake {
    /// Takes up what an earlier attempt left, or begins anew. Fails if the disk is too small.
    pub(crate) fn open(store: &Arc<Store>, incoming: Incoming) -> Result<Self, StoreError> {
        let meter = Meter::default();
        let stage = Stage::open(store, Box::new(incoming), Duration::ZERO, &meter)?;
        Ok(Self { stage })
    }

    /// Chunks that are not here: file, chunk, bytes.
    pub(crate) fn missing(&self) -> Vec<(u32, u32, u64)> {
        self.stage.held().lock().missing().collect()
    }

    /// Verifies a chunk and writes it; returns its bytes.
    pub(crate) fn store(&self, file: u32, chunk: u32, bytes: &[u8]) -> Result<u64, StoreError> {
        self.stage.write_checked(file, chunk, bytes)
    }

    /// Makes durable what was written, for the next attempt.
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        self.stage.sync()
    }

    /// Verifies the whole package and moves it into the store.
    pub(crate) fn seal(&self) -> Result<(), StoreError> {
        self.stage.seal(&Meter::default())
    }
}
