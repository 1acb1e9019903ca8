//! The paged KV cache as rank 0 accounts for it, with the prefix cache: sequences that begin with the
//! same tokens share full pages. The pages themselves are the ranks'.

use std::collections::{BTreeMap, HashMap};

use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::plan::PageId;

/// Which sequences can share pages. Every chain of pages begins with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    /// Rotary embeddings differ for sequences of another form.
    pub(super) form: u32,
    /// Tenants that share a prefix cache; others see nothing of it.
    pub(super) tenants: u64,
}

/// The prefix cache and the free KV memory.
pub(super) struct Pages {
    /// Pages that all ranks have memory for.
    capacity: u64,
    /// Private pages of running sequences.
    private: u64,
    cached: BTreeMap<PageId, CachedPage>,
    /// Cached pages by their parent and their tokens.
    chains: HashMap<(Parent, Box<[u32]>), PageId>,
    next: u64,
    /// Counts uses.
    clock: u64,
    /// Evicted pages that the ranks still hold.
    dropped: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Parent {
    Root(Kind),
    Page(PageId),
}

struct CachedPage {
    key: (Parent, Box<[u32]>),
    /// Sequences that use it.
    users: u32,
    /// Cached pages that follow it.
    followers: u32,
    last_use: u64,
}

impl Pages {
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            private: 0,
            cached: BTreeMap::new(),
            chains: HashMap::new(),
            next: 0,
            clock: 0,
            dropped: Vec::new(),
        }
    }

    pub(super) const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Pages that hold nothing, or nothing that is in use.
    pub(super) fn free(&self) -> u64 {
        let used = self.cached.values().filter(|cached| cached.users > 0).count() as u64;
        self.capacity.saturating_sub(self.private + used)
    }

    /// Pages that hold something.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        self.private + self.cached.len() as u64
    }

    /// Clears the prefix cache; page ids are not reused.
    pub(super) fn forget(&mut self, capacity: u64) {
        *self = Self { next: self.next, ..Self::new(capacity) };
    }

    /// Pages that the ranks are to drop, each once.
    pub(super) fn take_dropped(&mut self) -> Vec<PageId> {
        std::mem::take(&mut self.dropped)
    }

    /// Cached pages with the longest prefix of `tokens`, which one more sequence then uses. At
    /// least one token stays without a page, since the last one's logits are wanted.
    pub(super) fn find(&mut self, kind: Kind, tokens: &[u32]) -> Vec<PageId> {
        let most = tokens.len().saturating_sub(1) / TOKENS_PER_PAGE;
        let mut before = Parent::Root(kind);
        let mut found = Vec::new();
        for page in tokens.chunks_exact(TOKENS_PER_PAGE).take(most) {
            let Some(page) = self.chains.get(&(before, page.into())) else { break };
            found.push(*page);
            before = Parent::Page(*page);
        }
        self.touch(&found);
        for page in &found {
            self.entry(*page).users += 1;
        }
        found
    }

    /// One sequence less uses the pages.
    pub(super) fn release(&mut self, pages: &[PageId]) {
        self.touch(pages);
        for page in pages {
            self.entry(*page).users -= 1;
        }
    }

    /// The last of a chain is the first to go: a page without those before it is of no use.
    fn touch(&mut self, chain: &[PageId]) {
        for page in chain.iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            self.entry(*page).last_use = clock;
        }
    }

    fn entry(&mut self, page: PageId) -> &mut CachedPage {
        self.cached.get_mut(&page).expect("a page in use is cached")
    }

    /// Adds a full page of the sequence that holds `before`, all its pages so far, to the cache; the
    /// sequence then uses it. `None` where another page holds the same.
    pub(super) fn publish(
        &mut self,
        kind: Kind,
        before: &[PageId],
        tokens: &[u32],
    ) -> Option<PageId> {
        assert_eq!(tokens.len(), TOKENS_PER_PAGE, "tokens of a page");
        let parent = before.last().copied();
        let key = (parent.map_or(Parent::Root(kind), Parent::Page), tokens.into());
        if self.chains.contains_key(&key) {
            return None;
        }
        self.next += 1;
        self.clock += 1;
        let page = PageId(self.next);
        self.chains.insert(key.clone(), page);
        if let Some(parent) = parent {
            self.entry(parent).followers += 1;
        }
        let cached = CachedPage { key, users: 1, followers: 0, last_use: self.clock };
        self.cached.insert(page, cached);
        self.private -= 1;
        Some(page)
    }

    /// Allocates so many private pages; unused cached pages are evicted if needed, the least recently
    /// used first.
    pub(super) fn take(&mut self, pages: u64) -> bool {
        let used = self.private + self.cached.len() as u64;
        let lacking = (used + pages).saturating_sub(self.capacity);
        let idle = self.cached.values().filter(|cached| cached.users == 0).count() as u64;
        if lacking > idle {
            return false;
        }
        (0..lacking).for_each(|_| self.evict());
        self.private += pages;
        true
    }

    /// Frees private pages of a sequence.
    pub(super) fn give(&mut self, pages: u64) {
        self.private -= pages;
    }

    fn evict(&mut self) {
        // A page in use is followed only by pages in use, so there is one to be found.
        let idle =
            self.cached.iter().filter(|(_, cached)| cached.users == 0 && cached.followers == 0);
        let (page, _) = idle.min_by_key(|(_, cached)| cached.last_use).expect("an idle page");
        let page = *page;
        let cached = self.cached.remove(&page).expect("found above");
        if let Parent::Page(parent) = cached.key.0 {
            self.entry(parent).followers -= 1;
        }
        self.chains.remove(&cached.key);
        self.dropped.push(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind { form: 0, tenants: 0 };

    fn tokens(pages: &[u32]) -> Vec<u32> {
        pages.iter().flat_map(|page| vec![*page; TOKENS_PER_PAGE]).collect()
    }

    /// A sequence of these pages that has ended.
    fn leave(pages: &mut Pages, contents: &[u32]) -> Vec<PageId> {
        let all = tokens(contents);
        let mut held = pages.find(KIND, &[all.as_slice(), &[0]].concat());
        assert!(pages.take((contents.len() - held.len()) as u64));
        for page in all.chunks_exact(TOKENS_PER_PAGE).skip(held.len()) {
            held.push(pages.publish(KIND, &held, page).unwrap());
        }
        pages.release(&held);
        held
    }

    #[test]
    fn sequences_share_the_pages_that_they_begin_with() {
        let mut pages = Pages::new(10);
        let held = leave(&mut pages, &[1, 2, 3]);
        assert_eq!(pages.used(), 3);
        // All but the last token.
        assert_eq!(pages.find(KIND, &tokens(&[1, 2, 3])), held[..2]);
        assert_eq!(pages.find(KIND, &[tokens(&[1, 2, 3]), vec![9]].concat()), held);
        assert_eq!(pages.find(KIND, &[tokens(&[1, 7, 3]), vec![9]].concat()), held[..1]);
        assert_eq!(pages.find(KIND, &tokens(&[2, 3])), []);
        let long = Kind { form: 1, ..KIND };
        assert_eq!(pages.find(long, &tokens(&[1, 2])), [], "of another form");
        let other = Kind { tenants: 7, ..KIND };
        assert_eq!(pages.find(other, &tokens(&[1, 2])), [], "of another tenant");
        // Another sequence has cached the page meanwhile.
        assert!(pages.take(1));
        assert_eq!(pages.publish(KIND, &[], &tokens(&[1])), None);
        assert_eq!(pages.used(), 4);
    }

    #[test]
    fn the_least_recently_used_pages_go_and_those_in_use_stay() {
        let mut pages = Pages::new(6);
        let old = leave(&mut pages, &[1, 2]);
        let new = leave(&mut pages, &[1, 3, 4]);
        assert_eq!(pages.used(), 4);
        assert!(pages.take(2));
        assert_eq!(pages.take_dropped(), []);
        assert!(pages.take(1));
        assert_eq!(pages.take_dropped(), [old[1]]);
        let used = pages.find(KIND, &tokens(&[1, 3]));
        assert_eq!(used, new[..1]);
        assert!(pages.take(2));
        assert_eq!(pages.take_dropped(), [new[2], new[1]], "the end of a chain goes first");
        assert!(!pages.take(1), "the rest is in use");
        assert_eq!(pages.take_dropped(), []);
        pages.release(&used);
        assert!(pages.take(1));
        assert_eq!(pages.take_dropped(), [new[0]]);
        pages.give(6);
        assert_eq!(pages.used(), 0);
        assert_eq!(pages.find(KIND, &tokens(&[1, 3])), []);
    }
}
