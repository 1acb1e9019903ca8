//! An end to the digits of numbers. Grammars of JSON allow endless ones, and a model that has begun
//! to repeat itself writes them until its tokens end. It must not know which grammar is enforced.

use llguidance::toktrie::{SimpleVob, TokTrie};
use shardpack_engine_api::{TokenId, TokenMask};

/// Digits in a row: as many as the largest integer of 64 bits has, and more than a double can tell
/// apart.
const DIGITS_MAX: u32 = 20;
/// Digits of an exponent, so that with as many digits before it the number is finite as a double.
const EXPONENT_DIGITS_MAX: u32 = 2;

/// The number that is being written, if one is.
#[derive(Clone, Debug, Default)]
pub(super) struct NumberEnd {
    /// Digits in a row so far.
    digits: u32,
    /// Whether they are an exponent's.
    is_exponent: bool,
    /// Whether a quotation mark stands before it: then it is text.
    is_quoted: bool,
    previous: u8,
}

impl NumberEnd {
    /// Takes what was written next.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            let after_digit = self.previous.is_ascii_digit();
            match byte {
                b'0'..=b'9' => self.digits += 1,
                b'e' | b'E' if after_digit => (self.digits, self.is_exponent) = (0, true),
                b'+' | b'-' if matches!(self.previous, b'e' | b'E') => self.digits = 0,
                b'.' | b'-' => (self.digits, self.is_exponent) = (0, false),
                other => {
                    (self.digits, self.is_exponent) = (0, false);
                    self.is_quoted = matches!(other, b'"' | b'\'');
                }
            }
            self.previous = byte;
        }
    }

    /// Digits that may still follow; nothing where the end is far, or where this is text.
    const fn room(&self) -> Option<u32> {
        match (self.is_quoted, self.is_exponent) {
            (false, true) => Some(EXPONENT_DIGITS_MAX.saturating_sub(self.digits)),
            (false, false) if self.digits >= DIGITS_MAX => Some(0),
            _ => None,
        }
    }

    /// Forbids the tokens that would make the number too long, unless nothing else may follow, or
    /// letters may, since then this is text too. `allowed` is what the grammar allows.
    pub(super) fn bound(&self, trie: &TokTrie, allowed: &SimpleVob, mask: &mut TokenMask) {
        let Some(room) = self.room() else { return };
        let (mut too_long, mut goes_on) = (Vec::new(), false);
        for token in 0..mask.vocab_size().min(trie.vocab_size() as u32) {
            if !allowed.is_allowed(token) {
                continue;
            }
            let bytes = trie.token(token);
            let first = bytes.first().copied().unwrap_or_default();
            if first.is_ascii_alphabetic() && !matches!(first, b'e' | b'E') {
                return;
            }
            let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
            if digits > room as usize {
                too_long.push(TokenId(token));
            } else {
                goes_on = true;
            }
        }
        // Where the number is all that was asked for, only the end of the answer may follow.
        let ends = allowed.is_allowed(trie.vocab_size() as u32 - 1);
        if goes_on || ends {
            for token in too_long {
                mask.forbid(token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_end_and_texts_do_not() {
        let check = |text: &str, room: Option<u32>| {
            let mut number = NumberEnd::default();
            number.push(text.as_bytes());
            assert_eq!(number.room(), room, "{text}");
        };
        let long = "1".repeat(20);
        check("", None);
        check(": 1234", None);
        check(&format!(": {long}"), Some(0));
        check(&format!("[-{long}"), Some(0));
        check(&format!(": 0.{long}"), Some(0));
        check(&format!(": {long}."), None);
        check(&format!(": {long},"), None);
        check(&format!("\"{long}"), None);
        check(&format!("\"-{long}.{long}"), None);
        check(": 1e", Some(2));
        check(": 1E-", Some(2));
        check(": 1.5e+7", Some(1));
        check(": 15e123", Some(0));
        check(": true", None);
        check("\"1e", None);
    }
}
