//! What each tenant has had of the engine: start-time fair queueing (Goyal, Vin, Cheng 1996) in tokens.
//!
//! A tenant's virtual time advances by what its requests cost, divided by its weight. Whoever is
//! furthest behind comes first. One that was away does not come back with a claim for that time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use shardpack_engine_api::Tenant;

/// What a token of a prompt costs, and one that is decoded, which reads the weights for itself.
const PROMPT_TOKEN: u64 = 1;
const DECODED_TOKEN: u64 = 4;

/// Virtual time of one unit of cost at weight 1; more than the highest weight, so that none is free.
const UNIT: u64 = 1 << 12;

/// For how long a tenant that was here may be expected again.
const LATELY: Duration = Duration::from_mins(1);

/// Tenants that are remembered while they have no request: those that are ahead of the others.
const IDLE_MAX: usize = 1024;

/// The tenants of an engine.
#[derive(Default)]
pub(super) struct Tenants {
    accounts: BTreeMap<u64, Account>,
    /// Where those stand that were served last.
    now: u64,
    compilations: u64,
}

#[derive(Clone, Copy, Default)]
struct Account {
    time: u64,
    /// When one of its constraints was compiled last, counted in compilations.
    compiled: u64,
    /// When its latest request came.
    latest: Option<Instant>,
}

impl Tenants {
    /// A request of a tenant came; `active` have others. It begins where these are, or where it was.
    pub(super) fn enter(&mut self, id: u64, active: &BTreeSet<u64>, now: Instant) {
        self.accounts.entry(id).or_default().latest = Some(now);
        if active.contains(&id) {
            return;
        }
        let behind = active.iter().map(|other| self.time(*other)).min();
        let start = behind.unwrap_or(self.now).max(self.now);
        let account = self.accounts.entry(id).or_default();
        account.time = account.time.max(start);
        if self.accounts.len() > IDLE_MAX + active.len() {
            let served = self.now;
            self.accounts.retain(|other, account| {
                *other == id || active.contains(other) || account.time > served
            });
        }
        while self.accounts.len() > 2 * IDLE_MAX + active.len() {
            // All of them ahead: the one with the least to lose.
            let idle = self.accounts.iter().filter(|(other, _)| !active.contains(other));
            let least = idle.filter(|(other, _)| **other != id).min_by_key(|(_, it)| it.time);
            let Some(least) = least.map(|(other, _)| *other) else { break };
            self.accounts.remove(&least);
        }
    }

    /// Whether requests of more than one tenant have come lately.
    pub(super) fn are_several(&self, now: Instant) -> bool {
        let is_late = |account: &&Account| {
            account.latest.is_some_and(|then| now.saturating_duration_since(then) < LATELY)
        };
        self.accounts.values().filter(is_late).nth(1).is_some()
    }

    /// How far a tenant is.
    pub(super) fn time(&self, id: u64) -> u64 {
        self.accounts.get(&id).map_or(self.now, |account| account.time)
    }

    /// Charges a tenant for tokens of prompts and for decoded ones.
    pub(super) fn charge(&mut self, tenant: Tenant, prompt: usize, decoded: usize) {
        let cost = prompt as u64 * PROMPT_TOKEN + decoded as u64 * DECODED_TOKEN;
        let start = self.time(tenant.id);
        let account = self.accounts.entry(tenant.id).or_default();
        account.time = start.saturating_add(cost * UNIT / u64::from(tenant.share()));
    }

    /// These were served in a step.
    pub(super) fn served(&mut self, tenants: &BTreeSet<u64>) {
        let least = tenants.iter().map(|id| self.time(*id)).min();
        self.now = self.now.max(least.unwrap_or(0));
    }

    /// When a constraint of a tenant was compiled last.
    pub(super) fn compiled(&self, id: u64) -> u64 {
        self.accounts.get(&id).map_or(0, |account| account.compiled)
    }

    /// A constraint of a tenant is compiled.
    pub(super) fn compile(&mut self, id: u64) {
        self.compilations += 1;
        let (time, compiled) = (self.time(id), self.compilations);
        let account = self.accounts.entry(id).or_default();
        (account.time, account.compiled) = (time, compiled);
    }
}
