//! Acceptance rates of one request's draft tokens: of prompt lookup by the length of the match, of
//! the draft model by the probability that it gives a token.

/// Bins of match lengths: of 2 tokens, of 3, of 4 to 7, of 8 to 15, of more.
const BINS: usize = 5;

/// Rates before anything was observed.
const INITIAL: [f32; BINS] = [0.15, 0.3, 0.5, 0.8, 0.9];

/// Weight of the latest draft token in the moving average: the last ten or so decide.
const RATE: f32 = 0.1;

/// Upper bounds of the bins of the draft model's probabilities; the last bin has none.
const MODEL_BINS: [f32; BINS - 1] = [0.2, 0.4, 0.6, 0.8];

/// Initial rates: the middle of each bin.
const INITIAL_OF_MODEL: [f32; BINS] = [0.1, 0.3, 0.5, 0.7, 0.9];

/// Acceptance rate of prompt lookup by match length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LookupAcceptance([f32; BINS]);

impl Default for LookupAcceptance {
    fn default() -> Self {
        Self(INITIAL)
    }
}

/// Acceptance rate of the draft model by the probability that it gives a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModelAcceptance([f32; BINS]);

impl Default for ModelAcceptance {
    fn default() -> Self {
        Self(INITIAL_OF_MODEL)
    }
}

fn model_bin(probability: f32) -> usize {
    MODEL_BINS.iter().filter(|most| probability > **most).count()
}

/// Moves a rate towards what was observed.
fn update(rate: &mut f32, is_accepted: bool) {
    *rate += RATE * (f32::from(u8::from(is_accepted)) - *rate);
}

const fn match_bin(matched: usize) -> usize {
    match matched {
        0..=2 => 0,
        3 => 1,
        4..=7 => 2,
        8..=15 => 3,
        _ => 4,
    }
}

impl LookupAcceptance {
    /// Acceptance rate after a match of this length.
    pub(super) const fn rate(&self, matched: usize) -> f32 {
        self.0[match_bin(matched)]
    }

    /// A draft token was accepted or rejected.
    pub(super) fn learn(&mut self, matched: usize, is_accepted: bool) {
        update(&mut self.0[match_bin(matched)], is_accepted);
    }
}

impl ModelAcceptance {
    /// Acceptance rate of a token that the model gives this probability.
    pub(super) fn rate(&self, probability: f32) -> f32 {
        self.0[model_bin(probability)]
    }

    /// A draft token was accepted or rejected.
    pub(super) fn learn(&mut self, probability: f32, is_accepted: bool) {
        update(&mut self.0[model_bin(probability)], is_accepted);
    }
}
