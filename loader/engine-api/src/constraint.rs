//! Constrained decoding as the engine sees it: token masks. Which grammar or schema is behind a
//! mask is not known here.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::token::TokenId;

/// A serialized constraint, from the server to the [`ConstraintFactory`] of rank 0. Opaque to the
/// engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConstraintSource(pub String);

/// A constraint cannot be built or its state is invalid; the message is for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

/// The constraint state of one sequence. It lives on rank 0 alone: its mask travels in the plan of
/// each step.
pub trait Constraint: Send {
    /// Clears the tokens that are not allowed next in `mask`, which allows every token. Stop tokens
    /// are allowed where the sequence may end. At least one token must stay allowed unless
    /// [`Constraint::must_stop`].
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError>;

    /// Advances by the sampled token, which the last mask allowed.
    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError>;

    /// Whether nothing may follow; the sequence then ends as with a stop token.
    fn must_stop(&mut self) -> bool;

    /// A copy in the same state, for draft tokens that may be rejected.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// Builds constraints from their sources; one per engine, on rank 0.
pub trait ConstraintFactory: Send + Sync {
    /// A constraint at the start of a sequence. Called on a thread beside the steps, which go on; its
    /// time must be bounded all the same, since others wait for that thread.
    fn build(&self, source: &ConstraintSource) -> Result<Box<dyn Constraint>, ConstraintError>;

    /// The same with the processor time that it took, as far as that is known, or else the time.
    fn build_timed(
        &self,
        source: &ConstraintSource,
    ) -> (Result<Box<dyn Constraint>, ConstraintError>, Duration) {
        let begun = Instant::now();
        let built = self.build(source);
        (built, begun.elapsed())
    }
}

/// A set of tokens: one bit each, the lowest of the first word for token 0. Bits beyond the
/// vocabulary are clear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    vocab_size: u32,
    words: Vec<u32>,
}

impl TokenMask {
    /// Every token of a vocabulary.
    #[must_use]
    pub fn all(vocab_size: u32) -> Self {
        Self::from_words(vocab_size, vec![u32::MAX; vocab_size.div_ceil(32) as usize])
            .expect("as many words as the vocabulary needs")
    }

    /// No token.
    #[must_use]
    pub fn none(vocab_size: u32) -> Self {
        Self { vocab_size, words: vec![0; vocab_size.div_ceil(32) as usize] }
    }

    /// A mask of these words; `None` where they are more or fewer than the vocabulary needs.
    /// Bits beyond the vocabulary are cleared.
    #[must_use]
    pub fn from_words(vocab_size: u32, mut words: Vec<u32>) -> Option<Self> {
        if words.len() != vocab_size.div_ceil(32) as usize {
            return None;
        }
        if let (Some(last), used @ 1..) = (words.last_mut(), vocab_size % 32) {
            *last &= (1 << used) - 1;
        }
        Some(Self { vocab_size, words })
    }

    /// Tokens of the vocabulary.
    #[must_use]
    pub const fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The bits, 32 tokens a word.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Allows only what both this mask and the words do. Missing words allow nothing.
    pub fn intersect(&mut self, words: &[u32]) {
        let others = words.iter().copied().chain(std::iter::repeat(0));
        for (word, other) in self.words.iter_mut().zip(others) {
            *word &= other;
        }
    }

    /// Allows a token; one outside the vocabulary stays forbidden.
    pub fn allow(&mut self, token: TokenId) {
        if token.0 < self.vocab_size {
            self.words[token.0 as usize / 32] |= 1 << (token.0 % 32);
        }
    }

    /// Forbids a token.
    pub fn forbid(&mut self, token: TokenId) {
        if token.0 < self.vocab_size {
            self.words[token.0 as usize / 32] &= !(1 << (token.0 % 32));
        }
    }

    /// Whether a token is allowed.
    #[must_use]
    pub fn is_allowed(&self, token: TokenId) -> bool {
        token.0 < self.vocab_size && self.words[token.0 as usize / 32] >> (token.0 % 32) & 1 == 1
    }

    /// Number of allowed tokens.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether every token is allowed.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.count() == self.vocab_size
    }
}

#[cfg(test)]
mod tests {
    use crate::*;

    #[test]
    fn masks_hold_exactly_the_vocabulary() {
        for vocab in [0, 1, 31, 32, 33, 512] {
            let mut mask = TokenMask::all(vocab);
            assert!(mask.is_all() && mask.count() == vocab, "{vocab}");
            assert!(!mask.is_allowed(TokenId(vocab)));
            mask.allow(TokenId(vocab));
            mask.forbid(TokenId(vocab));
            assert_eq!(mask, TokenMask::all(vocab));
            assert_eq!(TokenMask::none(vocab).count(), 0);
            assert_eq!(TokenMask::from_words(vocab, vec![0; mask.words().len() + 1]), None);
        }
        let mut mask = TokenMask::none(40);
        mask.allow(TokenId(3));
        mask.allow(TokenId(39));
        assert!(mask.is_allowed(TokenId(39)) && !mask.is_allowed(TokenId(38)));
        assert_eq!(mask.words(), [8, 128]);
        mask.intersect(&[8]);
        assert_eq!(mask.words(), [8, 0]);
        mask.forbid(TokenId(3));
        assert_eq!(mask.count(), 0);
    }
}
