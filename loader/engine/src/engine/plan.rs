//! What rank 0 broadcasts for each step. Its bytes are in [`wire`].

mod wire;

use shardpack_engine_api::{RequestId, TokenMask};

use super::sample::Wishes;

/// Most sequences of a group: far more than any machine runs at once.
pub(super) const MAX_SEQUENCES: usize = 2048;

/// Most prompt tokens of one step; bounds the activations that a plan can ask for.
pub(super) const MAX_PREFILL_TOKENS: usize = 1 << 14;

/// Names a page of keys and values that sequences share; chosen by rank 0, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PageId(pub(super) u64);

/// What all ranks do in one step, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) step: u64,
    pub(super) publish: Vec<Publish>,
    pub(super) end: Vec<RequestId>,
    /// Shared pages that no longer have a name.
    pub(super) drop: Vec<PageId>,
    pub(super) begin: Vec<Begin>,
    pub(super) work: Vec<Work>,
}

/// A full page of a sequence gets a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Publish {
    pub(super) id: RequestId,
    /// Counted from the sequence's beginning.
    pub(super) index: u32,
    pub(super) page: PageId,
}

/// A sequence that begins.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Begin {
    pub(super) id: RequestId,
    /// Tokens that it may have in the end.
    pub(super) total: u32,
    pub(super) wishes: Wishes,
    /// What is already cached of it.
    pub(super) pages: Vec<PageId>,
    /// The tokens of those pages, if the choice of tokens depends on them.
    pub(super) history: Vec<u32>,
}

/// The next tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) id: RequestId,
    /// Position of the first token.
    pub(super) position: u32,
    pub(super) tokens: Vec<u32>,
    /// The last of them that are drafts: they count if sampling comes to the same ones.
    pub(super) drafts: u32,
    /// Whether the token after them is sampled, and with it what each draft has to be.
    pub(super) sample: bool,
    /// What the token in the place of each draft, and the one after them, may be: anything where
    /// there is no mask. Empty where there is none at all.
    pub(super) masks: Vec<Option<TokenMask>>,
}

impl Work {
    /// The tokens that are the sequence's for certain.
    pub(super) fn known(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - self.drafts as usize]
    }

    /// The tokens that may turn out to be.
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
            && self.work.is_empty()
    }
}
