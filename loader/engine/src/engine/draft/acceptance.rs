//! How often guesses of one request come true: of those from its text, by how much of the text
//! before them was alike; of a draft model's, by how sure it was.

/// Kinds of matches: of 2 tokens, of 3, of 4 to 7, of 8 to 15, of more.
const KINDS: usize = 5;

/// What is believed before anything was seen.
const FIRST: [f32; KINDS] = [0.15, 0.3, 0.5, 0.8, 0.9];

/// How much the latest guess counts: the last ten or so decide.
const RATE: f32 = 0.1;

/// What is believed of a draft model's guesses: up to each of these chances by its own account, and
/// above the last one.
const SURE: [f32; KINDS - 1] = [0.2, 0.4, 0.6, 0.8];

/// The middle of each of those.
const FIRST_OF_MODEL: [f32; KINDS] = [0.1, 0.3, 0.5, 0.7, 0.9];

/// One figure for each kind of match.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Odds([f32; KINDS]);

impl Default for Odds {
    fn default() -> Self {
        Self(FIRST)
    }
}

/// One figure for each part of the chances that a draft model gives its guesses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trust([f32; KINDS]);

impl Default for Trust {
    fn default() -> Self {
        Self(FIRST_OF_MODEL)
    }
}

fn part(chance: f32) -> usize {
    SURE.iter().filter(|most| chance > **most).count()
}

/// Moves a figure towards what has been seen.
fn learn(odds: &mut f32, is_right: bool) {
    *odds += RATE * (f32::from(u8::from(is_right)) - *odds);
}

const fn kind(matched: usize) -> usize {
    match matched {
        0..=2 => 0,
        3 => 1,
        4..=7 => 2,
        8..=15 => 3,
        _ => 4,
    }
}

impl Odds {
    /// How likely a guess after a match of this length is right.
    pub(super) const fn of(&self, matched: usize) -> f32 {
        self.0[kind(matched)]
    }

    /// A guess has come true or not.
    pub(super) fn learn(&mut self, matched: usize, is_right: bool) {
        learn(&mut self.0[kind(matched)], is_right);
    }
}

impl Trust {
    /// How likely a guess is right that the model gives this chance.
    pub(super) fn of(&self, chance: f32) -> f32 {
        self.0[part(chance)]
    }

    /// A guess has come true or not.
    pub(super) fn learn(&mut self, chance: f32, is_right: bool) {
        learn(&mut self.0[part(chance)], is_right);
    }
}
