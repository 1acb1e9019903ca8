//! What rank 0 decides: who is run in the next step, and what its tokens mean for each request.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use super::{
    plan::{Begin, Plan, Work},
    request::{Event, FinishReason, GenerateRequest, RequestId, Sampling, TokenId, Usage},
    runner::Sampled,
};

/// What bounds a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) vocab_size: u32,
    /// Tokens of the longest sequence, prompt and answer.
    pub(super) max_positions: u32,
    pub(super) max_sequences: usize,
    /// Prompt tokens of one step.
    pub(super) prefill_tokens: usize,
}

/// Requests between submission and end.
pub(super) struct Schedule {
    limits: Limits,
    waiting: VecDeque<(RequestId, GenerateRequest)>,
    active: BTreeMap<RequestId, Active>,
    /// Active requests in the order of their admission.
    order: Vec<RequestId>,
    /// Sequences that the ranks still hold but no request needs.
    ended: Vec<RequestId>,
    events: Vec<Event>,
}

struct Active {
    request: GenerateRequest,
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// How many of them the ranks have in their caches.
    fed: usize,
    /// Whether the ranks know the sequence.
    begun: bool,
    admitted: Instant,
    /// When the first and the latest token came.
    answered: Option<[Instant; 2]>,
}

impl Active {
    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    fn usage(&self, now: Instant) -> Usage {
        let [first, last] = self.answered.unwrap_or([now, now]);
        Usage {
            prompt_tokens: self.request.prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: self.generated() as u32,
            prefill_seconds: (first - self.admitted).as_secs_f64(),
            decode_seconds: (last - first).as_secs_f64(),
        }
    }
}

impl Schedule {
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: VecDeque::new(),
            active: BTreeMap::new(),
            order: Vec::new(),
            ended: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Events since the last call, in order.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn submit(&mut self, id: RequestId, request: GenerateRequest) {
        if let Err(message) = self.limits.check(&request) {
            self.events.push(Event::Failed { request: id, message, retryable: false });
        } else if request.max_tokens == 0
            || request.prompt.len() == self.limits.max_positions as usize
        {
            let prompt_tokens = request.prompt.len() as u32;
            let usage = Usage { prompt_tokens, ..Usage::default() };
            self.events.push(Event::Finished { request: id, reason: FinishReason::Length, usage });
        } else {
            self.waiting.push_back((id, request));
        }
    }

    pub(super) fn cancel(&mut self, id: RequestId) {
        if let Some(index) = self.waiting.iter().position(|(waiting, _)| *waiting == id) {
            let prompt_tokens = self.waiting[index].1.prompt.len() as u32;
            self.waiting.remove(index);
            let usage = Usage { prompt_tokens, ..Usage::default() };
            let reason = FinishReason::Cancelled;
            self.events.push(Event::Finished { request: id, reason, usage });
        } else {
            self.finish(id, FinishReason::Cancelled, Instant::now());
        }
    }

    /// Drops all requests without an event.
    pub(super) fn forget(&mut self) {
        *self = Self::new(self.limits);
    }

    /// Other ranks took over, which hold none of the sequences.
    pub(super) fn begin_anew(&mut self) {
        self.ended.clear();
        for active in self.active.values_mut() {
            active.fed = 0;
            active.begun = false;
        }
    }

    /// The next step: one token for every sequence that is decoding, and the next tokens of
    /// prompts, the oldest first.
    pub(super) fn plan(&mut self, step: u64, now: Instant) -> Plan {
        self.admit(now);
        let mut plan = self.endings(step);
        let mut budget = self.limits.prefill_tokens;
        for id in &self.order {
            let active = self.active.get_mut(id).expect("order lists active requests");
            let left = active.tokens.len() - active.fed;
            let decoding = active.fed > 0 && left == 1;
            let count = if decoding { 1 } else { left.min(budget) };
            if count == 0 {
                continue;
            }
            if !decoding {
                budget -= count;
            }
            if !active.begun {
                active.begun = true;
                plan.begin.push(Begin { id: *id, sampling: active.request.sampling.clone() });
            }
            plan.work.push(Work {
                id: *id,
                position: active.fed as u32,
                tokens: active.tokens[active.fed..active.fed + count].to_vec(),
                sample: count == left,
            });
        }
        plan
    }

    /// A step that only ends sequences.
    pub(super) fn endings(&mut self, step: u64) -> Plan {
        Plan { step, end: std::mem::take(&mut self.ended), ..Plan::default() }
    }

    fn admit(&mut self, now: Instant) {
        while self.active.len() < self.limits.max_sequences
            && let Some((id, request)) = self.waiting.pop_front()
        {
            let tokens = request.prompt.iter().map(|token| token.0).collect();
            let active =
                Active { request, tokens, fed: 0, begun: false, admitted: now, answered: None };
            self.active.insert(id, active);
            self.order.push(id);
        }
    }

    /// Takes what a step brought.
    pub(super) fn record(&mut self, plan: &Plan, sampled: &[Sampled], now: Instant) {
        for work in &plan.work {
            let active = self.active.get_mut(&work.id).expect("work is on active requests");
            active.fed += work.tokens.len();
        }
        for Sampled { id, token } in sampled {
            if let Some(token) = token {
                self.answer(*id, *token, now);
            } else {
                let message = "the model computed values that are not numbers".to_owned();
                self.remove(*id);
                self.events.push(Event::Failed { request: *id, message, retryable: false });
            }
        }
    }

    fn answer(&mut self, id: RequestId, token: u32, now: Instant) {
        let active = self.active.get_mut(&id).expect("tokens are sampled for active requests");
        active.answered.get_or_insert([now, now])[1] = now;
        if active.request.stop_tokens.contains(&TokenId(token)) {
            return self.finish(id, FinishReason::Stop, now);
        }
        active.tokens.push(token);
        self.events.push(Event::Token { request: id, token: TokenId(token), logprobs: None });
        let full = active.tokens.len() >= self.limits.max_positions as usize;
        if full || active.generated() >= active.request.max_tokens as usize {
            self.finish(id, FinishReason::Length, now);
        }
    }

    /// Ends an active request; others are unknown and ignored.
    fn finish(&mut self, id: RequestId, reason: FinishReason, now: Instant) {
        if let Some(active) = self.remove(id) {
            let usage = active.usage(now);
            self.events.push(Event::Finished { request: id, reason, usage });
        }
    }

    fn remove(&mut self, id: RequestId) -> Option<Active> {
        let active = self.active.remove(&id)?;
        self.order.retain(|other| *other != id);
        if active.begun {
            self.ended.push(id);
        }
        Some(active)
    }
}

impl Limits {
    fn check(&self, request: &GenerateRequest) -> Result<(), String> {
        let GenerateRequest { prompt, sampling, .. } = request;
        if prompt.is_empty() {
            return Err("the prompt has no tokens".to_owned());
        }
        if prompt.len() > self.max_positions as usize {
            return Err(format!(
                "the prompt has {} tokens, the model takes at most {}",
                prompt.len(),
                self.max_positions
            ));
        }
        if let Some(token) = prompt.iter().find(|token| token.0 >= self.vocab_size) {
            return Err(format!(
                "token {} is not below the vocabulary's {}",
                token.0, self.vocab_size
            ));
        }
        if !sampling.temperature.is_finite() || sampling.temperature < 0.0 {
            return Err(format!("{} is no temperature", sampling.temperature));
        }
        let plain =
            Sampling { temperature: sampling.temperature, seed: sampling.seed, ..Sampling::GREEDY };
        let unused = [
            ("penalties, filters or biases", *sampling != plain),
            ("min_tokens", request.min_tokens > 0),
            ("logprobs", request.logprobs.is_some()),
            ("constraints", request.constraint.is_some()),
            ("timeouts", request.timeout_ms.is_some()),
        ];
        if let Some((what, _)) = unused.iter().find(|(_, asked)| *asked) {
            return Err(format!("this engine does not know {what} yet"));
        }
        Ok(())
    }
}
