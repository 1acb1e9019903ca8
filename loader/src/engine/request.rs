//! What is asked of the engine and what it answers. No text, no tensors.

use serde::{Deserialize, Serialize};

/// An index into the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

/// Names a request between its submission and its end; chosen by the submitter, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// One sequence to continue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Tokens so far; not empty.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Tokens that end the sequence; they are not reported as [`Event::Token`].
    pub stop_tokens: Vec<TokenId>,
    /// How each token is chosen.
    pub sampling: Sampling,
}

/// How a token is chosen from logits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy; otherwise logits are divided by it before the softmax.
    pub temperature: f32,
    /// Randomness is a function of this and the token's index in the sequence, nothing else.
    pub seed: u64,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The next token.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token: TokenId,
    },
    /// The sequence ended; nothing follows.
    Finished {
        /// The request.
        request: RequestId,
        /// Why.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
    /// The request could not be carried through; nothing follows.
    Failed {
        /// The request.
        request: RequestId,
        /// A sentence for the client.
        message: String,
        /// Whether the same request may succeed later.
        retryable: bool,
    },
}

impl Event {
    /// The request that this is about.
    #[must_use]
    pub const fn request(&self) -> RequestId {
        match self {
            Self::Token { request, .. }
            | Self::Finished { request, .. }
            | Self::Failed { request, .. } => *request,
        }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token came.
    Stop,
    /// `max_tokens` or the model's longest sequence was reached.
    Length,
    /// The submitter cancelled it.
    Cancelled,
}

/// Tokens and time of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, the stop token not counted.
    pub completion_tokens: u32,
    /// Seconds from admission to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
}
