//! One request with the tokens that it has so far.

use std::time::{Duration, Instant};

use shardpack_engine_api::{Constraint, GenerateRequest, RequestId, TokenId, TokenMask, Usage};

use super::{
    super::draft::{Drafter, Guess},
    needed,
};

pub(super) struct Job {
    pub(super) id: RequestId,
    pub(super) request: GenerateRequest,
    /// Prompt and answer.
    pub(super) tokens: Vec<u32>,
    constraint: Option<Box<dyn Constraint>>,
    /// What guesses its next tokens, where that is done.
    drafter: Option<Drafter>,
    /// Drafts that were run, and those that were kept.
    drafted: [u32; 2],
    deadline: Option<Instant>,
    /// When it was first admitted, and how many tokens were cached then.
    admitted: Option<(Instant, u32)>,
    /// When the first and the latest token came.
    answered: Option<[Instant; 2]>,
}

/// What a sampled token means.
pub(super) enum Taken {
    /// It ends the answer and is no part of it.
    Stop,
    /// It belongs to the answer, perhaps as the last one that its constraint lets pass.
    Token { ends: bool },
    /// The constraint does not know what to do with it.
    Fault(String),
}

impl Job {
    pub(super) fn new(
        id: RequestId,
        request: GenerateRequest,
        constraint: Option<Box<dyn Constraint>>,
        drafter: Option<Drafter>,
        now: Instant,
    ) -> Self {
        let tokens = request.prompt.iter().map(|token| token.0).collect();
        let timeout = request.timeout_ms.map(Duration::from_millis);
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        Self {
            id,
            request,
            tokens,
            constraint,
            drafter,
            drafted: [0; 2],
            deadline,
            admitted: None,
            answered: None,
        }
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
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

    /// Tokens that may not come before enough have; a constraint knows itself when it may end.
    pub(super) fn forbidden(&self) -> Vec<u32> {
        if self.request.min_tokens == 0 || self.constraint.is_some() {
            return Vec::new();
        }
        self.request.stop_tokens.iter().map(|token| token.0).collect()
    }

    /// What the token in the place of each draft, and the one after them, may be: everything where
    /// there is no mask. Empty without a constraint. Drafts that may not come are dropped, with
    /// all after them.
    pub(super) fn masks(
        &mut self,
        vocab_size: u32,
        drafts: &mut Vec<u32>,
    ) -> Result<Vec<Option<TokenMask>>, String> {
        let Some(constraint) = &mut self.constraint else { return Ok(Vec::new()) };
        let mut masks = vec![mask(constraint.as_mut(), vocab_size)?];
        if drafts.is_empty() {
            return Ok(masks);
        }
        // The constraint itself only ever sees what has come.
        let mut ahead = constraint.fork();
        for (place, draft) in drafts.iter().enumerate() {
            let draft = TokenId(*draft);
            let is_allowed = masks[place].as_ref().is_none_or(|mask| mask.is_allowed(draft));
            let goes_on = is_allowed && ahead.accept(draft).is_ok() && !ahead.must_stop();
            // Should the draft come all the same, the next step finds out what is wrong.
            let next = if goes_on { mask(ahead.as_mut(), vocab_size).ok() } else { None };
            let Some(next) = next else { break };
            masks.push(next);
        }
        drafts.truncate(masks.len() - 1);
        Ok(masks)
    }

    /// Guesses the next tokens by what the request has said.
    pub(super) fn propose(&mut self) {
        if let Some(drafter) = &mut self.drafter {
            drafter.propose(&self.tokens, &self.request.stop_tokens);
        }
    }

    /// Whether a draft model may know better.
    pub(super) fn asks_model(&self) -> bool {
        self.drafter.as_ref().is_some_and(Drafter::asks_model)
    }

    /// What a draft model would say.
    pub(super) fn take_guesses(&mut self, guesses: Vec<Guess>) {
        if let Some(drafter) = &mut self.drafter {
            drafter.take_guesses(guesses);
        }
    }

    /// How likely each of up to `most` guesses comes true with those before it.
    pub(super) fn chances(&self, most: usize) -> Vec<f32> {
        self.drafter.as_ref().map_or(Vec::new(), |drafter| drafter.chances(most))
    }

    /// The first of the guesses.
    pub(super) fn drafts(&self, count: usize) -> Vec<u32> {
        self.drafter.as_ref().map_or(Vec::new(), |drafter| drafter.drafts(count))
    }

    /// Takes what came after the guesses, of which so many were run and kept.
    pub(super) fn learn(&mut self, [run, kept]: [u32; 2], came: &[u32]) {
        self.drafted[0] += run;
        self.drafted[1] += kept;
        if let Some(drafter) = &mut self.drafter {
            drafter.learn(came);
        }
    }

    pub(super) fn take(&mut self, token: u32, now: Instant) -> Taken {
        self.answered.get_or_insert([now, now])[1] = now;
        if self.request.stop_tokens.contains(&TokenId(token)) {
            return Taken::Stop;
        }
        self.tokens.push(token);
        let Some(constraint) = &mut self.constraint else { return Taken::Token { ends: false } };
        match constraint.accept(TokenId(token)) {
            Ok(()) => Taken::Token { ends: constraint.must_stop() },
            Err(error) => Taken::Fault(error.to_string()),
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
            prediction_tokens: self.drafter.as_ref().map_or([0; 2], Drafter::told),
            prefill_seconds: first.saturating_duration_since(admitted).as_secs_f64(),
            decode_seconds: (last - first).as_secs_f64(),
        }
    }
}

/// What may come next; everything where there is none.
fn mask(constraint: &mut dyn Constraint, vocab_size: u32) -> Result<Option<TokenMask>, String> {
    let mut mask = TokenMask::all(vocab_size);
    constraint.mask(&mut mask).map_err(|error| error.to_string())?;
    if mask.vocab_size() != vocab_size || mask.count() == 0 {
        return Err("nothing may follow here that would meet the constraint".to_owned());
    }
    Ok(needed(mask))
}
