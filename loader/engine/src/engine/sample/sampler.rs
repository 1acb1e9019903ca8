//! What a sequence asks of its tokens, and what of its history that depends on.

use std::{borrow::Cow, collections::BTreeMap};

use shardpack_engine_api::Sampling;
use shardpack_engine_api::TokenId;

use super::Row;

/// How a sequence's tokens are chosen; fixed when it begins, and the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::engine) struct Wishes {
    pub(in crate::engine) sampling: Sampling,
    /// Alternatives that are reported with each token.
    pub(in crate::engine) logprobs: Option<u32>,
    /// Tokens of the prompt: what follows is the answer.
    pub(in crate::engine) prompt_len: u32,
    /// Tokens that may not come before a number of tokens is reached, and that number.
    pub(in crate::engine) forbidden: Vec<u32>,
    pub(in crate::engine) forbidden_before: u32,
}

impl Wishes {
    /// Whether the choice depends on what came before.
    pub(in crate::engine) fn needs_history(&self) -> bool {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        [repetition_penalty, presence_penalty, frequency_penalty] != [1.0, 0.0, 0.0]
    }
}

/// Which way a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The highest logit.
    Greedy,
    /// The highest noisy logit.
    Noise,
    /// The highest noisy logit of those that the filters keep.
    Filtered,
}

/// A sequence's wishes and history.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Chooser {
    pub(super) wishes: Wishes,
    seen: BTreeMap<u32, Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    in_answer: u32,
}

impl Chooser {
    pub(in crate::engine) const fn new(wishes: Wishes) -> Self {
        Self { wishes, seen: BTreeMap::new() }
    }

    /// Takes tokens of the sequence, the first at `position`.
    pub(in crate::engine) fn take(&mut self, position: u32, tokens: &[u32]) {
        if !self.wishes.needs_history() {
            return;
        }
        for (position, token) in (position..).zip(tokens) {
            let seen = self.seen.entry(*token).or_default();
            seen.in_answer += u32::from(position >= self.wishes.prompt_len);
        }
    }

    pub(super) fn way(&self) -> Way {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.wishes.sampling;
        if temperature == 0.0 {
            Way::Greedy
        } else if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            Way::Noise
        } else {
            Way::Filtered
        }
    }

    fn penalise(&self, seen: Seen, logit: f32) -> f32 {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.wishes.sampling;
        let logit =
            if logit > 0.0 { logit / repetition_penalty } else { logit * repetition_penalty };
        let presence = if seen.in_answer > 0 { presence_penalty } else { 0.0 };
        logit - presence - frequency_penalty * seen.in_answer as f32
    }
}

impl Row<'_> {
    /// What the chooser will have seen of the drafts' tokens once they count.
    fn seen_ahead(&self) -> BTreeMap<u32, Seen> {
        let mut ahead = BTreeMap::new();
        if self.chooser.wishes.needs_history() {
            for token in self.ahead {
                let seen = || self.chooser.seen.get(token).copied().unwrap_or_default();
                // Drafts are of the answer.
                ahead.entry(*token).or_insert_with(seen).in_answer += 1;
            }
        }
        ahead
    }

    /// The logits of the tokens from `first` on as they count for the choice: what may not come
    /// is not a number.
    pub(super) fn adjusted<'a>(&self, logits: &'a [f32], first: u32) -> Cow<'a, [f32]> {
        let Wishes { sampling, forbidden, forbidden_before, .. } = &self.chooser.wishes;
        let forbidden = if self.index < *forbidden_before { forbidden.as_slice() } else { &[] };
        let seen = &self.chooser.seen;
        let ahead = self.seen_ahead();
        if self.mask.is_none()
            && forbidden.is_empty()
            && sampling.logit_bias.is_empty()
            && seen.is_empty()
            && ahead.is_empty()
        {
            return Cow::Borrowed(logits);
        }
        let mut adjusted = logits.to_vec();
        let place = |token: u32| token.checked_sub(first).map(|index| index as usize);
        for (token, bias) in &sampling.logit_bias {
            if let Some(logit) = place(token.0).and_then(|index| adjusted.get_mut(index)) {
                *logit += bias;
            }
        }
        let here = first..first.saturating_add(logits.len() as u32);
        let before = seen.range(here.clone()).filter(|(token, _)| !ahead.contains_key(token));
        for (token, seen) in before.chain(ahead.range(here)) {
            let logit = &mut adjusted[(token - first) as usize];
            *logit = self.chooser.penalise(*seen, *logit);
        }
        for token in forbidden {
            if let Some(logit) = place(*token).and_then(|index| adjusted.get_mut(index)) {
                *logit = f32::NAN;
            }
        }
        if let Some(mask) = self.mask {
            for (token, logit) in (first..).zip(&mut adjusted) {
                if !mask.is_allowed(TokenId(token)) {
                    *logit = f32::NAN;
                }
            }
        }
        Cow::Owned(adjusted)
    }
}
