//! On whose behalf a request is computed, as far as sharing the engine goes. Who that is, an API key
//! or an address, is not known here.

use serde::{Deserialize, Serialize};

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Names the tenant; 0 is nobody in particular.
    pub id: u64,
    /// Its part of the engine where several want it, in relation to the others' weights; at least 1.
    pub weight: u32,
    /// Requests share the prefix cache with those of the same number, and with no others: cached
    /// tokens and the time to the first token would tell what others have sent.
    pub prefix_cache: u64,
}

/// Most that a weight counts: beyond it the others would get nothing for a long time.
const WEIGHT_MAX: u32 = 1000;

impl Tenant {
    /// Nobody in particular.
    pub const NOBODY: Self = Self { id: 0, weight: 1, prefix_cache: 0 };

    /// A tenant of weight 1 with a prefix cache of its own.
    #[must_use]
    pub const fn new(id: u64) -> Self {
        Self { id, weight: 1, prefix_cache: id }
    }

    /// Whether it is nobody in particular.
    #[must_use]
    pub fn is_nobody(&self) -> bool {
        *self == Self::NOBODY
    }

    /// Its weight, within what counts: 1 to 1000.
    #[must_use]
    pub fn share(&self) -> u32 {
        self.weight.clamp(1, WEIGHT_MAX)
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self::NOBODY
    }
}
