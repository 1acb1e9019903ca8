//! What a step's tokens mean for each request.

use std::time::Instant;

use shardpack_engine_api::{Event, FinishReason, RequestId, TokenId};

use super::{
    super::{
        pages::Pages,
        plan::{Plan, Publish},
        runner::Sampled,
        sample::Chosen,
    },
    Active, Schedule,
    sequence::Taken,
};
use crate::backend::TOKENS_PER_PAGE;

impl Schedule {
    /// Takes what a step brought.
    pub(in crate::engine) fn record(&mut self, plan: &Plan, sampled: Vec<Sampled>, now: Instant) {
        for work in &plan.work {
            // Cancelling happens between steps, so it is still there.
            let place = self.active.iter().position(|active| active.job.id == work.id);
            self.fed(place.expect("work is on active requests"), work.known().len());
        }
        let works = plan.work.iter().filter(|work| work.sample);
        for (work, sampled) in works.zip(sampled) {
            self.learn(work, &sampled);
            for (place, chosen) in sampled.chosen.into_iter().enumerate() {
                // A token may end its request before the last of them.
                let Some(index) = self.active.iter().position(|it| it.job.id == work.id) else {
                    break;
                };
                if place > 0 {
                    // The one before was a draft: only now it is known to belong to the sequence.
                    self.fed(index, 1);
                }
                self.take(index, chosen, now);
            }
        }
    }

    /// The ranks have so many more tokens of a sequence in their caches.
    fn fed(&mut self, index: usize, count: usize) {
        let active = &mut self.active[index];
        active.fed += count;
        publish(active, &mut self.pages, self.limits.kind(&active.job), &mut self.publish);
    }

    /// Takes the next token of a sequence.
    fn take(&mut self, index: usize, chosen: Chosen, now: Instant) {
        let positions = self.positions();
        let active = &mut self.active[index];
        let id: RequestId = active.job.id;
        let Some(token) = chosen.token else {
            return self.fail(id, "the model computed values that are not numbers".to_owned());
        };
        match active.job.take(token, now) {
            Taken::Stop => self.finish(id, FinishReason::Stop, now),
            Taken::Token { ends } => {
                let is_full = active.job.tokens.len() >= positions || active.job.is_complete();
                let (token, logprobs) = (TokenId(token), chosen.logprobs);
                self.events.push(Event::Token { request: id, token, logprobs });
                if ends {
                    self.finish(id, FinishReason::Stop, now);
                } else if is_full {
                    self.finish(id, FinishReason::Length, now);
                }
            }
            Taken::Fault(message) => self.fail(id, message),
        }
    }
}

/// Names the pages of a sequence that are full. Where another sequence was first, later pages
/// stay its own: a chain has one owner per page.
fn publish(active: &mut Active, pages: &mut Pages, kind: u32, publish: &mut Vec<Publish>) {
    while active.publishes && active.fed >= (active.shared.len() + 1) * TOKENS_PER_PAGE {
        let index = active.shared.len();
        let tokens = &active.job.tokens[index * TOKENS_PER_PAGE..(index + 1) * TOKENS_PER_PAGE];
        match pages.publish(kind, &active.shared, tokens) {
            Some(page) => {
                active.shared.push(page);
                active.own -= 1;
                publish.push(Publish { id: active.job.id, index: index as u32, page });
            }
            None => active.publishes = false,
        }
    }
}
