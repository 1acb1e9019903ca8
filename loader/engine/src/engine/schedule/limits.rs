//! What bounds a schedule, and which requests are within it.

use shardpack_engine_api::{GenerateRequest, MAX_LOGPROBS, PromptOutput, Sampling};

use super::{
    super::{pages::Kind, plan::MAX_PREFILL_TOKENS},
    Drafting,
    sequence::Sequence,
};

/// What bounds a schedule.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Limits {
    pub(in crate::engine) vocab_size: u32,
    /// Tokens of the longest sequence, prompt and answer.
    pub(in crate::engine) max_positions: u32,
    /// Why that is less than the model's own.
    pub(in crate::engine) shortened: Option<&'static str>,
    pub(in crate::engine) max_sequences: usize,
    pub(in crate::engine) max_waiting: usize,
    /// Prefill token budget of a step, and of one in which other sequences decode.
    pub(in crate::engine) prefill_tokens: usize,
    pub(in crate::engine) chunked_prefill_tokens: usize,
    /// Percent of its speed that a tenant with few streams keeps beside others' work.
    pub(in crate::engine) kept_percent: u32,
    /// Whether sequences share KV pages through the prefix cache.
    pub(in crate::engine) prefix_reuse: bool,
    /// Whether tokens see those after them: a prompt is run in one step, and nothing follows it.
    pub(in crate::engine) whole_prompts: bool,
    /// Sequences that may become longer than this are computed with other positions.
    pub(in crate::engine) long_beyond: Vec<u32>,
    pub(in crate::engine) drafting: Drafting,
}

impl Limits {
    /// Tokens that a sequence may have in the end.
    pub(super) fn total(&self, sequence: &Sequence) -> u32 {
        let prompt = sequence.request.prompt.len() as u32;
        prompt.saturating_add(sequence.request.max_tokens).min(self.max_positions)
    }

    /// Which sequences it can share pages with.
    pub(super) fn kind(&self, sequence: &Sequence) -> Kind {
        let total = self.total(sequence);
        let form = self.long_beyond.iter().filter(|beyond| total > **beyond).count() as u32;
        Kind { form, tenants: sequence.request.tenant.prefix_cache }
    }

    pub(super) fn check(&self, request: &GenerateRequest) -> Result<(), String> {
        let GenerateRequest { prompt, generated, sampling, logprobs, prediction, .. } = request;
        if prompt.is_empty() {
            return Err("the prompt has no tokens".to_owned());
        }
        if prompt.len() > self.max_positions as usize {
            let why = self.shortened.map_or_else(String::new, |why| format!(" ({why})"));
            return Err(format!(
                "the prompt has {} tokens, the model takes at most {}{why}",
                prompt.len(),
                self.max_positions
            ));
        }
        if self.whole_prompts && request.max_tokens > 0 {
            let message = "this model's attention is bidirectional: it generates no text";
            return Err(message.to_owned());
        }
        if self.whole_prompts && prompt.len() > MAX_PREFILL_TOKENS {
            let found = prompt.len();
            return Err(format!(
                "the prompt has {found} tokens, and {MAX_PREFILL_TOKENS} fit one step"
            ));
        }
        let biased = sampling.logit_bias.iter().map(|(token, _)| token);
        let answer = generated.iter().chain(prediction);
        let mut named = prompt.iter().chain(answer).chain(&request.stop_tokens).chain(biased);
        if let Some(token) = named.find(|token| token.0 >= self.vocab_size) {
            return Err(format!(
                "token {} is not below the vocabulary size {}",
                token.0, self.vocab_size
            ));
        }
        if let Some(count) = logprobs.filter(|count| *count > MAX_LOGPROBS) {
            return Err(format!("{count} logprobs per token: at most {MAX_LOGPROBS}"));
        }
        match request.prompt_output {
            PromptOutput::Logprobs(count) if count > MAX_LOGPROBS => {
                return Err(format!("{count} logprobs per prompt token: at most {MAX_LOGPROBS}"));
            }
            PromptOutput::Embedding if request.max_tokens > 0 => {
                return Err("an embedding has no tokens after it: max_tokens is 0".to_owned());
            }
            _ => {}
        }
        check_sampling(sampling)
    }
}

fn check_sampling(sampling: &Sampling) -> Result<(), String> {
    let figures = [
        ("temperature", sampling.temperature, 0.0, f32::MAX),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, f32::MIN_POSITIVE, f32::MAX),
        ("presence_penalty", sampling.presence_penalty, f32::MIN, f32::MAX),
        ("frequency_penalty", sampling.frequency_penalty, f32::MIN, f32::MAX),
    ];
    for (name, value, least, most) in figures {
        if !(value >= least && value <= most) {
            return Err(format!("{name} {value} is out of range"));
        }
    }
    let mut biased: Vec<_> = sampling.logit_bias.iter().map(|(token, _)| token).collect();
    biased.sort();
    if let Some(pair) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("token {} has two logit biases", pair[0].0));
    }
    match sampling.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        Some((token, bias)) => Err(format!("logit bias {bias} of token {} is not finite", token.0)),
        None => Ok(()),
    }
}
