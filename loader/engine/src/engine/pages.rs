//! The paged KV cache as rank 0 accounts for it, with the prefix cache: sequences that begin with the
//! same tokens share full pages. The pages themselves are the ranks'.

use std::collections::{BTreeMap, HashMap};

use super::plan::PageId;
use crate::backend::TOKENS_PER_PAGE;

/// What pages of a sequence can be shared with: positions are computed differently for sequences
/// of another kind.
pub(super) type Kind = u32;

/// Named pages, and how much memory is left.
pub(super) struct Pages {
    /// Pages that all ranks have memory for.
    capacity: u64,
    /// Pages of single sequences, which have no name.
    private: u64,
    named: BTreeMap<PageId, Named>,
    /// Each page by what comes before it and its tokens.
    chains: HashMap<(Before, Box<[u32]>), PageId>,
    next: u64,
    /// Counts uses.
    clock: u64,
    /// Pages that have lost their name and that the ranks still hold.
    dropped: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Before {
    Nothing(Kind),
    Page(PageId),
}

struct Named {
    key: (Before, Box<[u32]>),
    /// Sequences that use it.
    users: u32,
    /// Named pages that follow it.
    followers: u32,
    last_use: u64,
}

impl Pages {
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            private: 0,
            named: BTreeMap::new(),
            chains: HashMap::new(),
            next: 0,
            clock: 0,
            dropped: Vec::new(),
        }
    }

    pub(super) const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Pages that hold something.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        self.private + self.named.len() as u64
    }

    /// Forgets everything that ranks held; names are not given again.
    pub(super) fn forget(&mut self, capacity: u64) {
        *self = Self { next: self.next, ..Self::new(capacity) };
    }

    /// Pages that the ranks are to drop, each once.
    pub(super) fn take_dropped(&mut self) -> Vec<PageId> {
        std::mem::take(&mut self.dropped)
    }

    /// Named pages with the beginning of `tokens`, which are then used by one more sequence. At
    /// least one token stays without a page, since the last one's logits are wanted.
    pub(super) fn find(&mut self, kind: Kind, tokens: &[u32]) -> Vec<PageId> {
        let most = tokens.len().saturating_sub(1) / TOKENS_PER_PAGE;
        let mut before = Before::Nothing(kind);
        let mut found = Vec::new();
        for page in tokens.chunks_exact(TOKENS_PER_PAGE).take(most) {
            let Some(page) = self.chains.get(&(before, page.into())) else { break };
            found.push(*page);
            before = Before::Page(*page);
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

    fn entry(&mut self, page: PageId) -> &mut Named {
        self.named.get_mut(&page).expect("a page in use has a name")
    }

    /// Names a full page of the sequence that holds `before`, all its pages so far; it is then a
    /// user of it. `None` where another page holds the same.
    pub(super) fn publish(
        &mut self,
        kind: Kind,
        before: &[PageId],
        tokens: &[u32],
    ) -> Option<PageId> {
        assert_eq!(tokens.len(), TOKENS_PER_PAGE, "tokens of a page");
        let parent = before.last().copied();
        let key = (parent.map_or(Before::Nothing(kind), Before::Page), tokens.into());
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
        let named = Named { key, users: 1, followers: 0, last_use: self.clock };
        self.named.insert(page, named);
        self.private -= 1;
        Some(page)
    }

    /// Takes memory for so many pages of a sequence, from pages that none uses if need be, the
    /// least recently used first.
    pub(super) fn take(&mut self, pages: u64) -> bool {
        let used = self.private + self.named.len() as u64;
        let lacking = (used + pages).saturating_sub(self.capacity);
        let idle = self.named.values().filter(|named| named.users == 0).count() as u64;
        if lacking > idle {
            return false;
        }
        (0..lacking).for_each(|_| self.evict());
        self.private += pages;
        true
    }

    /// Gives memory of a sequence's own pages back.
    pub(super) fn give(&mut self, pages: u64) {
        self.private -= pages;
    }

    fn evict(&mut self) {
        // A page in use is followed only by pages in use, so there is one to be found.
        let idle = self.named.iter().filter(|(_, named)| named.users == 0 && named.followers == 0);
        let (page, _) = idle.min_by_key(|(_, named)| named.last_use).expect("an idle page");
        let page = *page;
        let named = self.named.remove(&page).expect("found above");
        if let Before::Page(parent) = named.key.0 {
            self.entry(parent).followers -= 1;
        }
        self.chains.remove(&named.key);
        self.dropped.push(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(pages: &[u32]) -> Vec<u32> {
        pages.iter().flat_map(|page| vec![*page; TOKENS_PER_PAGE]).collect()
    }

    /// A sequence of these pages that has ended.
    fn leave(pages: &mut Pages, contents: &[u32]) -> Vec<PageId> {
        let all = tokens(contents);
        let mut held = pages.find(0, &[all.as_slice(), &[0]].concat());
        assert!(pages.take((contents.len() - held.len()) as u64));
        for page in all.chunks_exact(TOKENS_PER_PAGE).skip(held.len()) {
            held.push(pages.publish(0, &held, page).unwrap());
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
        assert_eq!(pages.find(0, &tokens(&[1, 2, 3])), held[..2]);
        assert_eq!(pages.find(0, &[tokens(&[1, 2, 3]), vec![9]].concat()), held);
        assert_eq!(pages.find(0, &[tokens(&[1, 7, 3]), vec![9]].concat()), held[..1]);
        assert_eq!(pages.find(0, &tokens(&[2, 3])), []);
        assert_eq!(pages.find(1, &tokens(&[1, 2])), [], "of another kind");
        // What another sequence has computed meanwhile has its name already.
        assert!(pages.take(1));
        assert_eq!(pages.publish(0, &[], &tokens(&[1])), None);
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
        let used = pages.find(0, &tokens(&[1, 3]));
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
        assert_eq!(pages.find(0, &tokens(&[1, 3])), []);
    }
}
