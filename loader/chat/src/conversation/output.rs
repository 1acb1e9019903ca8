//! The parsed output of a model, as all dialects write it.

use shardpack_engine_api::TokenId;

/// A piece of output, in the order in which it is written. Texts are not empty and hold whole
/// characters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "the tool-call parser makes what the plain one does not")]
pub enum OutputDelta {
    /// Reasoning (thinking).
    Reasoning(String),
    /// Content.
    Content(String),
    /// A tool call begins. Calls do not overlap and count from 0 without gaps.
    ToolCallBegin {
        /// Its number within the answer.
        index: u32,
        /// Unique, and as the model's template needs it in the history.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of a tool call's arguments, as JSON text.
    ToolCallArguments {
        /// The call's number.
        index: u32,
        /// Not empty.
        fragment: String,
    },
    /// The tool call is complete: its arguments joined are valid JSON. One that is cut off has no
    /// end.
    ToolCallEnd {
        /// The call's number.
        index: u32,
    },
}

/// Why the output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// A stop token.
    Stop,
    /// The stop text of this index.
    StopText(usize),
    /// `max_tokens` or the context length.
    Length,
    /// A stop token after a complete tool call.
    ToolCalls,
}

/// Turns a model's tokens into output deltas.
///
/// Invariants: any output becomes deltas, never an error; deltas joined do not depend on how bytes
/// were cut into tokens, except where a token itself is a marker.
pub trait OutputParser: Send {
    /// Takes the next token and its bytes; tokens that show nothing (turn markers) have none.
    fn push(&mut self, token: TokenId, bytes: &[u8]) -> Vec<OutputDelta>;

    /// The end: what was held back, for good. A call that is still open stays without
    /// [`OutputDelta::ToolCallEnd`].
    fn finish(&mut self) -> Vec<OutputDelta>;
}

/// Every byte is content; bytes that can still become a character are held back, bytes that no
/// longer can are U+FFFD, as in `String::from_utf8_lossy`.
#[derive(Clone, Debug, Default)]
pub struct PlainText {
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl PlainText {
    /// The text that these bytes complete, perhaps none.
    pub fn text(&mut self, bytes: &[u8]) -> String {
        // Nearly every token is whole characters.
        if self.pending.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            return text.to_owned();
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut held = 0;
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            if chunk.invalid().is_empty() {
                continue;
            }
            if chunks.peek().is_none() && is_incomplete(chunk.invalid()) {
                held = chunk.invalid().len();
            } else {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - held);
        text
    }

    /// What is left at the end: the replacement character if one was cut off.
    pub fn rest(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Whether bytes at the end of the input are the beginning of a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

impl OutputParser for PlainText {
    fn push(&mut self, _: TokenId, bytes: &[u8]) -> Vec<OutputDelta> {
        content(self.text(bytes))
    }

    fn finish(&mut self) -> Vec<OutputDelta> {
        content(self.rest())
    }
}

fn content(text: String) -> Vec<OutputDelta> {
    if text.is_empty() { Vec::new() } else { vec![OutputDelta::Content(text)] }
}
