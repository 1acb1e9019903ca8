//! How the tokens of a step are shared: between a tenant's sequences, and between tenants.
//!
//! A tenant with few streams is protected: the work of others beside it takes only a part of the time
//! (see [`Allowance`](super::allowance::Allowance)). Each of the others runs as many streams as it
//! does, which costs little, and the rest of theirs and their prompts take turns within that part.

use std::{collections::BTreeMap, time::Instant};

use shardpack_engine_api::Tenant;

use super::{RunningSequence, Schedule, allowance::StepKind};

/// Streams of a tenant of weight 1 that are protected; whoever has more fills steps himself.
const PROTECTED_STREAMS: usize = 4;

/// A tenant's running sequences, by index.
struct Group {
    tenant: Tenant,
    decoding: Vec<usize>,
    reading: Vec<usize>,
}

impl Schedule {
    /// How many tokens of each running sequence are run.
    pub(super) fn counts(&mut self, now: Instant) -> Vec<usize> {
        self.allowance.begin(StepKind::Free { prompt: 0 });
        if self.limits.whole_prompts {
            return self.whole_counts();
        }
        let groups = self.groups();
        let mut counts = vec![0; self.running.len()];
        let streams = groups.iter().flat_map(|group| &group.decoding);
        let mut prompt_tokens = self.prefill_tokens;
        if streams.clone().next().is_some() {
            prompt_tokens = prompt_tokens.min(self.limits.chunked_prefill_tokens);
        } else if self.tenants.are_several(now) {
            prompt_tokens = self.allowance.prompt_chunk(prompt_tokens);
        }
        let Some(protected) = protected(&groups) else {
            streams.for_each(|index| counts[*index] = 1);
            let prompt = self.share_prompt_tokens(&groups, prompt_tokens, &mut counts);
            self.allowance.begin(StepKind::Free { prompt });
            return counts;
        };
        let mut rest = Vec::new();
        for group in &groups {
            let mut streams = group.decoding.clone();
            // Each gets its turn.
            streams.sort_by_key(|index| (self.running[*index].latest_step, *index));
            let most = protected * group.tenant.share() as usize;
            rest.extend(streams.split_off(most.min(streams.len())));
            for index in streams {
                counts[index] = 1;
            }
        }
        self.allowance.beside(counts.iter().sum::<usize>().saturating_sub(protected));
        let has_further_work =
            !rest.is_empty() || groups.iter().any(|group| !group.reading.is_empty());
        let mut step = StepKind::Protected;
        if has_further_work && self.allowance.allows() {
            rest.sort_by_key(|index| (self.running[*index].latest_step, *index));
            rest.truncate(self.allowance.streams(rest.len()));
            for index in rest {
                counts[index] = 1;
            }
            let chunk = self.allowance.chunk(prompt_tokens);
            let prompt = self.share_prompt_tokens(&groups, chunk, &mut counts);
            step = StepKind::WithOthers { prompt };
        }
        self.allowance.begin(step);
        counts
    }

    /// The running sequences of each tenant, in the order of the tenants' first ones. Left out are
    /// those whose mask is being computed.
    fn groups(&self) -> Vec<Group> {
        let mut places: BTreeMap<u64, usize> = BTreeMap::new();
        let mut groups: Vec<Group> = Vec::new();
        for (index, running) in self.running.iter().enumerate() {
            let tenant = running.sequence.request.tenant;
            let place = *places.entry(tenant.id).or_insert(groups.len());
            if place == groups.len() {
                groups.push(Group { tenant, decoding: Vec::new(), reading: Vec::new() });
            }
            let group = &mut groups[place];
            if !running.is_decoding() {
                group.reading.push(index);
            } else if running.sequence.is_ready() {
                group.decoding.push(index);
            }
        }
        groups
    }

    /// Shares `budget` among the prompts of all tenants and returns how much of it was used.
    fn share_prompt_tokens(&self, groups: &[Group], budget: usize, counts: &mut [usize]) -> usize {
        let mut order: Vec<&Group> =
            groups.iter().filter(|group| !group.reading.is_empty()).collect();
        // Sorting is stable: a single tenant's order is that of admission.
        order.sort_by_key(|group| self.tenants.time(group.tenant.id));
        let weights: usize = order.iter().map(|group| group.tenant.share() as usize).sum();
        let mut left = budget;
        // First each tenant its part, then whoever is furthest behind what is left.
        for group in &order {
            let part = (budget * group.tenant.share() as usize / weights.max(1)).max(1);
            left -= self.read_prompts(&group.reading, part.min(left), counts);
        }
        for group in &order {
            left -= self.read_prompts(&group.reading, left, counts);
        }
        budget - left
    }

    /// Shares `budget` among prompts of one tenant and returns how much of it was used.
    fn read_prompts(&self, reading: &[usize], budget: usize, counts: &mut [usize]) -> usize {
        let mut left = budget;
        // First each its share, so that a short prompt does not wait for the end of a long one,
        // then the oldest what is left.
        for share in [(budget / reading.len().max(1)).max(1), usize::MAX] {
            for index in reading {
                let wanted = self.running[*index].readable().saturating_sub(counts[*index]);
                let more = wanted.min(share).min(left);
                counts[*index] += more;
                left -= more;
            }
        }
        budget - left
    }

    /// Whole prompts within the budget; the first one even beyond it.
    fn whole_counts(&self) -> Vec<usize> {
        let mut budget = self.prefill_tokens;
        let count = |(index, running): (usize, &RunningSequence)| {
            let left = running.left();
            let runs = index == 0 || left <= budget;
            budget = budget.saturating_sub(if runs { left } else { 0 });
            if runs { left } else { 0 }
        };
        self.running.iter().enumerate().map(count).collect()
    }
}

/// Streams that each tenant of weight 1 runs in every step: as many as the tenant with the fewest
/// has. None where nobody has few, or there is one tenant alone.
fn protected(groups: &[Group]) -> Option<usize> {
    if groups.len() < 2 {
        return None;
    }
    let streams = groups.iter().filter(|group| !group.decoding.is_empty());
    let fewest =
        streams.map(|group| group.decoding.len().div_ceil(group.tenant.share() as usize)).min()?;
    (fewest <= PROTECTED_STREAMS).then_some(fewest)
}
