//! Speculative decoding: draft tokens are run as further rows of a step and accepted where sampling
//! gives the same tokens. They change speed, never the output.
//!
//! Rank 0 proposes draft tokens. Prompt lookup needs no model: it finds the latest tokens earlier in
//! the request's own text, or in the client's predicted output, and proposes what followed there.
//! A draft model, a small model with the same tokenizer, proposes its most likely tokens. Every
//! proposal is compared with the sampled tokens, run or not, so the acceptance rate is known even
//! while no drafts are run: a request whose drafts are rejected costs nothing, and one that starts
//! to repeat itself is noticed.
//!
//! Reading order: [`prompt_lookup`] (n-gram matches), [`model`] (the draft model), [`acceptance`]
//! (acceptance rates), [`budget`] (how many draft tokens a step runs).

mod acceptance;
mod budget;
mod model;
mod prompt_lookup;

use shardpack_engine_api::TokenId;

use acceptance::{LookupAcceptance, ModelAcceptance};
pub(super) use budget::{MAX_STEP_DRAFTS, RowCosts, draft_token_cost};
pub use model::DraftModelError;
pub(super) use model::{DraftInput, DraftModel, DraftProposer, DraftToken};
use prompt_lookup::{BREAK, Found, Lookup};

/// Most draft tokens of one sequence in a step: more than pay, except next to a prefill.
pub(super) const MAX_DRAFTS: usize = 15;

/// The start of a predicted output counts as a match of this many tokens.
const PREDICTION_MATCH: usize = 8;

/// A prompt-lookup draft with at least this acceptance rate is not asked of the draft model.
const LIKELY_RATE: f32 = 0.7;

/// The draft proposer of one request.
pub(super) struct Drafter {
    lookup: Lookup,
    lookup_acceptance: LookupAcceptance,
    model_acceptance: ModelAcceptance,
    /// Length of the client's predicted output, with which the lookup's text begins.
    predicted: usize,
    /// Where in it the real answer goes on, and how many tokens before that match.
    going_on: Option<Found>,
    /// Tokens of the sequence that the lookup has taken.
    taken: usize,
    proposal: Proposal,
    /// Proposed by the draft model.
    model_drafts: Vec<DraftToken>,
    /// Tokens of the answer that the predicted output had at the right position.
    prediction_accepted: u32,
}

/// Draft tokens of prompt lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Proposal {
    tokens: Vec<u32>,
    /// How many tokens before it match.
    matched: usize,
    /// Where it begins in the predicted output, if it is from there.
    prediction_at: Option<usize>,
}

impl Drafter {
    /// Without a text yet. `predicted` is the client's predicted output.
    pub(super) fn new(predicted: &[TokenId]) -> Self {
        let predicted: Vec<u32> = predicted.iter().map(|token| token.0).collect();
        let mut lookup = Lookup::default();
        if !predicted.is_empty() {
            lookup.extend(&predicted);
            lookup.extend(&[BREAK]);
            lookup.prefer_before(predicted.len());
        }
        let begins =
            (!predicted.is_empty()).then_some(Found { next: 0, matched: PREDICTION_MATCH });
        Self {
            lookup,
            lookup_acceptance: LookupAcceptance::default(),
            model_acceptance: ModelAcceptance::default(),
            predicted: predicted.len(),
            going_on: begins,
            taken: 0,
            proposal: Proposal::default(),
            model_drafts: Vec::new(),
            prediction_accepted: 0,
        }
    }

    /// Proposes what follows `tokens`, the sequence so far, which only ever grows. Nothing is
    /// proposed beyond one of the tokens `stop`.
    pub(super) fn propose(&mut self, tokens: &[u32], stop: &[TokenId]) {
        self.lookup.extend(&tokens[self.taken..]);
        self.taken = tokens.len();
        self.model_drafts.clear();
        let Some(Found { next, matched }) = self.going_on.or_else(|| self.lookup.find()) else {
            self.proposal = Proposal::default();
            return;
        };
        // One more than is ever run, so that all of a step's tokens are compared.
        let mut tokens = self.lookup.follow(next, MAX_DRAFTS + 1);
        let is_stop = |token: &u32| stop.contains(&TokenId(*token));
        if let Some(end) = tokens.iter().position(is_stop) {
            tokens.truncate(end);
        }
        self.proposal =
            Proposal { tokens, matched, prediction_at: (next < self.predicted).then_some(next) };
    }

    /// Whether the draft model is worth asking: prompt lookup has no likely match.
    pub(super) fn wants_draft_model(&self) -> bool {
        self.proposal.tokens.is_empty()
            || self.lookup_acceptance.rate(self.proposal.matched) < LIKELY_RATE
    }

    /// Sets the draft model's tokens for the same positions as the last proposal.
    pub(super) fn set_model_drafts(&mut self, drafts: Vec<DraftToken>) {
        self.model_drafts = drafts;
    }

    /// Whether the draft model's tokens are more likely to be accepted.
    fn prefers_model(&self) -> bool {
        let Some(first) = self.model_drafts.first() else { return false };
        self.proposal.tokens.is_empty()
            || self.model_acceptance.rate(first.probability)
                > self.lookup_acceptance.rate(self.proposal.matched)
    }

    /// The probability that each draft token is accepted together with those before it.
    pub(super) fn probabilities(&self, most: usize) -> Vec<f32> {
        let mut probability = 1.0;
        let mut cumulative = |next: f32| {
            probability *= next;
            probability
        };
        let most = most.min(MAX_DRAFTS);
        if self.prefers_model() {
            let drafts = self.model_drafts.iter().take(most);
            return drafts
                .map(|draft| cumulative(self.model_acceptance.rate(draft.probability)))
                .collect();
        }
        let count = self.proposal.tokens.len().min(most);
        (0..count)
            .map(|place| cumulative(self.lookup_acceptance.rate(self.proposal.matched + place)))
            .collect()
    }

    /// The first draft tokens.
    pub(super) fn drafts(&self, count: usize) -> Vec<u32> {
        if self.prefers_model() {
            return self.model_drafts[..count].iter().map(|draft| draft.token).collect();
        }
        self.proposal.tokens[..count].to_vec()
    }

    /// Updates acceptance rates with the tokens that were sampled after the last proposal.
    pub(super) fn learn(&mut self, sampled: &[u32]) {
        for (draft, token) in std::mem::take(&mut self.model_drafts).into_iter().zip(sampled) {
            self.model_acceptance.learn(draft.probability, draft.token == *token);
            if draft.token != *token {
                break;
            }
        }
        let Proposal { tokens, matched, prediction_at } = std::mem::take(&mut self.proposal);
        let mut right = 0;
        for (draft, token) in tokens.iter().zip(sampled) {
            self.lookup_acceptance.learn(matched + right, draft == token);
            if draft != token {
                break;
            }
            right += 1;
        }
        let prediction_at = prediction_at.inspect(|_| self.prediction_accepted += right as u32);
        let next = prediction_at.map(|at| at + right).filter(|next| *next < self.predicted);
        let all_right = right == sampled.len();
        self.going_on =
            next.filter(|_| all_right).map(|next| Found { next, matched: matched + right });
    }

    /// How many tokens of the predicted output were accepted, and how many were not.
    pub(super) fn prediction_tokens(&self) -> [u32; 2] {
        let all = self.predicted as u32;
        let right = self.prediction_accepted.min(all);
        [right, all - right]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs through a text as an engine that never runs drafts; returns how many of the answer's
    /// tokens were proposed.
    fn accepted_count(predicted: &[u32], prompt: &[u32], answer: &[u32]) -> (usize, Drafter) {
        let predicted: Vec<TokenId> = predicted.iter().map(|token| TokenId(*token)).collect();
        let mut drafter = Drafter::new(&predicted);
        let mut tokens = prompt.to_vec();
        let mut right = 0;
        for token in answer {
            drafter.propose(&tokens, &[]);
            right += usize::from(drafter.proposal.tokens.first() == Some(token));
            drafter.learn(&[*token]);
            tokens.push(*token);
        }
        (right, drafter)
    }

    #[test]
    fn repeated_prompt_text_is_drafted() {
        let prompt: Vec<u32> = (0..50).collect();
        // Two tokens have to match first.
        assert_eq!(accepted_count(&[], &prompt, &prompt[10..30]).0, 18);
        // New text is not proposed.
        let new: Vec<u32> = (100..150).collect();
        assert_eq!(accepted_count(&[], &prompt, &new).0, 0);
        // A loop is proposed from its second round on.
        let round: Vec<u32> = [7, 8, 9].repeat(10);
        assert_eq!(accepted_count(&[], &[1], &round).0, 30 - 5);
    }

    #[test]
    fn a_predicted_output_is_matched_again_after_a_difference() {
        let predicted: Vec<u32> = (10..60).collect();
        let (right, drafter) = accepted_count(&predicted, &[1, 2, 3], &predicted);
        assert_eq!((right, drafter.prediction_tokens()), (50, [50, 0]), "from its first token on");
        let mut other = predicted.clone();
        other[20] = 99;
        let (right, drafter) = accepted_count(&predicted, &[1, 2, 3], &other);
        // The changed token and two until the place is found again.
        assert_eq!((right, drafter.prediction_tokens()), (47, [47, 3]));
        assert_eq!(accepted_count(&predicted, &[1], &[5; 9]).1.prediction_tokens(), [0, 50]);
    }

    #[test]
    fn nothing_is_drafted_beyond_a_stop_token() {
        let mut drafter = Drafter::new(&[]);
        drafter.propose(&[1, 2, 3, 4, 5, 6, 1, 2], &[TokenId(5)]);
        assert_eq!(drafter.drafts(2), [3, 4]);
        assert_eq!(drafter.probabilities(15).len(), 2);
    }

    #[test]
    fn rejected_drafts_lower_the_acceptance_rate_and_accepted_ones_raise_it() {
        let mut drafter = Drafter::new(&[]);
        let mut tokens = vec![1, 2, 3, 4, 5];
        let probability = |drafter: &mut Drafter, tokens: &[u32]| {
            drafter.propose(tokens, &[]);
            drafter.probabilities(1).first().copied().unwrap_or(0.0)
        };
        tokens.extend([1, 2]);
        let first = probability(&mut drafter, &tokens);
        for other in 10..40 {
            drafter.learn(&[other]);
            tokens.extend([other, 1, 2]);
            probability(&mut drafter, &tokens);
        }
        let late = probability(&mut drafter, &tokens);
        assert!(late < first / 4.0, "{first} {late}");
        for _ in 0..30 {
            let next = drafter.drafts(1)[0];
            drafter.learn(&[next]);
            tokens.extend([next, 1, 2]);
            probability(&mut drafter, &tokens);
        }
        assert!(probability(&mut drafter, &tokens) > first);
    }
}
