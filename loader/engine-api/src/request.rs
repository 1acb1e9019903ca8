//! Requests to the engine and the events that it answers with. No text, no tensors.

use serde::{Deserialize, Serialize};

use crate::{constraint::ConstraintSource, tenant::Tenant, token::TokenId};

/// Names a request between its submission and its end; chosen by the submitter, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

/// One sequence to continue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// On whose behalf: requests of one tenant share its part of the engine and its prefix cache.
    #[serde(default, skip_serializing_if = "Tenant::is_nobody")]
    pub tenant: Tenant,
    /// Tokens so far; not empty.
    pub prompt: Vec<TokenId>,
    /// Tokens of the answer that an earlier group of ranks has generated, of a request that goes on
    /// after a rank was lost: they count as generated and are not reported again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub generated: Vec<TokenId>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Fewest tokens to generate: until then stop tokens are not sampled.
    pub min_tokens: u32,
    /// Tokens that end the sequence; they are not reported as [`Event::Token`].
    pub stop_tokens: Vec<TokenId>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// With each token its log probability, and those of so many of the most likely tokens: 0 to
    /// [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// What is wanted of the prompt itself.
    #[serde(default, skip_serializing_if = "PromptOutput::is_nothing")]
    pub prompt_output: PromptOutput,
    /// Constraint on the output (structured output, tool calls).
    pub constraint: Option<ConstraintSource>,
    /// Predicted output: draft tokens from the client. Where they match, decoding is faster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prediction: Vec<TokenId>,
    /// Milliseconds from submission, queueing included, after which the sequence ends with
    /// [`FinishReason::Deadline`].
    pub timeout_ms: Option<u64>,
}

/// What a request wants of its prompt, before any token that follows it. Such a prompt is computed
/// whole: nothing of it comes from the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptOutput {
    /// Nothing.
    #[default]
    Nothing,
    /// The log probability of each token but the first, and those of so many of the most likely
    /// tokens in its place: 0 to [`MAX_LOGPROBS`].
    Logprobs(u32),
    /// The pooled hidden vector, before it is normalised. Nothing is generated: `max_tokens` is 0.
    Embedding,
}

impl PromptOutput {
    /// Whether nothing is wanted.
    #[must_use]
    pub const fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }
}

/// Most `top_logprobs` of a token, as in OpenAI's API.
pub const MAX_LOGPROBS: u32 = 20;

impl GenerateRequest {
    /// The most likely continuation, up to `max_tokens`, with nothing else asked for.
    #[must_use]
    pub const fn greedy(prompt: Vec<TokenId>, max_tokens: u32) -> Self {
        Self {
            tenant: Tenant::NOBODY,
            prompt,
            generated: Vec::new(),
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: Sampling::GREEDY,
            logprobs: None,
            prompt_output: PromptOutput::Nothing,
            constraint: None,
            prediction: Vec::new(),
            timeout_ms: None,
        }
    }
}

/// Sampling parameters. They apply in this order: the constraint's mask; `logit_bias`; the
/// penalties; the temperature; `top_k`, `top_p` and `min_p`, each with probabilities among the
/// tokens that the one before has left; then one of the rest is drawn.
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
    /// Greedy decoding, logits unchanged.
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

/// Log probabilities (natural logarithm) of a token, before anything that [`Sampling`] changes, at
/// least [`MIN_LOGPROB`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the sampled token.
    pub logprob: f32,
    /// The most likely tokens, the most likely first, as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Stands for a probability of zero, which JSON has no logarithm of.
pub const MIN_LOGPROB: f32 = -9999.0;

/// An event of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Log probabilities of tokens of the prompt, see [`PromptOutput::Logprobs`]; in the prompt's
    /// order, before the first token that follows it.
    PromptLogprobs {
        /// The request.
        request: RequestId,
        /// The first token's index in the prompt.
        first: u32,
        /// Those of it and of the tokens after it.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The prompt's embedding, see [`PromptOutput::Embedding`].
    Embedding {
        /// The request.
        request: RequestId,
        /// The vector.
        values: Vec<f32>,
    },
    /// The next token.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token: TokenId,
        /// Its log probabilities, if requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// The sequence ended; nothing follows.
    Finished {
        /// The request.
        request: RequestId,
        /// Why.
        reason: FinishReason,
        /// Tokens and time.
        usage: Usage,
    },
    /// The request failed; nothing follows.
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
            Self::PromptLogprobs { request, .. }
            | Self::Embedding { request, .. }
            | Self::Token { request, .. }
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
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated, the stop token not counted.
    pub completion_tokens: u32,
    /// Draft tokens that were verified (speculative decoding).
    #[serde(default)]
    pub drafted_tokens: u32,
    /// Of these, the accepted ones.
    #[serde(default)]
    pub accepted_tokens: u32,
    /// Accepted and rejected tokens of the predicted output.
    #[serde(default)]
    pub prediction_tokens: [u32; 2],
    /// Microseconds of processor time in which its constraint was compiled on rank 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub grammar_us: u64,
    /// Seconds from admission to the first token.
    pub prefill_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
const fn is_zero(value: &u64) -> bool {
    *value == 0
}
