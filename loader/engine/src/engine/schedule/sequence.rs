//! A sequence: one request with the tokens that it has so far.

use std::time::{Duration, Instant};

use shardpack_engine_api::{
    GenerateRequest, PromptOutput, RequestId, TokenId, TokenLogprobs, TokenMask, Usage,
};

use super::{
    super::draft::{DraftToken, Drafter},
    constrained::Constrained,
};

pub(super) struct Sequence {
    pub(super) id: RequestId,
    pub(super) request: GenerateRequest,
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
    constraint: Option<Constrained>,
    /// Processor time in which it was compiled.
    grammar: Duration,
    /// Proposes draft tokens, where speculative decoding is on.
    drafter: Option<Drafter>,
    /// Draft tokens that were run, and those that were accepted.
    drafted: [u32; 2],
    /// Tokens of the prompt whose log probabilities were reported, the first one counted as such.
    scored: u32,
    deadline: Option<Instant>,
    /// When it was first admitted, and how many tokens were cached then.
    admitted: Option<(Instant, u32)>,
    /// When the first and the latest token came.
    answered: Option<[Instant; 2]>,
    /// Tokens that its tenant was charged for.
    charged: usize,
}

/// The effect of a sampled token on its sequence.
pub(super) enum TokenEffect {
    /// It ends the answer and is no part of it.
    Stop,
    /// It belongs to the answer; `ends` where the constraint allows nothing after it.
    Token { ends: bool },
    /// The constraint rejects it.
    Fault(String),
}

impl Sequence {
    pub(super) fn new(
        id: RequestId,
        request: GenerateRequest,
        drafter: Option<Drafter>,
        now: Instant,
    ) -> Self {
        let tokens = request.prompt.iter().chain(&request.generated).map(|token| token.0).collect();
        let timeout = request.timeout_ms.map(Duration::from_millis);
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        Self {
            id,
            request,
            tokens,
            constraint: None,
            grammar: Duration::ZERO,
            drafter,
            drafted: [0; 2],
            scored: 1,
            deadline,
            admitted: None,
            answered: None,
            charged: 0,
        }
    }

    /// Takes the constraint of a request that goes on to where it was; whether it may end only here.
    /// The drafter sees its text as it would have.
    pub(super) fn resume(&mut self) -> Result<bool, String> {
        let prompt = self.request.prompt.len();
        for (place, token) in self.request.generated.iter().enumerate() {
            if let Some(constraint) = &mut self.constraint {
                constraint.accept(*token)?;
            }
            if let Some(drafter) = &mut self.drafter {
                drafter.propose(&self.tokens[..prompt + place], &self.request.stop_tokens);
                drafter.learn(&[token.0]);
            }
        }
        let is_resumed = !self.request.generated.is_empty();
        Ok(is_resumed && self.constraint.as_mut().is_some_and(Constrained::must_stop))
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Whether tokens are to follow the prompt, or have followed it.
    pub(super) fn generates(&self) -> bool {
        self.request.max_tokens > 0
    }

    /// The prompt's token at `index`, if its log probability is wanted.
    pub(super) fn next_of_prompt(&self, index: usize) -> Option<u32> {
        let is_scored = matches!(self.request.prompt_output, PromptOutput::Logprobs(_));
        self.request.prompt.get(index).filter(|_| is_scored).map(|token| token.0)
    }

    /// Of these log probabilities of the prompt's tokens from `first` on, those that were not
    /// reported yet, and the index of the first: a sequence that was preempted computes them again.
    pub(super) fn not_scored(
        &mut self,
        first: u32,
        mut logprobs: Vec<TokenLogprobs>,
    ) -> (u32, Vec<TokenLogprobs>) {
        let known = self.scored.saturating_sub(first).min(logprobs.len() as u32);
        logprobs.drain(..known as usize);
        let first = first + known;
        self.scored = self.scored.max(first + logprobs.len() as u32);
        (first, logprobs)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.generated() >= self.request.max_tokens as usize
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Admitted with so many tokens cached; only the first time counts.
    pub(super) fn admit(&mut self, cached: u32, now: Instant) {
        let cached = cached.min(self.request.prompt.len() as u32);
        self.admitted.get_or_insert((now, cached));
    }

    /// Stop tokens that are masked until `min_tokens` is reached; a constraint decides itself when
    /// it may end.
    pub(super) fn forbidden(&self) -> Vec<u32> {
        if self.request.min_tokens == 0 || self.constraint.is_some() {
            return Vec::new();
        }
        self.request.stop_tokens.iter().map(|token| token.0).collect()
    }

    /// The token mask at the position of each draft token and of the one after them; `None` allows
    /// every token. Empty without a constraint. Drafts that the constraint forbids are dropped,
    /// with all after them.
    pub(super) fn masks(
        &mut self,
        vocab_size: u32,
        drafts: &mut Vec<u32>,
    ) -> Result<Vec<Option<TokenMask>>, String> {
        match &mut self.constraint {
            Some(constraint) => constraint.masks(vocab_size, drafts),
            None => Ok(Vec::new()),
        }
    }

    /// Its constraint, compiled in so much time.
    pub(super) fn constrain(&mut self, constraint: Constrained, took: Duration) {
        self.constraint = Some(constraint);
        self.grammar = took;
    }

    /// Its constraint, if it has one.
    pub(super) const fn constraint(&mut self) -> Option<&mut Constrained> {
        self.constraint.as_mut()
    }

    /// Whether its next token could be sampled now: no mask is being computed.
    pub(super) fn is_ready(&self) -> bool {
        self.constraint.as_ref().is_none_or(Constrained::is_here)
    }

    /// Whether draft tokens may be verified: their masks are computed within the step.
    pub(super) fn takes_drafts(&self) -> bool {
        self.constraint.as_ref().is_none_or(Constrained::takes_drafts)
    }

    /// Tokens up to `computed` that its tenant was not charged for yet; now it is. What is computed
    /// again after a preemption is no work that it asked for.
    pub(super) fn charge(&mut self, computed: usize) -> usize {
        let fresh = computed.saturating_sub(self.charged);
        self.charged = self.charged.max(computed);
        fresh
    }

    /// Proposes draft tokens by prompt lookup.
    pub(super) fn propose(&mut self) {
        if let Some(drafter) = &mut self.drafter {
            drafter.propose(&self.tokens, &self.request.stop_tokens);
        }
    }

    /// Whether the draft model is worth asking.
    pub(super) fn wants_draft_model(&self) -> bool {
        self.drafter.as_ref().is_some_and(Drafter::wants_draft_model)
    }

    /// Sets the draft model's tokens.
    pub(super) fn set_model_drafts(&mut self, drafts: Vec<DraftToken>) {
        if let Some(drafter) = &mut self.drafter {
            drafter.set_model_drafts(drafts);
        }
    }

    /// The probability that each of up to `most` draft tokens is accepted with those before it.
    pub(super) fn probabilities(&self, most: usize) -> Vec<f32> {
        self.drafter.as_ref().map_or(Vec::new(), |drafter| drafter.probabilities(most))
    }

    /// The first draft tokens.
    pub(super) fn drafts(&self, count: usize) -> Vec<u32> {
        self.drafter.as_ref().map_or(Vec::new(), |drafter| drafter.drafts(count))
    }

    /// Updates acceptance rates with the sampled tokens; `run` drafts were run and `kept` accepted.
    pub(super) fn learn(&mut self, [run, kept]: [u32; 2], sampled: &[u32]) {
        self.drafted[0] += run;
        self.drafted[1] += kept;
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(sampled);
        }
    }

    pub(super) fn take(&mut self, token: u32, now: Instant) -> TokenEffect {
        self.answered.get_or_insert([now, now])[1] = now;
        if self.request.stop_tokens.contains(&TokenId(token)) {
            return TokenEffect::Stop;
        }
        self.tokens.push(token);
        let Some(constraint) = &mut self.constraint else {
            return TokenEffect::Token { ends: false };
        };
        match constraint.accept(TokenId(token)) {
            Ok(()) => TokenEffect::Token { ends: constraint.must_stop() },
            Err(error) => TokenEffect::Fault(error),
        }
    }

    pub(super) fn usage(&self, now: Instant) -> Usage {
        let [first, last] = self.answered.unwrap_or([now, now]);
        let (admitted, cached_tokens) = self.admitted.unwrap_or((first, 0));
        Usage {
            prompt_tokens: self.request.prompt.len() as u32,
            cached_tokens,
            completion_tokens: self.generated() as u32,
            drafted_tokens: self.drafted[0],
            accepted_tokens: self.drafted[1],
            prediction_tokens: self.drafter.as_ref().map_or([0; 2], Drafter::prediction_tokens),
            grammar_us: u64::try_from(self.grammar.as_micros()).unwrap_or(u64::MAX),
            prefill_seconds: first.saturating_duration_since(admitted).as_secs_f64(),
            decode_seconds: (last - first).as_secs_f64(),
        }
    }
}
