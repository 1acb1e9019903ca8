//! Whose request is next: tenants have processes in turns, however many requests each has, and one whose
//! requests keep ending processes waits by itself.

use std::{
    cell::Cell,
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use super::error::Cause;

/// Ends in a row, without an answer between them, after which there is a pause.
const ENDS_BEFORE_PAUSE: u32 = 3;
/// The first pause, and the longest; each is twice as long as the one before.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_mins(1);
/// Tenants whose ends are remembered. The one whose pause is over first is forgotten for a new one.
const TENANTS_MAX: usize = 1024;

thread_local! {
    /// For whom this thread works.
    static TENANT: Cell<u64> = const { Cell::new(0) };
}

/// Does a tenant's work on this thread: prompts are made deep within it, and their processes are given
/// out in the tenant's turn. Work without a tenant is that of tenant 0.
pub fn for_tenant<T>(tenant: u64, work: impl FnOnce() -> T) -> T {
    /// Puts the former tenant back, after a panic too.
    struct Former(u64);
    impl Drop for Former {
        fn drop(&mut self) {
            TENANT.set(self.0);
        }
    }
    let _former = Former(TENANT.replace(tenant));
    work()
}

/// For whom this thread works.
pub(super) fn tenant() -> u64 {
    TENANT.get()
}

/// Who waits for a process and who has one.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Processes at work, by tenant.
    running: BTreeMap<u64, usize>,
    /// Tickets by tenant, in the order of the tenants' turns.
    waiting: VecDeque<(u64, VecDeque<u64>)>,
    tickets: u64,
}

impl Turns {
    /// A ticket for a tenant's request.
    pub(super) fn queue(&mut self, tenant: u64) -> u64 {
        self.tickets += 1;
        match self.waiting.iter_mut().find(|(id, _)| *id == tenant) {
            Some((_, queue)) => queue.push_back(self.tickets),
            None => self.waiting.push_back((tenant, VecDeque::from([self.tickets]))),
        }
        self.tickets
    }

    /// The ticket whose turn it is. No tenant has more than `most_of_one` processes.
    pub(super) fn next(&self, most_of_one: usize) -> Option<u64> {
        let has = |tenant: &u64| self.running.get(tenant).copied().unwrap_or_default();
        let mut waiting = self.waiting.iter();
        waiting.find(|(tenant, _)| has(tenant) < most_of_one)?.1.front().copied()
    }

    /// A ticket becomes a turn; its tenant's next one comes after everybody else's.
    pub(super) fn begin(&mut self, ticket: u64) {
        if let Some(tenant) = self.leave(ticket) {
            *self.running.entry(tenant).or_default() += 1;
            if let Some(place) = self.waiting.iter().position(|(id, _)| *id == tenant)
                && let Some(rest) = self.waiting.remove(place)
            {
                self.waiting.push_back(rest);
            }
        }
    }

    /// A ticket is given up; whose it was.
    pub(super) fn leave(&mut self, ticket: u64) -> Option<u64> {
        let place = self.waiting.iter().position(|(_, queue)| queue.contains(&ticket))?;
        let (tenant, queue) = &mut self.waiting[place];
        let tenant = *tenant;
        queue.retain(|own| *own != ticket);
        if queue.is_empty() {
            self.waiting.remove(place);
        }
        Some(tenant)
    }

    /// A turn is over.
    pub(super) fn end(&mut self, tenant: u64) {
        if let Some(running) = self.running.get_mut(&tenant) {
            *running = running.saturating_sub(1);
            if *running == 0 {
                self.running.remove(&tenant);
            }
        }
    }
}

/// Ends since the last answer, how the last one was, and when the pause after it is over.
#[derive(Clone, Debug, Default)]
pub(super) struct Ends {
    count: u32,
    pub(super) last: Option<Cause>,
    pub(super) pause: Option<Instant>,
}

impl Ends {
    /// Counts an end, and pauses where there were several.
    pub(super) fn count(&mut self, cause: &Cause, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.last = Some(cause.clone());
        let more = self.count.checked_sub(ENDS_BEFORE_PAUSE);
        self.pause = more.map(|more| {
            let pause = PAUSE.saturating_mul(1 << more.min(16)).min(PAUSE_MAX);
            now + pause
        });
    }

    /// How long the pause goes on.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let left = self.pause?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

/// Ends by what requests cost, by the tenant who made them: they say nothing of the model.
#[derive(Debug, Default)]
pub(super) struct TenantEnds(BTreeMap<u64, Ends>);

impl TenantEnds {
    pub(super) fn count(&mut self, tenant: u64, cause: &Cause, now: Instant) {
        if self.0.len() >= TENANTS_MAX && !self.0.contains_key(&tenant) {
            let first = self.0.iter().min_by_key(|(_, ends)| ends.pause).map(|(id, _)| *id);
            first.map(|id| self.0.remove(&id));
        }
        self.0.entry(tenant).or_default().count(cause, now);
    }

    pub(super) fn answered(&mut self, tenant: u64) {
        self.0.remove(&tenant);
    }

    /// How the tenant's last process ended and how long it waits, if it does.
    pub(super) fn wait(&self, tenant: u64, now: Instant) -> Option<(Cause, Duration)> {
        let ends = self.0.get(&tenant)?;
        Some((ends.last.clone()?, ends.wait(now)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_have_processes_in_turns() {
        let mut turns = Turns::default();
        let many: Vec<u64> = (0..5).map(|_| turns.queue(1)).collect();
        let [second, third] = [turns.queue(2), turns.queue(3)];
        let again = turns.queue(2);
        let mut order = Vec::new();
        while let Some(ticket) = turns.next(usize::MAX) {
            turns.begin(ticket);
            order.push(ticket);
        }
        let expected = [many[0], second, third, many[1], again, many[2], many[3], many[4]];
        assert_eq!(order, expected);
        assert!(turns.waiting.is_empty());
        assert_eq!(turns.running, BTreeMap::from([(1, 5), (2, 2), (3, 1)]));
    }

    #[test]
    fn no_tenant_has_all_processes() {
        let mut turns = Turns::default();
        let own: Vec<u64> = (0..3).map(|_| turns.queue(1)).collect();
        for ticket in &own[..2] {
            assert_eq!(turns.next(2), Some(*ticket));
            turns.begin(*ticket);
        }
        assert_eq!(turns.next(2), None, "it has two at work");
        let other = turns.queue(2);
        assert_eq!(turns.next(2), Some(other), "the other does not wait behind it");
        assert_eq!(turns.leave(other), Some(2));
        assert_eq!((turns.next(2), turns.leave(other)), (None, None));
        turns.end(1);
        assert_eq!(turns.next(2), Some(own[2]));
    }

    #[test]
    fn ends_by_what_requests_cost_are_their_tenants_own() {
        let mut ends = TenantEnds::default();
        let now = Instant::now();
        for _ in 0..ENDS_BEFORE_PAUSE - 1 {
            ends.count(1, &Cause::Memory, now);
        }
        assert_eq!(ends.wait(1, now), None);
        ends.count(1, &Cause::Memory, now);
        assert_eq!(ends.wait(1, now), Some((Cause::Memory, PAUSE)));
        assert_eq!(ends.wait(2, now), None);
        ends.count(1, &Cause::Memory, now);
        assert_eq!(ends.wait(1, now), Some((Cause::Memory, 2 * PAUSE)));
        assert_eq!(ends.wait(1, now + 2 * PAUSE), None);
        ends.answered(1);
        ends.count(1, &Cause::Memory, now);
        assert_eq!(ends.wait(1, now), None, "an answer between them begins anew");
        for tenant in 0..2 * TENANTS_MAX as u64 {
            ends.count(tenant, &Cause::Memory, now);
        }
        assert_eq!(ends.0.len(), TENANTS_MAX);
    }

    #[test]
    fn work_is_done_for_its_tenant() {
        assert_eq!(tenant(), 0);
        for_tenant(7, || {
            for_tenant(8, || assert_eq!(tenant(), 8));
            assert_eq!(tenant(), 7);
        });
        assert_eq!(tenant(), 0);
    }
}
