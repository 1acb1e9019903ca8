//! Applies the sampled tokens of a step to its sequences.

use std::{collections::BTreeSet, time::Instant};

use shardpack_engine_api::{Event, FinishReason, RequestId, TokenId};
use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::{
    super::{
        pages::{Kind, Pages},
        plan::{Plan, Publish},
        prompt_rows::{PromptResult, PromptValues},
        runner::StepResults,
        sample::SampledToken,
    },
    RunningSequence, Schedule,
    sequence::TokenEffect,
};

impl Schedule {
    /// Takes the results of a step.
    pub(in crate::engine) fn record(&mut self, plan: &Plan, results: StepResults, now: Instant) {
        let StepResults { sampled, prompts } = results;
        self.charge(plan);
        for scheduled in &plan.scheduled {
            // Cancelling happens between steps, so it is still there.
            let place = self.running.iter().position(|running| running.sequence.id == scheduled.id);
            self.advance(
                place.expect("only running sequences are scheduled"),
                scheduled.known().len(),
            );
        }
        for result in prompts {
            self.report(result);
        }
        for scheduled in plan.scheduled.iter().filter(|scheduled| !scheduled.sample) {
            let done = |it: &RunningSequence| it.sequence.id == scheduled.id && it.left() == 0;
            if self.running.iter().any(done) {
                // Nothing was wanted but the prompt's own values.
                self.finish(scheduled.id, FinishReason::Length, now);
            }
        }
        let sampled_sequences = plan.scheduled.iter().filter(|scheduled| scheduled.sample);
        for (scheduled, sampled) in sampled_sequences.zip(sampled) {
            self.learn(scheduled, &sampled);
            for (place, token) in sampled.tokens.into_iter().enumerate() {
                // A token may end its request before the last of them.
                let Some(index) = self.running.iter().position(|it| it.sequence.id == scheduled.id)
                else {
                    break;
                };
                if place > 0 {
                    // The one before was a draft token, which is accepted only now.
                    self.advance(index, 1);
                }
                self.take_token(index, token, now);
            }
        }
        self.prepare_masks();
    }

    /// Charges the tenants for the tokens of a step.
    fn charge(&mut self, plan: &Plan) {
        let mut served = BTreeSet::new();
        for scheduled in &plan.scheduled {
            let running = self.running.iter_mut().find(|it| it.sequence.id == scheduled.id);
            let Some(RunningSequence { sequence, .. }) = running else { continue };
            let (tenant, prompt) = (sequence.request.tenant, sequence.request.prompt.len());
            let known = scheduled.known().len();
            let fresh = sequence.charge(scheduled.position as usize + known);
            let is_prompt = (scheduled.position as usize) < prompt;
            let (read, decoded) = if is_prompt { (fresh, 0) } else { (0, fresh) };
            self.tenants.charge(tenant, read, decoded + scheduled.drafts as usize);
            served.insert(tenant.id);
        }
        if !served.is_empty() {
            self.tenants.served(&served);
        }
    }

    /// Reports what a prompt's rows gave.
    fn report(&mut self, result: PromptResult) {
        let PromptResult { id: request, values } = result;
        let running = self.running.iter_mut().find(|running| running.sequence.id == request);
        let sequence = &mut running.expect("only running sequences are scheduled").sequence;
        match values {
            PromptValues::Logprobs { first, logprobs } => {
                let (first, logprobs) = sequence.not_scored(first, logprobs);
                if !logprobs.is_empty() {
                    self.events.push(Event::PromptLogprobs { request, first, logprobs });
                }
            }
            PromptValues::Embedding(values) if values.iter().all(|value| value.is_finite()) => {
                self.events.push(Event::Embedding { request, values });
            }
            PromptValues::Embedding(_) => {
                self.fail(request, "the model computed an embedding that is not finite".to_owned());
            }
        }
    }

    /// So many more tokens of a sequence are in the KV caches.
    fn advance(&mut self, index: usize, count: usize) {
        let running = &mut self.running[index];
        running.computed += count;
        publish(running, &mut self.pages, self.limits.kind(&running.sequence), &mut self.publish);
    }

    /// Takes the next token of a sequence.
    fn take_token(&mut self, index: usize, sampled: SampledToken, now: Instant) {
        let positions = self.positions();
        let running = &mut self.running[index];
        let id: RequestId = running.sequence.id;
        let Some(token) = sampled.token else {
            return self.fail(id, "the model computed NaN logits".to_owned());
        };
        match running.sequence.take(token, now) {
            TokenEffect::Stop => self.finish(id, FinishReason::Stop, now),
            TokenEffect::Token { ends } => {
                let is_full =
                    running.sequence.tokens.len() >= positions || running.sequence.is_complete();
                let (token, logprobs) = (TokenId(token), sampled.logprobs);
                self.events.push(Event::Token { request: id, token, logprobs });
                if ends {
                    self.finish(id, FinishReason::Stop, now);
                } else if is_full {
                    self.finish(id, FinishReason::Length, now);
                }
            }
            TokenEffect::Fault(message) => self.fail(id, message),
        }
    }
}

/// Adds the full pages of a sequence to the prefix cache. Where another sequence was first, later
/// pages stay private: a chain has one owner per page.
fn publish(
    running: &mut RunningSequence,
    pages: &mut Pages,
    kind: Kind,
    publish: &mut Vec<Publish>,
) {
    while running.publishes && running.computed >= (running.shared.len() + 1) * TOKENS_PER_PAGE {
        let index = running.shared.len();
        let tokens =
            &running.sequence.tokens[index * TOKENS_PER_PAGE..(index + 1) * TOKENS_PER_PAGE];
        match pages.publish(kind, &running.shared, tokens) {
            Some(page) => {
                running.shared.push(page);
                running.own -= 1;
                publish.push(Publish { id: running.sequence.id, index: index as u32, page });
            }
            None => running.publishes = false,
        }
    }
}
