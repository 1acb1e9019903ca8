//! Places and turns that tenants share: no tenant takes them all, and none waits for another one's
//! whole queue.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use shardpack_engine_api::Tenant;
use tokio::sync::{Notify, oneshot};

/// Of so many places one is kept for tenants that have less than their part of them.
const KEPT_OF: u32 = 16;

/// The places for answers in progress. A tenant alone may take all but the last sixteenth; these are
/// for others, so that one with many requests does not have those of others refused.
#[derive(Debug)]
pub(super) struct Slots {
    places: u32,
    taken: Mutex<BTreeMap<u64, Taken>>,
    freed: Notify,
}

#[derive(Debug)]
struct Taken {
    weight: u32,
    count: u32,
}

/// Places that a request holds.
#[derive(Debug)]
pub(super) struct SlotPermit {
    slots: Arc<Slots>,
    tenant: Tenant,
    count: u32,
}

impl Slots {
    pub(super) fn new(places: u32) -> Arc<Self> {
        Arc::new(Self { places, taken: Mutex::default(), freed: Notify::new() })
    }

    /// Places for a tenant's request, if it may have them now.
    pub(super) fn try_take(self: &Arc<Self>, tenant: Tenant, count: u32) -> Option<SlotPermit> {
        let mut taken = self.lock();
        if !self.may_take(&taken, tenant, count) {
            return None;
        }
        let weight = tenant.share();
        let own = taken.entry(tenant.id).or_insert(Taken { weight, count: 0 });
        own.count += count;
        drop(taken);
        Some(SlotPermit { slots: Arc::clone(self), tenant, count })
    }

    fn may_take(&self, taken: &BTreeMap<u64, Taken>, tenant: Tenant, count: u32) -> bool {
        let all: u64 = taken.values().map(|taken| u64::from(taken.count)).sum();
        let own = taken.get(&tenant.id).map_or(0, |taken| u64::from(taken.count));
        let (places, count) = (u64::from(self.places), u64::from(count));
        let kept = u64::from(self.places / KEPT_OF);
        if all + count + kept <= places {
            return true;
        }
        let others = taken.iter().filter(|(id, _)| **id != tenant.id);
        let others: u64 = others.map(|(_, taken)| u64::from(taken.weight)).sum();
        let weight = u64::from(tenant.share());
        // One more is always on its way.
        let part = places * weight / (others + weight + 1);
        all + count <= places && (kept == 0 || own + count <= part.max(1))
    }

    /// Ready when no place is taken.
    pub(super) async fn all_free(&self) {
        loop {
            let freed = self.freed.notified();
            if self.lock().is_empty() {
                return;
            }
            freed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotPermit {
    /// Takes more places; whether it may.
    pub(super) fn grow(&mut self, more: u32) -> bool {
        let Some(mut further) = self.slots.try_take(self.tenant, more) else { return false };
        self.count += further.count;
        further.count = 0;
        true
    }
}

impl Drop for SlotPermit {
    fn drop(&mut self) {
        let mut taken = self.slots.lock();
        if let Some(own) = taken.get_mut(&self.tenant.id) {
            own.count = own.count.saturating_sub(self.count);
            if own.count == 0 {
                taken.remove(&self.tenant.id);
            }
        }
        let is_free = taken.is_empty();
        drop(taken);
        if is_free {
            self.slots.freed.notify_waiters();
        }
    }
}

/// Turns at work of which only some may be under way at once. Tenants that wait have them one after the
/// other, however many requests each has.
#[derive(Debug)]
pub(super) struct Turns {
    most: usize,
    /// Of one tenant.
    most_of_one: usize,
    state: Mutex<TurnState>,
}

#[derive(Debug, Default)]
struct TurnState {
    running: BTreeMap<u64, usize>,
    /// Those who wait, by tenant, in the order of the tenants' turns.
    waiting: VecDeque<(u64, VecDeque<oneshot::Sender<Turn>>)>,
}

/// A turn; the next one begins when it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    tenant: u64,
}

impl Turns {
    pub(super) fn new(most: usize, most_of_one: usize) -> Arc<Self> {
        Arc::new(Self { most, most_of_one, state: Mutex::default() })
    }

    /// Waits for a tenant's next turn. Dropping the future gives it up.
    pub(super) async fn take(self: &Arc<Self>, tenant: u64) -> Turn {
        let (sender, receiver) = oneshot::channel();
        self.lock().queue(tenant, sender);
        self.begin();
        receiver.await.expect("who waits is given a turn, or leaves the queue himself")
    }

    /// Begins the turns that may begin.
    fn begin(self: &Arc<Self>) {
        let mut begun = Vec::new();
        let mut state = self.lock();
        while let Some((tenant, sender)) = state.next(self.most, self.most_of_one) {
            begun.push((Turn { turns: Arc::clone(self), tenant }, sender));
        }
        drop(state);
        for (turn, sender) in begun {
            // Who has left gives his turn back.
            drop(sender.send(turn));
        }
    }

    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnState {
    fn queue(&mut self, tenant: u64, sender: oneshot::Sender<Turn>) {
        match self.waiting.iter_mut().find(|(id, _)| *id == tenant) {
            Some((_, queue)) => queue.push_back(sender),
            None => self.waiting.push_back((tenant, VecDeque::from([sender]))),
        }
    }

    fn next(&mut self, most: usize, most_of_one: usize) -> Option<(u64, oneshot::Sender<Turn>)> {
        if self.running.values().sum::<usize>() >= most {
            return None;
        }
        let may =
            |(id, _): &(u64, VecDeque<_>)| self.running.get(id).copied().unwrap_or(0) < most_of_one;
        let place = self.waiting.iter().position(may)?;
        let (tenant, mut queue) = self.waiting.remove(place)?;
        let sender = queue.pop_front()?;
        if !queue.is_empty() {
            self.waiting.push_back((tenant, queue));
        }
        *self.running.entry(tenant).or_default() += 1;
        Some((tenant, sender))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        if let Some(running) = state.running.get_mut(&self.tenant) {
            *running -= 1;
            if *running == 0 {
                state.running.remove(&self.tenant);
            }
        }
        drop(state);
        self.turns.begin();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    fn tenant(id: u64, weight: u32) -> Tenant {
        Tenant { weight, ..Tenant::new(id) }
    }

    /// How many places a tenant gets, one after the other.
    fn fill(slots: &Arc<Slots>, tenant: Tenant) -> Vec<SlotPermit> {
        std::iter::from_fn(|| slots.try_take(tenant, 1)).collect()
    }

    #[test]
    fn one_tenant_leaves_places_for_others() {
        let slots = Slots::new(64);
        let mut first = fill(&slots, tenant(1, 1));
        assert_eq!(first.len(), 60);
        assert!(!first[0].grow(1) && slots.try_take(tenant(1, 1), 4).is_none());
        let second = fill(&slots, tenant(2, 1));
        assert_eq!(second.len(), 4);
        assert!(slots.try_take(tenant(3, 1), 1).is_none(), "there is none left");
        // What the first gives back is the second's, up to its part.
        first.truncate(30);
        assert_eq!(fill(&slots, tenant(2, 1)).len(), 26);
        drop((first, second));
        assert!(slots.lock().is_empty());
        // Few places are given to whoever comes first, as they are to one tenant.
        assert_eq!(fill(&Slots::new(2), tenant(1, 1)).len(), 2);
    }

    #[tokio::test]
    async fn tenants_take_turns_and_whoever_leaves_costs_none() {
        let turns = Turns::new(2, 1);
        let first = turns.take(1).await;
        let mut same = pin!(turns.take(1));
        let mut left = Box::pin(turns.take(1));
        let mut other = pin!(turns.take(2));
        let mut third = pin!(turns.take(3));
        let mut again = pin!(turns.take(2));
        let ready = |future: std::pin::Pin<&mut dyn Future<Output = Turn>>| {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            match future.poll(&mut context) {
                std::task::Poll::Ready(turn) => Some(turn),
                std::task::Poll::Pending => None,
            }
        };
        assert!(ready(same.as_mut()).is_none(), "one at a time of a tenant");
        assert!(ready(left.as_mut()).is_none());
        let second = ready(other.as_mut()).expect("another tenant does not wait for it");
        assert!(ready(third.as_mut()).is_none() && ready(again.as_mut()).is_none());
        drop(left);
        drop(first);
        let same = ready(same.as_mut()).expect("it waited longest");
        drop(second);
        let third = ready(third.as_mut()).expect("before the other's second");
        drop(same);
        let again = ready(again.as_mut()).expect("nobody else waits");
        drop((third, again));
        assert!(turns.lock().running.is_empty() && turns.lock().waiting.is_empty());
    }
}
