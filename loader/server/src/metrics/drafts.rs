//! Counters of speculative decoding.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::{metrics::counter::Counter, registry::Registry};
use shardpack_engine_api::EngineStatus;

/// A total that the engine reports, which restarts at 0 with its process.
#[derive(Default)]
struct Total {
    counter: Counter,
    reported: AtomicU64,
}

impl Total {
    fn set(&self, total: u64) {
        let before = self.reported.swap(total, Ordering::Relaxed);
        self.counter.inc_by(total.checked_sub(before).unwrap_or(total));
    }
}

/// Draft tokens that were verified, and those of them that were accepted.
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
                "Draft tokens verified by the model",
            ),
            accepted: total(
                "accepted_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "Draft tokens accepted",
            ),
        }
    }

    /// Takes over what rank 0 reported last.
    pub(super) fn set(&self, engine: &EngineStatus) {
        let [drafted, accepted] = engine.drafts();
        self.drafted.set(drafted);
        self.accepted.set(accepted);
    }
}
