//! Drafts that the engine has run, as counters.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::{metrics::counter::Counter, registry::Registry};
use shardpack_engine_api::EngineStatus;

/// A total that an engine says, which begins anew with its process.
#[derive(Default)]
struct Total {
    counter: Counter,
    said: AtomicU64,
}

impl Total {
    fn hear(&self, said: u64) {
        let before = self.said.swap(said, Ordering::Relaxed);
        self.counter.inc_by(said.checked_sub(before).unwrap_or(said));
    }
}

/// Drafts that were run, and those of them that were kept.
pub(super) struct DraftCounters {
    drafted: Total,
    accepted: Total,
}

impl DraftCounters {
    /// Registers them under our own names and vLLM's.
    pub(super) fn new(registry: &mut Registry) -> Self {
        let mut total = |own: &str, vllm: &str, help: &str| {
            let total = Total::default();
            registry.register(format!("shardpack_{own}"), help, total.counter.clone());
            registry.register(format!("vllm:{vllm}"), help, total.counter.clone());
            total
        };
        Self {
            drafted: total(
                "draft_tokens",
                "spec_decode_num_draft_tokens",
                "Tokens that were guessed and run",
            ),
            accepted: total(
                "accepted_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "Guessed tokens that came",
            ),
        }
    }

    /// Takes over what rank 0 last said.
    pub(super) fn set(&self, engine: &EngineStatus) {
        let [drafted, accepted] = engine.drafts();
        self.drafted.hear(drafted);
        self.accepted.hear(accepted);
    }
}
