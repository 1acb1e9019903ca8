//! The plan of a step, which rank 0 broadcasts. Its wire format is in [`wire`].

mod wire;

use shardpack_engine_api::{RequestId, TokenMask};

use super::sample::SamplingParams;

/// Most sequences of a group: far more than any machine runs at once.
pub(super) const MAX_SEQUENCES: usize = 2048;

/// Most prompt tokens of one step; bounds the activations that a plan can ask for.
pub(super) const MAX_PREFILL_TOKENS: usize = 1 << 14;

/// Names a KV page that sequences share; chosen by rank 0, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PageId(pub(super) u64);

/// The work of all ranks in one step, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) step: u64,
    pub(super) publish: Vec<Publish>,
    pub(super) end: Vec<RequestId>,
    /// Pages that the prefix cache evicted.
    pub(super) drop: Vec<PageId>,
    pub(super) begin: Vec<NewSequence>,
    pub(super) scheduled: Vec<ScheduledSequence>,
}

/// A full page of a sequence enters the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Publish {
    pub(super) id: RequestId,
    /// Counted from the sequence's beginning.
    pub(super) index: u32,
    pub(super) page: PageId,
}

/// A sequence that was admitted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NewSequence {
    pub(super) id: RequestId,
    /// Tokens that it may have in the end.
    pub(super) total: u32,
    pub(super) params: SamplingParams,
    /// Its pages that the prefix cache has.
    pub(super) pages: Vec<PageId>,
    /// The tokens of those pages, if penalties need them.
    pub(super) history: Vec<u32>,
}

/// A sequence's tokens in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScheduledSequence {
    pub(super) id: RequestId,
    /// Position of the first token.
    pub(super) position: u32,
    pub(super) tokens: Vec<u32>,
    /// How many of the last are draft tokens, accepted if sampling gives the same ones.
    pub(super) drafts: u32,
    /// Whether the token after them is sampled, and with it what each draft has to be.
    pub(super) sample: bool,
    /// The prompt's token after them, where its log probability is wanted.
    pub(super) next: Option<u32>,
    /// The token mask at the position of each draft token and of the one after them; `None` allows
    /// every token. Empty without a constraint.
    pub(super) masks: Vec<Option<TokenMask>>,
}

impl ScheduledSequence {
    /// The tokens that belong to the sequence.
    pub(super) fn known(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - self.drafts as usize]
    }

    /// The draft tokens.
    pub(super) fn drafted(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.drafts as usize..]
    }
}

impl Plan {
    /// Whether the plan changes nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.publish.is_empty()
            && self.end.is_empty()
            && self.drop.is_empty()
            && self.begin.is_empty()
            && self.scheduled.is_empty()
    }
}
