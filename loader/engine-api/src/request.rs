//! What is asked of the engine and what it answers. No text, no tensors.

use serde::{Deserialize, Serialize};

use crate::ConstraintSource;

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
    /// Tokens before which no stop token may come: until then stop tokens are not sampled.
    pub min_tokens: u32,
    /// Tokens that end the sequence; they are not reported as [`Event::Token`].
    pub stop_tokens: Vec<TokenId>,
    /// How each token is chosen.
    pub sampling: Sampling,
    /// With each token its log probability, and those of so many of the most likely tokens: 0 to
    /// [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// What the answer has to look like.
    pub constraint: Option<ConstraintSource>,
    /// The answer as the client expects it: where it is right, the answer comes faster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prediction: Vec<TokenId>,
    /// Milliseconds from submission after which the answer ends as it is, with
    /// [`FinishReason::Deadline`]; waiting counts.
    pub timeout_ms: Option<u64>,
}

/// Most alternatives that come with a token, as many as OpenAI's API gives.
pub const MAX_LOGPROBS: u32 = 20;

impl GenerateRequest {
    /// The most likely continuation, up to `max_tokens`, with nothing else asked for.
    #[must_use]
    pub const fn greedy(prompt: Vec<TokenId>, max_tokens: u32) -> Self {
        Self {
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: Sampling::GREEDY,
            logprobs: None,
            constraint: None,
            prediction: Vec::new(),
            timeout_ms: None,
        }
    }
}

/// How a token is chosen from logits, in this order: what a constraint forbids is taken out;
/// `logit_bias` is added; the penalties are applied; logits are divided by the temperature;
/// `top_k`, `top_p` and `min_p` take out unlikely tokens, each counting probabilities among
/// those that the one before has left; one of the rest is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy: the highest logit after bias and penalties, whatever the filters say.
    pub temperature: f32,
    /// Only so many of the most likely tokens; 0: all.
    pub top_k: u32,
    /// The fewest of the most likely tokens whose probabilities reach this sum; 1: all.
    pub top_p: f32,
    /// Only tokens at least this many times as likely as the most likely one; 0: all.
    pub min_p: f32,
    /// Positive logits of tokens in prompt or answer are divided by it, others multiplied; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer; 0: off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it is in the answer; 0: off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, each named once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Randomness is a function of this and the token's index in the sequence, nothing else.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, and nothing changed about the logits.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: 0,
    };
}

/// How likely a token was: natural logarithms of the probabilities that the model gave, before
/// anything that [`Sampling`] changes, at least [`MIN_LOGPROB`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token that came.
    pub logprob: f32,
    /// The most likely tokens, the most likely first, as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Stands for a probability of zero, which JSON has no logarithm of.
pub const MIN_LOGPROB: f32 = -9999.0;

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
        /// How likely it was, if that was asked for.
        logprobs: Option<TokenLogprobs>,
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
    /// Its `timeout_ms` have passed.
    Deadline,
}

/// Tokens and time of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were not computed, since their keys and values were cached.
    pub cached_tokens: u32,
    /// Tokens generated, the stop token not counted.
    pub completion_tokens: u32,
    /// Drafts that were run.
    #[serde(default)]
    pub drafted_tokens: u32,
    /// Of these, the ones that sampling came to as well.
    #[serde(default)]
    pub accepted_tokens: u32,
    /// Tokens of the request's prediction that came at their place, and those that did not.
    #[serde(default)]
    pub prediction_tokens: [u32; 2],
    /// Seconds from admission to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
}
