//! Block-sparse attention: the keys of a block that one row attends to, as runs of selected smaller
//! blocks.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use super::{Attention, KEYS_PER_BLOCK};

/// Runs of keys within one block of [`KEYS_PER_BLOCK`], in ascending order.
pub(super) struct Runs<'a> {
    /// Without block selection: all that is visible, once.
    all: bool,
    /// Selected blocks that are left.
    selected: &'a [u32],
    /// Keys of one.
    keys: usize,
    /// The first one of the block.
    first: usize,
    visible: Range<usize>,
}

impl<'a> Runs<'a> {
    /// The keys of a block that a row sees under a head's block selection.
    #[inline(always)]
    pub(super) fn new(
        attention: &Attention<'a>,
        (row, head): (usize, usize),
        block: usize,
        visible: Range<usize>,
    ) -> Self {
        let list = attention.chosen.and_then(|chosen| {
            let list = chosen.blocks[row * attention.heads.len() + head].as_ref()?;
            Some((chosen.keys, list.as_slice()))
        });
        let Some((keys, list)) = list else {
            return Self { all: !visible.is_empty(), selected: &[], keys: 1, first: 0, visible };
        };
        let each = KEYS_PER_BLOCK / keys;
        let at =
            |block: usize| list.partition_point(|selected| (*selected as usize) < block * each);
        let selected = if visible.is_empty() { &[][..] } else { &list[at(block)..at(block + 1)] };
        Self { all: false, selected, keys, first: block * each, visible }
    }

    /// Whether nothing is left.
    #[inline(always)]
    pub(super) const fn is_empty(&self) -> bool {
        !self.all && self.selected.is_empty()
    }
}

impl Iterator for Runs<'_> {
    type Item = Range<usize>;

    /// Neighbours are one run, so that a selection of all blocks gives the bits of none.
    #[inline(always)]
    fn next(&mut self) -> Option<Range<usize>> {
        if std::mem::take(&mut self.all) {
            return Some(self.visible.clone());
        }
        let (first, mut rest) = self.selected.split_first()?;
        let mut last = *first;
        while let Some((next, after)) = rest.split_first()
            && *next == last + 1
        {
            (last, rest) = (*next, after);
        }
        self.selected = rest;
        let start = (*first as usize - self.first) * self.keys;
        let end = (last as usize + 1 - self.first) * self.keys;
        let run = start.max(self.visible.start)..end.min(self.visible.end);
        if run.is_empty() { self.next() } else { Some(run) }
    }
}
