//! Which waiting request is admitted next, and who gives way where there is no room.
//!
//! One tenant's requests are admitted in order of arrival. Between tenants the one with the fewest
//! running sequences for its weight comes first, then the one that is furthest behind. A tenant that
//! has less than its part of the sequences or of the KV memory is not kept waiting by one that has more
//! than its part and is not behind it: that one's latest sequence waits again.

use std::{collections::BTreeMap, time::Instant};

use shardpack_engine_api::Tenant;
use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::{RunningSequence, Schedule};

/// So that parts of small numbers compare.
const SCALE: u64 = 1 << 20;

/// What a tenant has of the running sequences.
#[derive(Clone, Copy)]
struct Held {
    tenant: Tenant,
    sequences: u64,
    pages: u64,
}

impl Held {
    const fn none(tenant: Tenant) -> Self {
        Self { tenant, sequences: 0, pages: 0 }
    }

    fn sequences_by_weight(&self) -> u64 {
        self.sequences * SCALE / u64::from(self.tenant.share())
    }
}

impl Schedule {
    /// Admits what there is room for.
    pub(super) fn admit(&mut self, now: Instant) {
        while let Some(index) = self.next_waiting() {
            if self.running.len() >= self.limits.max_sequences && !self.make_place(index) {
                return;
            }
            // Another one may have come to wait before it.
            let Some(index) = self.next_waiting() else { return };
            if !self.admit_one(index, now) {
                return;
            }
        }
    }

    /// Admits a waiting sequence if there is KV memory for it.
    fn admit_one(&mut self, index: usize, now: Instant) -> bool {
        let sequence = &self.waiting[index];
        let (kind, tenant) = (self.limits.kind(sequence), sequence.request.tenant);
        // Every row of a prompt of which something is wanted is computed.
        let found = if self.limits.prefix_reuse && sequence.request.prompt_output.is_nothing() {
            self.pages.find(kind, &sequence.tokens)
        } else {
            Vec::new()
        };
        // Room for the next token too, so that it is not preempted at once.
        let needed = (sequence.tokens.len() + 1).div_ceil(TOKENS_PER_PAGE);
        let own = (needed.min(self.pages.capacity() as usize) - found.len()) as u64;
        let id = sequence.id;
        if !self.pages.take(own) && !self.make_room(tenant, found.len() as u64, own) {
            self.pages.release(&found);
            return false;
        }
        // Others may have come to wait before it.
        let place = self.waiting.iter().position(|sequence| sequence.id == id);
        let mut sequence =
            place.and_then(|place| self.waiting.remove(place)).expect("looked at above");
        let computed = found.len() * TOKENS_PER_PAGE;
        sequence.admit(computed as u32, now);
        self.running.push(RunningSequence {
            sequence,
            computed,
            shared: found,
            own,
            publishes: self.limits.prefix_reuse,
            begun: false,
            latest_step: 0,
        });
        true
    }

    /// The waiting sequence that comes next.
    fn next_waiting(&self) -> Option<usize> {
        let first = self.waiting.front()?.request.tenant.id;
        if self.waiting.iter().all(|sequence| sequence.request.tenant.id == first) {
            return Some(0);
        }
        let held = self.held();
        let rank = |(index, tenant): (usize, Tenant)| {
            let held = held.get(&tenant.id).copied().unwrap_or(Held::none(tenant));
            (held.sequences_by_weight(), self.tenants.time(tenant.id), index)
        };
        let waiting = self.waiting.iter().map(|sequence| sequence.request.tenant).enumerate();
        waiting.min_by_key(|waiting| rank(*waiting)).map(|(index, _)| index)
    }

    /// Has a sequence of a tenant with more than its part give way to a waiting one.
    fn make_place(&mut self, index: usize) -> bool {
        // Prompts of embeddings are over with their step.
        if self.limits.whole_prompts {
            return false;
        }
        let tenant = self.waiting[index].request.tenant;
        let (held, weights) = (self.held(), self.weights());
        let part = |tenant: Tenant| {
            let places = self.limits.max_sequences as u64;
            (places * u64::from(tenant.share()) / weights.max(1)).max(1)
        };
        if held.get(&tenant.id).map_or(0, |held| held.sequences) >= part(tenant) {
            return false;
        }
        let time = self.tenants.time(tenant.id);
        let over = held.values().filter(|held| {
            held.sequences > part(held.tenant) && self.tenants.time(held.tenant.id) >= time
        });
        let most = over.max_by_key(|held| (held.sequences_by_weight(), held.tenant.id));
        let Some(victim) = most.and_then(|held| self.latest_of(held.tenant.id)) else {
            return false;
        };
        let running = self.running.remove(victim);
        self.preempt(running);
        true
    }

    /// Allocates `own` pages for a tenant's sequence that has found others, from tenants that have more
    /// than their part.
    fn make_room(&mut self, tenant: Tenant, found: u64, own: u64) -> bool {
        let (held, weights) = (self.held(), self.weights());
        let part = |tenant: Tenant| {
            let part = u128::from(self.pages.capacity()) * u128::from(tenant.share());
            u64::try_from(part / u128::from(weights.max(1))).unwrap_or(u64::MAX)
        };
        let mine = held.get(&tenant.id).map_or(0, |held| held.pages);
        if mine + found + own > part(tenant) {
            return false;
        }
        let time = self.tenants.time(tenant.id);
        let over = held.values().filter(|held| {
            held.pages > part(held.tenant) && self.tenants.time(held.tenant.id) >= time
        });
        let Some(most) = over.max_by_key(|held| (held.pages, held.tenant.id)) else { return false };
        let (victim, spare) = (most.tenant.id, most.pages - part(most.tenant));
        if spare < own.saturating_sub(self.pages.free()) {
            return false;
        }
        while let Some(index) = self.latest_of(victim) {
            let running = self.running.remove(index);
            self.preempt(running);
            if self.pages.take(own) {
                return true;
            }
        }
        false
    }

    /// The sequence of a tenant that was admitted last.
    fn latest_of(&self, tenant: u64) -> Option<usize> {
        self.running.iter().rposition(|running| running.sequence.request.tenant.id == tenant)
    }

    /// The running sequence that gives way where there is no memory for the next tokens: the latest of
    /// the tenant that is furthest ahead.
    fn first_to_give_way(&self) -> usize {
        let tenants = self.running.iter().map(|running| running.sequence.request.tenant.id);
        // The last of equal ones: of one tenant alone the latest sequence.
        let ahead = tenants.max_by_key(|id| self.tenants.time(*id));
        ahead.and_then(|id| self.latest_of(id)).expect("some sequence is running")
    }

    fn held(&self) -> BTreeMap<u64, Held> {
        let mut held = BTreeMap::new();
        for running in &self.running {
            let tenant = running.sequence.request.tenant;
            let held = held.entry(tenant.id).or_insert(Held::none(tenant));
            held.sequences += 1;
            held.pages += running.shared.len() as u64 + running.own;
        }
        held
    }

    /// Weights of all tenants with a request that runs or waits to be admitted.
    fn weights(&self) -> u64 {
        let running = self.running.iter().map(|running| running.sequence.request.tenant);
        let waiting = self.waiting.iter().map(|sequence| sequence.request.tenant);
        let weights: BTreeMap<u64, u64> =
            running.chain(waiting).map(|it| (it.id, u64::from(it.share()))).collect();
        weights.values().sum()
    }

    /// Allocates a page for the next token of every sequence that needs one; others are preempted
    /// where there is none.
    pub(super) fn extend(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            if running.sequence.tokens.len() <= running.room() {
                index += 1;
            } else if self.pages.take(1) {
                running.own += 1;
                index += 1;
            } else {
                let victim = self.first_to_give_way();
                let running = self.running.remove(victim);
                self.preempt(running);
                if victim < index {
                    index -= 1;
                }
            }
        }
    }

    /// A sequence waits again, before others of its tenant.
    fn preempt(&mut self, running: RunningSequence) {
        self.pages.release(&running.shared);
        self.pages.give(running.own);
        if running.begun {
            self.ended.push(running.sequence.id);
        }
        self.waiting.push_front(running.sequence);
    }
}
