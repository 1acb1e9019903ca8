//! Sampling parameters of a sequence, and the token counts that penalties need.

use std::{borrow::Cow, collections::BTreeMap};

use shardpack_engine_api::{PromptOutput, Sampling, TokenId};

use super::Row;

/// Sampling parameters of a sequence; fixed when it begins, and the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::engine) struct SamplingParams {
    pub(in crate::engine) sampling: Sampling,
    /// Alternatives that are reported with each token.
    pub(in crate::engine) logprobs: Option<u32>,
    /// What is wanted of the prompt.
    pub(in crate::engine) prompt_output: PromptOutput,
    /// Tokens of the prompt: what follows is the answer.
    pub(in crate::engine) prompt_len: u32,
    /// Tokens that may not come before a number of tokens is reached, and that number.
    pub(in crate::engine) forbidden: Vec<u32>,
    pub(in crate::engine) forbidden_before: u32,
}

impl SamplingParams {
    /// Whether penalties need the counts of earlier tokens.
    pub(in crate::engine) fn needs_history(&self) -> bool {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        [repetition_penalty, presence_penalty, frequency_penalty] != [1.0, 0.0, 0.0]
    }
}

/// How a token is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SamplingMethod {
    /// The highest logit.
    Greedy,
    /// The highest noisy logit.
    Gumbel,
    /// The highest noisy logit of those that the filters keep.
    Filtered,
}

/// A sequence's sampling parameters and token counts.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Sampler {
    pub(super) params: SamplingParams,
    seen: BTreeMap<u32, TokenCount>,
}

#[derive(Clone, Copy, Debug, Default)]
struct TokenCount {
    in_answer: u32,
}

impl Sampler {
    pub(in crate::engine) const fn new(params: SamplingParams) -> Self {
        Self { params, seen: BTreeMap::new() }
    }

    pub(in crate::engine) const fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Takes tokens of the sequence, the first at `position`.
    pub(in crate::engine) fn take(&mut self, position: u32, tokens: &[u32]) {
        if !self.params.needs_history() {
            return;
        }
        for (position, token) in (position..).zip(tokens) {
            let seen = self.seen.entry(*token).or_default();
            seen.in_answer += u32::from(position >= self.params.prompt_len);
        }
    }

    pub(super) fn method(&self) -> SamplingMethod {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.params.sampling;
        if temperature == 0.0 {
            SamplingMethod::Greedy
        } else if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            SamplingMethod::Gumbel
        } else {
            SamplingMethod::Filtered
        }
    }

    fn penalise(&self, seen: TokenCount, logit: f32) -> f32 {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.params.sampling;
        let logit =
            if logit > 0.0 { logit / repetition_penalty } else { logit * repetition_penalty };
        let presence = if seen.in_answer > 0 { presence_penalty } else { 0.0 };
        logit - presence - frequency_penalty * seen.in_answer as f32
    }
}

impl Row<'_> {
    /// Token counts with the row's draft tokens included.
    fn counts_with_drafts(&self) -> BTreeMap<u32, TokenCount> {
        let mut ahead = BTreeMap::new();
        if self.sampler.params.needs_history() {
            for token in self.drafts {
                let seen = || self.sampler.seen.get(token).copied().unwrap_or_default();
                // Drafts are of the answer.
                ahead.entry(*token).or_insert_with(seen).in_answer += 1;
            }
        }
        ahead
    }

    /// The logits of the tokens from `first` on after bias, penalties and masks: a forbidden token
    /// is NaN.
    pub(super) fn adjusted<'a>(&self, logits: &'a [f32], first: u32) -> Cow<'a, [f32]> {
        let SamplingParams { sampling, forbidden, forbidden_before, .. } = &self.sampler.params;
        let forbidden = if self.index < *forbidden_before { forbidden.as_slice() } else { &[] };
        let seen = &self.sampler.seen;
        let ahead = self.counts_with_drafts();
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
            *logit = self.sampler.penalise(*seen, *logit);
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
