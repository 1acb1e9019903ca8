//! Drafts: guesses at the next tokens of a sequence, which are run as further rows of a step and
//! kept where sampling comes to the same tokens. What is guessed decides about speed alone.
//!
//! Rank 0 guesses. Without a model: where the latest tokens have stood before in the request's
//! own text, or in the answer that the client foretells, what followed there may follow here.
//! With a draft model, a small one with the same tokens: what it would say. Every guess is
//! compared with what then comes, run or not, so a request whose guesses are wrong costs nothing
//! and one that begins to repeat itself is noticed.
//!
//! Reading order: [`prompt_lookup`] (where a text has been before), [`model`] (what a small model would
//! say), [`acceptance`] (how often guesses come true), [`budget`] (which of them are worth their rows).

mod acceptance;
mod budget;
mod model;
mod prompt_lookup;

use shardpack_engine_api::TokenId;

use acceptance::{Odds, Trust};
pub(super) use budget::{Costs, MAX_STEP_DRAFTS, guess_cost};
pub use model::DraftModelError;
pub(super) use model::{DraftModel, Guess, Guesser, Text};
use prompt_lookup::{BREAK, Found, Lookup};

/// Most drafts of one sequence in a step: more than pay except beside a prompt that is being read.
pub(super) const MAX_DRAFTS: usize = 15;

/// The beginning of a foretold answer is trusted as if so many tokens before it were alike.
const TOLD_MATCH: usize = 8;

/// A guess from the text that is as likely as this is not asked a model about.
const LIKELY: f32 = 0.7;

/// Guesses for one request.
pub(super) struct Drafter {
    lookup: Lookup,
    odds: Odds,
    trust: Trust,
    /// Length of the answer as the client foretells it, with which the lookup's text begins.
    told: usize,
    /// Where in it the real answer goes on, and how many tokens before that were alike.
    going_on: Option<Found>,
    /// Tokens of the sequence that the lookup has taken.
    taken: usize,
    proposal: Proposal,
    /// What a draft model would say.
    guesses: Vec<Guess>,
    /// Tokens of the answer that were foretold at their place.
    told_right: u32,
}

/// What may come next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Proposal {
    tokens: Vec<u32>,
    /// How many tokens before it were alike.
    matched: usize,
    /// Where it begins in the foretold answer, if it is from there.
    told_at: Option<usize>,
}

impl Drafter {
    /// Without a text yet. `told` is the answer that the client expects.
    pub(super) fn new(told: &[TokenId]) -> Self {
        let told: Vec<u32> = told.iter().map(|token| token.0).collect();
        let mut lookup = Lookup::default();
        if !told.is_empty() {
            lookup.extend(&told);
            lookup.extend(&[BREAK]);
            lookup.prefer_before(told.len());
        }
        let begins = (!told.is_empty()).then_some(Found { next: 0, matched: TOLD_MATCH });
        Self {
            lookup,
            odds: Odds::default(),
            trust: Trust::default(),
            told: told.len(),
            going_on: begins,
            taken: 0,
            proposal: Proposal::default(),
            guesses: Vec::new(),
            told_right: 0,
        }
    }

    /// Guesses what follows `tokens`, the sequence so far, which only ever grows. Nothing is
    /// guessed beyond one of the tokens `stop`.
    pub(super) fn propose(&mut self, tokens: &[u32], stop: &[TokenId]) {
        self.lookup.extend(&tokens[self.taken..]);
        self.taken = tokens.len();
        self.guesses.clear();
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
        self.proposal = Proposal { tokens, matched, told_at: (next < self.told).then_some(next) };
    }

    /// Whether a draft model may know better than the text.
    pub(super) fn asks_model(&self) -> bool {
        self.proposal.tokens.is_empty() || self.odds.of(self.proposal.matched) < LIKELY
    }

    /// What a draft model would say in the place of the last proposal.
    pub(super) fn take_guesses(&mut self, guesses: Vec<Guess>) {
        self.guesses = guesses;
    }

    /// Whether it is the model's guesses that are worth more.
    fn prefers_model(&self) -> bool {
        let Some(first) = self.guesses.first() else { return false };
        self.proposal.tokens.is_empty()
            || self.trust.of(first.chance) > self.odds.of(self.proposal.matched)
    }

    /// How likely it is that each of the first guesses comes true together with those before.
    pub(super) fn chances(&self, most: usize) -> Vec<f32> {
        let mut chance = 1.0;
        let mut with = |next: f32| {
            chance *= next;
            chance
        };
        let most = most.min(MAX_DRAFTS);
        if self.prefers_model() {
            let guesses = self.guesses.iter().take(most);
            return guesses.map(|guess| with(self.trust.of(guess.chance))).collect();
        }
        let count = self.proposal.tokens.len().min(most);
        (0..count).map(|place| with(self.odds.of(self.proposal.matched + place))).collect()
    }

    /// The first guesses.
    pub(super) fn drafts(&self, count: usize) -> Vec<u32> {
        if self.prefers_model() {
            return self.guesses[..count].iter().map(|guess| guess.token).collect();
        }
        self.proposal.tokens[..count].to_vec()
    }

    /// Takes the tokens that came after the last proposal.
    pub(super) fn learn(&mut self, came: &[u32]) {
        for (guess, token) in std::mem::take(&mut self.guesses).into_iter().zip(came) {
            self.trust.learn(guess.chance, guess.token == *token);
            if guess.token != *token {
                break;
            }
        }
        let Proposal { tokens, matched, told_at } = std::mem::take(&mut self.proposal);
        let mut right = 0;
        for (guess, token) in tokens.iter().zip(came) {
            self.odds.learn(matched + right, guess == token);
            if guess != token {
                break;
            }
            right += 1;
        }
        let told_at = told_at.inspect(|_| self.told_right += right as u32);
        let next = told_at.map(|at| at + right).filter(|next| *next < self.told);
        let all_right = right == came.len();
        self.going_on =
            next.filter(|_| all_right).map(|next| Found { next, matched: matched + right });
    }

    /// Of the foretold answer, how many tokens came at their place, and how many did not.
    pub(super) fn told(&self) -> [u32; 2] {
        let all = self.told as u32;
        let right = self.told_right.min(all);
        [right, all - right]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs through a text as an engine would that has no drafts to spare; returns how many of
    /// the answer's tokens were guessed.
    fn guessed(told: &[u32], prompt: &[u32], answer: &[u32]) -> (usize, Drafter) {
        let told: Vec<TokenId> = told.iter().map(|token| TokenId(*token)).collect();
        let mut drafter = Drafter::new(&told);
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
    fn what_the_prompt_says_is_guessed_again() {
        let prompt: Vec<u32> = (0..50).collect();
        // Two tokens have to be alike first.
        assert_eq!(guessed(&[], &prompt, &prompt[10..30]).0, 18);
        // What was never said is not guessed.
        let new: Vec<u32> = (100..150).collect();
        assert_eq!(guessed(&[], &prompt, &new).0, 0);
        // A loop is guessed beyond its first time round.
        let round: Vec<u32> = [7, 8, 9].repeat(10);
        assert_eq!(guessed(&[], &[1], &round).0, 30 - 5);
    }

    #[test]
    fn a_foretold_answer_is_found_again_after_a_difference() {
        let told: Vec<u32> = (10..60).collect();
        let (right, drafter) = guessed(&told, &[1, 2, 3], &told);
        assert_eq!((right, drafter.told()), (50, [50, 0]), "from its first token on");
        let mut other = told.clone();
        other[20] = 99;
        let (right, drafter) = guessed(&told, &[1, 2, 3], &other);
        // The changed token and two until the place is found again.
        assert_eq!((right, drafter.told()), (47, [47, 3]));
        assert_eq!(guessed(&told, &[1], &[5; 9]).1.told(), [0, 50]);
    }

    #[test]
    fn nothing_is_guessed_beyond_a_stop_token() {
        let mut drafter = Drafter::new(&[]);
        drafter.propose(&[1, 2, 3, 4, 5, 6, 1, 2], &[TokenId(5)]);
        assert_eq!(drafter.drafts(2), [3, 4]);
        assert_eq!(drafter.chances(15).len(), 2);
    }

    #[test]
    fn wrong_guesses_lose_their_chances_and_right_ones_win_them() {
        let mut drafter = Drafter::new(&[]);
        let mut tokens = vec![1, 2, 3, 4, 5];
        let chance = |drafter: &mut Drafter, tokens: &[u32]| {
            drafter.propose(tokens, &[]);
            drafter.chances(1).first().copied().unwrap_or(0.0)
        };
        tokens.extend([1, 2]);
        let first = chance(&mut drafter, &tokens);
        for other in 10..40 {
            drafter.learn(&[other]);
            tokens.extend([other, 1, 2]);
            chance(&mut drafter, &tokens);
        }
        let late = chance(&mut drafter, &tokens);
        assert!(late < first / 4.0, "{first} {late}");
        for _ in 0..30 {
            let next = drafter.drafts(1)[0];
            drafter.learn(&[next]);
            tokens.extend([next, 1, 2]);
            chance(&mut drafter, &tokens);
        }
        assert!(chance(&mut drafter, &tokens) > first);
    }
}
