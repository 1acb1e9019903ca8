//! The buffered output text that no parser state has consumed yet.

use super::marker::{Found, find, is_code};

/// The buffer, and what was consumed of it since a possible start of a call.
#[derive(Debug, Default)]
pub(super) struct Input {
    pending: String,
    /// Taken since [`Input::mark`]; if the call turns out to be none, this was text.
    raw: String,
    /// Whether nothing follows.
    pub ended: bool,
}

impl Input {
    pub(super) fn append(&mut self, text: &str) {
        self.pending.push_str(text);
    }

    pub(super) fn append_char(&mut self, c: char) {
        self.pending.push(c);
    }

    /// What is left.
    pub(super) fn text(&self) -> &str {
        &self.pending
    }

    /// Marks a possible start of a call: what is taken from here may have to be given back.
    pub(super) fn mark(&mut self) {
        self.raw.clear();
    }

    /// What was taken since the mark.
    pub(super) fn take_raw(&mut self) -> String {
        std::mem::take(&mut self.raw)
    }

    /// Takes the first so many bytes.
    pub(super) fn take(&mut self, len: usize) -> String {
        let rest = self.pending.split_off(len);
        let taken = std::mem::replace(&mut self.pending, rest);
        self.raw.push_str(&taken);
        taken
    }

    /// Takes everything.
    pub(super) fn take_all(&mut self) -> String {
        self.take(self.pending.len())
    }

    /// Takes leading white space.
    pub(super) fn skip_space(&mut self) {
        let len = self.pending.len() - self.pending.trim_start().len();
        if len > 0 {
            self.take(len);
        }
    }

    /// Takes this text if it comes next.
    pub(super) fn expect(&mut self, text: &str) -> Expect {
        if self.pending.starts_with(text) {
            self.take(text.len());
            Expect::Taken
        } else if !self.ended && text.starts_with(self.pending.as_str()) {
            Expect::Wait
        } else {
            Expect::Other
        }
    }

    /// Whether this text comes next, without taking it.
    pub(super) fn sees(&self, text: &str) -> Expect {
        if self.pending.starts_with(text) {
            Expect::Taken
        } else if !self.ended && text.starts_with(self.pending.as_str()) {
            Expect::Wait
        } else {
            Expect::Other
        }
    }
}

impl Input {
    /// Takes the text before the first of `ends`, and that end; `allowed` is the one marker that
    /// the text may hold. Longer texts and ones with other markers are none.
    pub(crate) fn until(
        &mut self,
        ends: &[&str],
        max: usize,
        allowed: &str,
    ) -> Result<String, Progress> {
        let (len, which) = self.look(ends, max, allowed)?;
        let text = self.take(len);
        self.take(ends[which].len());
        Ok(text)
    }

    /// Where the text before the first of `ends` ends, under the same rules.
    pub(super) fn peek_until(&self, ends: &[&str], max: usize) -> Result<usize, Progress> {
        self.look(ends, max, "").map(|(len, _)| len)
    }

    fn look(&self, ends: &[&str], max: usize, allowed: &str) -> Result<(usize, usize), Progress> {
        let (len, which) = match find(&self.pending, ends) {
            Found::At(at, which) => (at, Some(which)),
            Found::NotBefore(safe) => (safe, None),
        };
        let text = &self.pending[..len];
        let has_markers = match allowed {
            "" => text.contains(is_code),
            allowed => text.replacen(allowed, "", 1).contains(is_code),
        };
        match which {
            _ if len > max || has_markers => Err(Progress::NotACall),
            None if self.ended => Err(Progress::NotACall),
            None => Err(Progress::Wait),
            Some(which) => Ok((len, which)),
        }
    }
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// The text in question.
    Taken,
    /// Its beginning, or nothing yet.
    Wait,
    /// Something else.
    Other,
}

/// Result of a parser step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It took something: ask again.
    Again,
    /// It needs more text.
    Wait,
    /// The section of calls has ended; what follows is not part of it.
    Leave,
    /// What was taken since the last complete call is not a call.
    NotACall,
}
