//! How often guesses of one request come true, by how much of the text before them was alike.

/// Kinds of matches: of 2 tokens, of 3, of 4 to 7, of 8 to 15, of more.
const KINDS: usize = 5;

/// What is believed before anything was seen.
const FIRST: [f32; KINDS] = [0.15, 0.3, 0.5, 0.8, 0.9];

/// How much the latest guess counts: the last ten or so decide.
const RATE: f32 = 0.1;

/// One figure for each kind of match.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Odds([f32; KINDS]);

impl Default for Odds {
    fn default() -> Self {
        Self(FIRST)
    }
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
        let odds = &mut self.0[kind(matched)];
        *odds += RATE * (f32::from(u8::from(is_right)) - *odds);
    }
}
