//! What compiling may take for one request.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Processor time that the grammars of one request may take to compile, all tries together: a schema
/// that is softened until it can be enforced is compiled several times.
#[derive(Debug)]
pub struct CompileBudget {
    most: Duration,
    spent: Mutex<Duration>,
}

impl CompileBudget {
    /// So much.
    #[must_use]
    pub const fn new(most: Duration) -> Self {
        Self { most, spent: Mutex::new(Duration::ZERO) }
    }

    /// What was spent.
    #[must_use]
    pub fn spent(&self) -> Duration {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn left(&self) -> Duration {
        self.most.saturating_sub(self.spent())
    }

    pub(super) fn spend(&self, took: Duration) {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner) += took;
    }
}

impl Default for CompileBudget {
    /// What one request may take: several times what one grammar may.
    fn default() -> Self {
        Self::new(Duration::from_secs(5))
    }
}
