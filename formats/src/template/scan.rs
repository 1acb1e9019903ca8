//! Where tags, texts, words and brackets of a template's source end.

/// The place behind a word or a number that begins at `at`.
pub(super) fn word_end(bytes: &[u8], at: usize) -> Option<usize> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let end = at + bytes[at..].iter().take_while(|byte| is_word(byte)).count();
    (end > at).then_some(end)
}

/// Where a tag ends, its closing sign included.
pub(super) fn tag_end(tag: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let (mut at, mut depth) = (2, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => at = literal_end(bytes, at)?,
            b'%' if bytes[1] == b'%' && bytes.get(at + 1) == Some(&b'}') => return Some(at + 2),
            b'}' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            b'}' if bytes[1] == b'{' && bytes.get(at + 1) == Some(&b'}') => return Some(at + 2),
            b'{' => {
                depth += 1;
                at += 1;
            }
            _ => at += 1,
        }
    }
    None
}

/// The place behind a text that begins at `at`.
pub(super) fn literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let mut end = at + 1;
    while *bytes.get(end)? != bytes[at] {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    Some(end + 1)
}

pub(super) fn skip_spaces(bytes: &[u8], mut at: usize) -> usize {
    while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
        at += 1;
    }
    at
}

/// The place behind a bracket's partner.
pub(super) fn group_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => {
                at = literal_end(bytes, at)?;
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// The place behind a value with its members, calls and filters, which bind closer than `%`.
pub(super) fn operand_end(bytes: &[u8], start: usize) -> Option<usize> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let word_end = |mut at: usize| {
        let from = at;
        while bytes.get(at).is_some_and(is_word) {
            at += 1;
        }
        (at > from).then_some(at)
    };
    let first = if matches!(bytes.get(start), Some(b'-' | b'+')) { start + 1 } else { start };
    let mut at = match bytes.get(first)? {
        b'(' | b'[' | b'{' => group_end(bytes, first)?,
        b'"' | b'\'' => literal_end(bytes, first)?,
        _ => word_end(first)?,
    };
    loop {
        let next = skip_spaces(bytes, at);
        at = match bytes.get(next) {
            Some(b'.') => word_end(next + 1)?,
            Some(b'(' | b'[') => group_end(bytes, next)?,
            Some(b'|') => word_end(skip_spaces(bytes, next + 1))?,
            _ => return Some(at),
        };
    }
}
