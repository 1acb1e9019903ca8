//! The tokens of a tokenizer by id, as bytes between processes: what decoding needs of a
//! `tokenizer.json`, without anything that is executed.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | count |
//! | 4, 1, 4, n | for each: id, kind, bytes of its text, its text |
//!
//! Numbers are little-endian; kinds are 0 (of the model), 1 (added) and 2 (added and special).

/// Tokens of one vocabulary; the largest published ones have 262,144.
pub const TOKENS_MAX: usize = 1 << 21;

/// Bytes of an entry before its text.
const ENTRY_BYTES: usize = 9;

/// What a token is to its tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// One of the model's own, in its alphabet.
    Plain,
    /// Added to the vocabulary: it stands for its own text.
    Added,
    /// Added, and no text of a conversation.
    Special,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenEntry {
    /// Its id.
    pub id: u32,
    /// What it is.
    pub kind: TokenKind,
    /// Its text in the vocabulary.
    pub text: String,
}

/// Every token of a tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenTable(pub Vec<TokenEntry>);

/// Bytes that are no table of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// More tokens than any vocabulary has.
    #[error("{0} tokens: expected at most {TOKENS_MAX}")]
    Count(usize),
    /// It ends early, goes on after its last token, or has a kind or text that cannot be.
    #[error("not a table of tokens at byte {0}")]
    Malformed(usize),
}

impl TokenTable {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let size: usize = self.0.iter().map(|token| ENTRY_BYTES + token.text.len()).sum();
        let mut bytes = Vec::with_capacity(4 + size);
        bytes.extend((self.0.len() as u32).to_le_bytes());
        for TokenEntry { id, kind, text } in &self.0 {
            bytes.extend(id.to_le_bytes());
            bytes.push(*kind as u8);
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    /// Parses what [`Self::encode`] writes.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        let mut rest = bytes;
        let malformed = |rest: &[u8]| TableError::Malformed(bytes.len() - rest.len());
        let count = number(&mut rest).ok_or(malformed(bytes))? as usize;
        if count > TOKENS_MAX {
            return Err(TableError::Count(count));
        }
        if count.saturating_mul(ENTRY_BYTES) > rest.len() {
            return Err(malformed(rest));
        }
        let mut tokens = Vec::with_capacity(count);
        for _ in 0..count {
            let at = rest;
            tokens.push(entry(&mut rest).ok_or_else(|| malformed(at))?);
        }
        if rest.is_empty() { Ok(Self(tokens)) } else { Err(malformed(rest)) }
    }
}

fn entry(rest: &mut &[u8]) -> Option<TokenEntry> {
    let id = number(rest)?;
    let (&kind, after) = rest.split_first()?;
    *rest = after;
    let kind = match kind {
        0 => TokenKind::Plain,
        1 => TokenKind::Added,
        2 => TokenKind::Special,
        _ => return None,
    };
    let len = number(rest)? as usize;
    let (text, after) = rest.split_at_checked(len)?;
    *rest = after;
    Some(TokenEntry { id, kind, text: str::from_utf8(text).ok()?.to_owned() })
}

fn number(rest: &mut &[u8]) -> Option<u32> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_comes_back_and_a_cut_one_is_refused() {
        let token = |id, kind, text: &str| TokenEntry { id, kind, text: text.to_owned() };
        let table = TokenTable(vec![
            token(0, TokenKind::Plain, ""),
            token(7, TokenKind::Added, "ä"),
            token(u32::MAX, TokenKind::Special, "<s>"),
        ]);
        let bytes = table.encode();
        assert_eq!(TokenTable::parse(&bytes), Ok(table));
        for end in 0..bytes.len() {
            let cut = TokenTable::parse(&bytes[..end]);
            assert!(matches!(cut, Err(TableError::Malformed(_))), "{end}: {cut:?}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(TokenTable::parse(&longer), Err(TableError::Malformed(bytes.len())));
        assert_eq!(
            TokenTable::parse(&u32::MAX.to_le_bytes()),
            Err(TableError::Count(u32::MAX as usize))
        );
    }
}
