//! Prompt lookup: an n-gram index that finds earlier occurrences of a text's last tokens. Grows
//! with the text; no token is indexed twice.

use std::collections::HashMap;

/// A separator: no match extends beyond it.
pub(super) const BREAK: u32 = u32::MAX;

/// Marks that there is no earlier place.
const NOWHERE: u32 = u32::MAX;

/// Earlier places that are looked at: the latest ones, since a common pair has thousands.
const PLACES_MAX: usize = 64;

/// Tokens that are compared at each: longer matches are as good as certain.
const MATCH_MAX: usize = 16;

/// A text with an index of its bigrams.
#[derive(Default)]
pub(super) struct Lookup {
    text: Vec<u32>,
    /// Where each pair has ended last.
    latest: HashMap<[u32; 2], u32>,
    /// For each token, where the pair that ends with it has ended before.
    earlier: Vec<u32>,
    /// Places before this one count more than later ones.
    preferred: usize,
}

/// An earlier occurrence of the last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The token after it.
    pub(super) next: usize,
    /// Length of the match: 2 or more.
    pub(super) matched: usize,
}

impl Lookup {
    /// Of places that are equally alike, one before `end` is taken.
    pub(super) const fn prefer_before(&mut self, end: usize) {
        self.preferred = end;
    }

    /// Appends tokens.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.push(*token);
        }
    }

    fn push(&mut self, token: u32) {
        let place = self.text.len() as u32;
        let pair = self.text.last().map(|before| [*before, token]);
        let earlier = pair.and_then(|pair| self.latest.insert(pair, place));
        self.earlier.push(earlier.unwrap_or(NOWHERE));
        self.text.push(token);
    }

    /// The earlier place with the longest match before it, the latest of several; none where not
    /// even the last two tokens have stood together before.
    pub(super) fn find(&self) -> Option<Found> {
        let end = self.text.len().checked_sub(1)?;
        let mut best: Option<Found> = None;
        let mut place = self.earlier[end];
        for _ in 0..PLACES_MAX {
            if place == NOWHERE {
                break;
            }
            let at = place as usize;
            let (matched, next) = (self.matched(at, end), at + 1);
            let is_better = best.is_none_or(|best| {
                matched > best.matched || (matched == best.matched && next < self.preferred)
            });
            if is_better {
                best = Some(Found { next, matched });
            }
            place = self.earlier[at];
        }
        best
    }

    /// Tokens before and at two places that are alike.
    fn matched(&self, at: usize, end: usize) -> usize {
        let backwards = |place: usize| self.text[..=place].iter().rev().take(MATCH_MAX);
        backwards(at).zip(backwards(end)).take_while(|(a, b)| a == b && **a != BREAK).count()
    }

    /// Up to `most` tokens from a position on. At the text's end it continues with the tokens that
    /// it has returned, so a loop is followed round.
    pub(super) fn follow(&self, next: usize, most: usize) -> Vec<u32> {
        let mut found: Vec<u32> = Vec::with_capacity(most);
        for place in next..next + most {
            let token = match self.text.get(place) {
                Some(token) => *token,
                None => found[place - self.text.len()],
            };
            if token == BREAK {
                break;
            }
            found.push(token);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(text: &[u32]) -> Lookup {
        let mut lookup = Lookup::default();
        lookup.extend(text);
        lookup
    }

    #[test]
    fn the_longest_match_wins_then_the_latest() {
        let check = |text: &[u32], expected: Option<(usize, usize)>| {
            let expected = expected.map(|(next, matched)| Found { next, matched });
            assert_eq!(lookup(text).find(), expected, "{text:?}");
        };
        check(&[], None);
        check(&[1], None);
        check(&[1, 1], None);
        check(&[1, 2, 1], None);
        check(&[1, 1, 1], Some((2, 2)));
        check(&[1, 2, 3, 1, 2], Some((2, 2)));
        check(&[1, 2, 3, 1, 2, 4, 1, 2], Some((5, 2)));
        check(&[9, 1, 2, 3, 1, 2, 4, 9, 1, 2], Some((3, 3)));
        let long: Vec<u32> = (0..40).chain(0..40).collect();
        check(&long, Some((40, MATCH_MAX)));
        // Nothing is alike across a break.
        check(&[5, BREAK, 1, 2, 5, BREAK, 1, 2], Some((4, 2)));
    }

    #[test]
    fn what_follows_goes_round() {
        assert_eq!(lookup(&[4, 1, 2, 3]).follow(1, 7), [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!(lookup(&[4, 1, BREAK, 3]).follow(0, 7), [4, 1]);
        assert_eq!(lookup(&[4]).follow(0, 3), [4, 4, 4]);
    }

    #[test]
    fn common_pairs_cost_no_more_than_a_bounded_search() {
        let text = lookup(&vec![7; 100_000]);
        assert_eq!(text.find(), Some(Found { next: 99_999, matched: MATCH_MAX }));
    }
}
