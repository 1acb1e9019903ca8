//! What is said between a server and a sandbox, both of one program: frames over one connection, one
//! request at a time.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | bytes of the head |
//! | 4 | bytes of the body |
//! | n | head: JSON, a [`Request`] or a [`Reply`] |
//! | n | body: `tokenizer.json`, a text, tokens (4 bytes each) or a table of tokens |
//!
//! Numbers are little-endian. The sandbox begins with [`Reply::Hello`]. What it says is as foreign as
//! what it executes: every length is bounded, and every reply is parsed.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use shardpack_engine_api::TokenId;
use shardpack_formats::chat::Chat;

use crate::{
    json::Object,
    prompt::{Conversation, PromptFailure, TemplateTexts, TextMarks},
};

/// Number of this protocol; both sides are of one program, so it tells a mix-up and nothing else.
pub const VERSION: u32 = 1;

/// Bytes of a head; a conversation is as long as a server's bodies, of which JSON may take twice as
/// much.
pub const HEAD_BYTES_MAX: usize = 128 << 20;
/// Bytes of a body: the longest `tokenizer.json`, or the tokens of the longest rendered text.
pub const BODY_BYTES_MAX: usize = 256 << 20;

/// A head and a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// JSON.
    pub head: Vec<u8>,
    /// Bytes, as the head says.
    pub body: Vec<u8>,
}

/// What a sandbox is to do.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request<'a> {
    /// Opens a package, whose tokenizer is the body; comes once, before the others.
    Open {
        /// Its chat templates.
        templates: Option<TemplateTexts>,
        /// Variables of the templates.
        specials: Object,
    },
    /// Renders a conversation.
    Render(#[serde(borrow)] Conversation<'a>),
    /// Renders a conversation and encodes the text.
    Prompt(#[serde(borrow)] Conversation<'a>),
    /// Encodes the text in the body.
    Encode(TextMarks),
    /// Tries what templates can do, as `shardpack_formats::chat::probe` does.
    Probe {
        /// The templates.
        templates: TemplateTexts,
        /// Their variables.
        specials: BTreeMap<String, String>,
    },
    /// Renders what follows an answer, as `shardpack_formats::chat::turn_end` does.
    AfterAnswer {
        /// The templates.
        templates: TemplateTexts,
        /// Their variables.
        specials: BTreeMap<String, String>,
    },
}

/// What a sandbox says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// It is confined, and ready.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// The package is open; the body is its table of tokens.
    Opened {
        /// Whether the template shows tools by itself.
        shows_tools: bool,
    },
    /// A package that is not what it should be, in words.
    Refused(String),
    /// The body is the text.
    Rendered {
        /// Names of what was changed in the conversation.
        adjustments: Vec<String>,
    },
    /// The body is the prompt's tokens.
    Prompted {
        /// Names of what was changed in the conversation.
        adjustments: Vec<String>,
    },
    /// The body is the text's tokens.
    Encoded,
    /// What the templates can do.
    Probed(Box<Chat>),
    /// What follows an answer.
    AfterAnswer(Vec<String>),
    /// No prompt.
    Failed(PromptFailure),
}

/// Bytes that are no frame, or no such message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection.
    #[error("the connection")]
    Io(#[from] io::Error),
    /// A length beyond its limit.
    #[error("a {part} of {found} bytes: expected at most {limit}")]
    TooLong {
        /// `head` or `body`.
        part: &'static str,
        /// Its bytes.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A head that is no such message.
    #[error("a message that cannot be: {0}")]
    Message(#[from] serde_json::Error),
    /// A body that is not what its head says.
    #[error("{0}")]
    Body(String),
}

impl Frame {
    /// A message and its body.
    pub fn new(message: &impl Serialize, body: Vec<u8>) -> Result<Self, WireError> {
        let frame = Self { head: serde_json::to_vec(message)?, body };
        frame.check()?;
        Ok(frame)
    }

    /// The message of the head.
    pub fn message<'de, T: Deserialize<'de>>(&'de self) -> Result<T, WireError> {
        Ok(serde_json::from_slice(&self.head)?)
    }

    /// A message that borrows nothing.
    pub fn owned<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        Ok(serde_json::from_slice(&self.head)?)
    }

    /// All its bytes.
    #[must_use]
    pub const fn size_bytes(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// The body as text.
    pub fn text(self) -> Result<String, WireError> {
        String::from_utf8(self.body).map_err(|_| WireError::Body("a body that is no text".into()))
    }

    /// The body as tokens.
    pub fn tokens(&self) -> Result<Vec<TokenId>, WireError> {
        let (tokens, rest) = self.body.as_chunks();
        if !rest.is_empty() {
            return Err(WireError::Body("a body that ends within a token".into()));
        }
        Ok(tokens.iter().map(|token| TokenId(u32::from_le_bytes(*token))).collect())
    }

    fn check(&self) -> Result<(), WireError> {
        let sizes = [self.head.len(), self.body.len()];
        check_sizes(sizes).map(|_| ())
    }

    /// Writes it.
    pub fn write(&self, out: &mut impl Write) -> Result<(), WireError> {
        let [head, body] = check_sizes([self.head.len(), self.body.len()])?;
        let mut start = Vec::with_capacity(8 + self.head.len());
        start.extend(head.to_le_bytes());
        start.extend(body.to_le_bytes());
        start.extend(&self.head);
        out.write_all(&start)?;
        out.write_all(&self.body)?;
        Ok(out.flush()?)
    }

    /// Reads one; memory grows with what really comes.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let mut sizes = [[0; 4]; 2];
        from.read_exact(sizes.as_flattened_mut())?;
        let sizes = sizes.map(|size| u32::from_le_bytes(size) as usize);
        check_sizes(sizes)?;
        let mut part = |size: usize| {
            let mut bytes = Vec::new();
            from.by_ref().take(size as u64).read_to_end(&mut bytes)?;
            if bytes.len() < size {
                Err(io::Error::from(io::ErrorKind::UnexpectedEof))
            } else {
                Ok(bytes)
            }
        };
        Ok(Self { head: part(sizes[0])?, body: part(sizes[1])? })
    }
}

/// Head and body, within their limits.
fn check_sizes(sizes: [usize; 2]) -> Result<[u32; 2], WireError> {
    for ((found, limit), part) in
        sizes.into_iter().zip([HEAD_BYTES_MAX, BODY_BYTES_MAX]).zip(["head", "body"])
    {
        if found > limit {
            return Err(WireError::TooLong { part, found, limit });
        }
    }
    Ok(sizes.map(|size| size as u32))
}

/// Tokens as a body.
#[must_use]
pub fn token_bytes(tokens: &[TokenId]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_cut_ones_do_not() {
        let frame = Frame::new(&Reply::Encoded, token_bytes(&[TokenId(7), TokenId(u32::MAX)]));
        let frame = frame.unwrap();
        let mut bytes = Vec::new();
        frame.write(&mut bytes).unwrap();
        let read = Frame::read(&mut &bytes[..]).unwrap();
        assert_eq!(read, frame);
        assert_eq!(read.owned::<Reply>().unwrap(), Reply::Encoded);
        assert_eq!(read.tokens().unwrap(), [TokenId(7), TokenId(u32::MAX)]);
        for end in 0..bytes.len() {
            assert!(matches!(Frame::read(&mut &bytes[..end]), Err(WireError::Io(_))), "{end}");
        }
    }

    #[test]
    fn lengths_beyond_their_limits_are_refused_before_anything_is_read() {
        for (sizes, expected) in [
            ([u32::MAX, 0], "a head of 4294967295 bytes: expected at most 134217728"),
            ([0, u32::MAX], "a body of 4294967295 bytes: expected at most 268435456"),
        ] {
            let bytes = sizes.map(u32::to_le_bytes);
            let error = Frame::read(&mut bytes.as_flattened()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
    }
}
