//! The front that a rank has at present, if any: what it is told, and what the next one must know.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::CurrentGroup;
use crate::{
    identity::Identity,
    message::FromRank,
    wire::{Sender, WireError},
};

/// Where a rank's threads send what they have to say; without a front it is dropped.
pub(super) struct Front {
    state: Mutex<State>,
    current: Arc<CurrentGroup>,
}

#[derive(Default)]
struct State {
    sender: Option<Arc<Sender>>,
    is_loaded: bool,
}

impl Front {
    pub(super) fn new(current: Arc<CurrentGroup>) -> Self {
        Self { state: Mutex::default(), current }
    }

    /// A front has connected: it is told who this is and whether the weights are there.
    pub(super) fn enter(&self, sender: &Arc<Sender>, who: &Identity) -> Result<(), WireError> {
        sender.send(&FromRank::Identity(who.clone()))?;
        let mut state = self.lock();
        state.sender = Some(Arc::clone(sender));
        if state.is_loaded {
            drop(state);
            sender.send(&self.loaded_message())?;
        }
        Ok(())
    }

    /// It is gone.
    pub(super) fn leave(&self) {
        if let Some(sender) = self.lock().sender.take() {
            sender.close();
        }
    }

    /// Tells the front, if there is one.
    pub(super) fn say(&self, message: &FromRank) {
        let sender = self.lock().sender.clone();
        // The thread that reads from the front notices when it is gone.
        let _ = sender.map(|sender| sender.send(message));
    }

    /// The weights are there, for this front and any after it.
    pub(super) fn loaded(&self) {
        let mut state = self.lock();
        state.is_loaded = true;
        let sender = state.sender.clone();
        drop(state);
        let _ = sender.map(|sender| sender.send(&self.loaded_message()));
    }

    fn loaded_message(&self) -> FromRank {
        FromRank::Loaded { epoch: self.current.epoch() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
