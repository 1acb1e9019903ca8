//! Stop texts, found in streamed text.

/// Finds the first stop text in a stream and holds back what may be the beginning of one.
///
/// Invariant: what is handed out does not depend on how the text was cut into pieces. The match
/// that is complete first counts; of those complete at the same place, the longest.
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// What came of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub enum Matched {
    /// Text that is certainly part of the answer, perhaps none.
    Text(String),
    /// The rest of the answer, and the number of the stop text that follows it.
    Stop(String, usize),
}

impl StopMatcher {
    /// Matches any of these texts.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes the next piece of an answer.
    pub fn push(&mut self, piece: &str) -> Matched {
        self.held.push_str(piece);
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| {
                self.held.find(stop).map(|start| (start + stop.len(), start, index))
            })
            .min();
        if let Some((_, start, index)) = first {
            self.held.truncate(start);
            return Matched::Stop(std::mem::take(&mut self.held), index);
        }
        let rest = self.held.split_off(self.certain());
        Matched::Text(std::mem::replace(&mut self.held, rest))
    }

    /// What was held back, when nothing follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes in front of the longest end that begins a stop text.
    fn certain(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let nearest = self.held.len().saturating_sub(longest.saturating_sub(1));
        (nearest..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| self.stops.iter().any(|stop| stop.starts_with(&self.held[start..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds pieces and returns the answer and whether it was stopped.
    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(ToString::to_string).collect());
        let mut answer = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Matched::Text(text) => answer.push_str(&text),
                Matched::Stop(text, _) => return (answer + &text, true),
            }
        }
        (answer + &matcher.finish(), false)
    }

    /// Every way to cut the text in three gives the same.
    fn check(stops: &[&str], text: &str, answer: &str, stopped: bool) {
        let expected = (answer.to_owned(), stopped);
        let letters = text.split("").filter(|piece| !piece.is_empty());
        assert_eq!(run(stops, letters), expected, "{stops:?} {text} by letters");
        let cuts: Vec<usize> = (0..=text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        for &a in &cuts {
            for &b in cuts.iter().filter(|&&b| b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(run(stops, pieces), expected, "{stops:?} {pieces:?}");
            }
        }
    }

    #[test]
    fn answer_ends_before_the_stop_text_however_it_arrives() {
        check(&[], "abc", "abc", false);
        check(&["b"], "abc", "a", true);
        check(&["bcd"], "abc", "abc", false);
        check(&["bcd"], "abcbcd", "abc", true);
        check(&["aab"], "aaaab", "aa", true);
        check(&["\n\n", "User:"], "one\ntwo\n\nUser: x", "one\ntwo", true);
        check(&["ä€"], "x€ä€", "x€", true);
        check(&["abcd", "bc"], "xabcd", "xa", true);
        check(&["bc", "abc"], "xabcd", "x", true);
        check(&["abc"], "", "", false);
    }

    #[test]
    fn nothing_more_than_needed_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["stop".to_owned()]);
        assert_eq!(matcher.push("hello st"), Matched::Text("hello ".to_owned()));
        assert_eq!(matcher.push("art"), Matched::Text("start".to_owned()));
    }
}
