//! How the text of a vocabulary's tokens spells bytes: the `decoder` of a `tokenizer.json`, as far
//! as decoder-only models use it, applied one token at a time.

use serde::Deserialize;

/// A tokenizer's decoder that can be applied token by token.
#[derive(Debug, Default)]
pub(super) struct Decoding {
    /// Each character of a token is one byte.
    byte_level: bool,
    /// `<0xNN>` is one byte.
    byte_fallback: bool,
    /// Texts and what they stand for, in order.
    replacements: Vec<(String, String)>,
    /// Removed from the very beginning of the text, at most that often.
    strip: Option<(char, usize)>,
    /// A mark for a space, which is dropped from the first token.
    dropped_space: Option<char>,
}

/// A decoder that is not known.
#[derive(Debug, thiserror::Error)]
pub enum DecodingError {
    /// The file is not JSON of the expected shape.
    #[error("not a tokenizer")]
    Parse(#[from] serde_json::Error),
    /// A decoder that no supported model family uses.
    #[error(
        "decoder {0} is not supported: expected ByteLevel, Metaspace, or a sequence of Replace, \
         ByteFallback, Fuse and Strip"
    )]
    Unsupported(String),
    /// Replacements that make tokens longer, or more of them than any tokenizer has.
    #[error(
        "decoder Replace of {from:?} by {content:?}: expected at most {REPLACEMENTS_MAX} \
         replacements, none by a longer text"
    )]
    Growing {
        /// What is replaced.
        from: String,
        /// By what.
        content: String,
    },
}

/// Replacements of one decoder; published tokenizers have at most two.
const REPLACEMENTS_MAX: usize = 16;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    decoder: Option<Decoder>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum Decoder {
    ByteLevel {},
    ByteFallback {},
    Fuse {},
    Metaspace {
        replacement: char,
        /// Older files say `add_prefix_space`, newer ones `prepend_scheme`.
        prepend_scheme: Option<String>,
        add_prefix_space: Option<bool>,
    },
    Replace {
        pattern: Pattern,
        content: String,
    },
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    Sequence {
        decoders: Vec<Decoder>,
    },
    #[serde(other)]
    Other,
}

/// A plain text; anything else (`Regex`) is not.
#[derive(Debug, Deserialize)]
struct Pattern {
    #[serde(rename = "String")]
    text: Option<String>,
}

impl Decoding {
    /// Reads the decoder of a `tokenizer.json`.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, DecodingError> {
        let file: File = serde_json::from_slice(bytes)?;
        let mut decoding = Self::default();
        let mut fused = false;
        let Some(decoder) = file.decoder else {
            return Err(DecodingError::Unsupported("none".to_owned()));
        };
        decoding.add(decoder, &mut fused)?;
        Ok(decoding)
    }

    /// Adds a step. Before `Fuse` steps work on tokens, after it on the whole text: those that
    /// would need the text beyond the token at hand are refused.
    fn add(&mut self, decoder: Decoder, fused: &mut bool) -> Result<(), DecodingError> {
        match decoder {
            Decoder::Sequence { decoders } => {
                for decoder in decoders {
                    self.add(decoder, fused)?;
                }
            }
            Decoder::ByteLevel {} => self.byte_level = true,
            Decoder::ByteFallback {} if !*fused => self.byte_fallback = true,
            Decoder::Fuse {} => *fused = true,
            Decoder::Metaspace { replacement, prepend_scheme, add_prefix_space } if !*fused => {
                let never = prepend_scheme.as_deref() == Some("never")
                    || (prepend_scheme.is_none() && add_prefix_space == Some(false));
                self.dropped_space = (!never).then_some(replacement);
                self.replacements.push((replacement.to_string(), " ".to_owned()));
            }
            Decoder::Replace { pattern: Pattern { text: Some(from) }, content }
                if !*fused && !from.is_empty() =>
            {
                // Each makes a token a multiple longer: a few dozen would fill any memory.
                if content.len() > from.len() || self.replacements.len() >= REPLACEMENTS_MAX {
                    return Err(DecodingError::Growing { from, content });
                }
                self.replacements.push((from, content));
            }
            Decoder::Strip { content, start, stop: 0 } if *fused => {
                self.strip = Some((content, start));
            }
            other => return Err(DecodingError::Unsupported(format!("{other:?}"))),
        }
        Ok(())
    }

    /// Appends the bytes that a token stands for.
    pub(super) fn append_bytes(&self, token: &str, is_first: bool, out: &mut Vec<u8>) {
        if self.byte_level {
            append_byte_level(token, out);
            return;
        }
        if self.byte_fallback
            && let Some(byte) = parse_byte(token)
        {
            out.push(byte);
            return;
        }
        let mut text = token.to_owned();
        if let Some(mark) = self.dropped_space.filter(|_| is_first) {
            text.retain(|c| c != mark);
        }
        for (from, to) in &self.replacements {
            text = text.replace(from.as_str(), to);
        }
        let mut text = text.as_str();
        if let Some((content, times)) = self.strip.filter(|_| is_first) {
            for _ in 0..times {
                let Some(rest) = text.strip_prefix(content) else { break };
                text = rest;
            }
        }
        out.extend_from_slice(text.as_bytes());
    }
}

/// `<0xNN>`.
fn parse_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// GPT-2's alphabet: each byte is a printable character. A token with a character outside it
/// stands for its own text.
fn append_byte_level(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        let Some(byte) = byte_of(c) else {
            out.truncate(start);
            out.extend_from_slice(token.as_bytes());
            return;
        };
        out.push(byte);
    }
}

/// Printable Latin-1 characters are themselves; the other 68 bytes are the characters from U+0100.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_has_every_byte_once() {
        let mut bytes: Vec<u8> =
            (0..0x180).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
    }

    #[test]
    fn decoders_that_need_the_whole_text_are_refused_by_name() {
        let check = |decoder: &str, name: &str| {
            let file = format!(r#"{{"decoder":{decoder}}}"#);
            let error = Decoding::parse(file.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(name), "{decoder}: {error}");
        };
        check("null", "none");
        check(r#"{"type":"WordPiece","prefix":"x","cleanup":true}"#, "Other");
        check(r#"{"type":"Replace","pattern":{"Regex":"a"},"content":"b"}"#, "Replace");
        check(
            r#"{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Replace","pattern":{"String":"ab"},"content":"b"}]}"#,
            "Replace",
        );
        check(r#"{"type":"Strip","content":" ","start":1,"stop":0}"#, "Strip");
        let growing = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
        check(growing, "none by a longer text");
        let same = r#"{"type":"Replace","pattern":{"String":"a"},"content":"b"}"#;
        let many = [same; 17].join(",");
        check(&format!(r#"{{"type":"Sequence","decoders":[{many}]}}"#), "at most 16");
    }
}
