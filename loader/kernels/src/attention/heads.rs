//! Attention of query heads that share a KV head (GQA), block by block.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{marker::PhantomData, ops::Range};

use super::{
    Attention, KEYS_PER_BLOCK, KvBlock, Order,
    block_sparse::Runs,
    groups,
    kv_layout::LINES_AT_ONCE,
    prefetch::Prefetch,
    queries::{QueryBuffer, QueryShape},
    softmax::{Block, Softmax, Sums, finish, one_block},
    vectors::Vectors,
};
use crate::{Floats, lanes::LANES, platform::Task, team::Columns};

/// Rows of queries that are computed with a block of keys at a time.
pub(super) const ROWS_AT_ONCE: usize = 8;

/// Queries of some rows and their attention.
#[derive(Clone, Copy)]
pub(super) struct HeadsInput<'a> {
    /// `[queries, heads, head_dim]`.
    pub(super) q: &'a [f32],
    pub(super) attention: &'a Attention<'a>,
    /// The row of `q` that the output begins with.
    pub(super) first_row: usize,
}

/// Some query heads of some rows.
pub(super) struct Heads<'a, 'b, V> {
    input: HeadsInput<'a>,
    out: Columns<'b>,
    vectors: PhantomData<V>,
}

impl<'a, 'b, V> Heads<'a, 'b, V> {
    pub(super) const fn new(input: HeadsInput<'a>, out: Columns<'b>) -> Self {
        Self { input, out, vectors: PhantomData }
    }
}

impl<V: Vectors> Task for Heads<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { input: HeadsInput { q, attention, first_row }, mut out, .. } = self;
        let head_dim = attention.head_dim;
        let range = out.range();
        let heads = range.start / head_dim..range.end / head_dim;
        let mut scratch = Scratch::default();
        for first in (0..out.rows()).step_by(ROWS_AT_ONCE) {
            let rows = first..out.rows().min(first + ROWS_AT_ONCE);
            for group in groups(attention.q_to_kv, heads.clone()) {
                let at = HeadBlock { first_row, rows: rows.clone(), group };
                several_heads::<V>(q, attention, at, &mut out, &mut scratch);
            }
        }
    }
}

/// Scratch buffers: keys and values as floats, and sums.
#[derive(Default)]
struct Scratch {
    q: QueryBuffer,
    keys: Vec<f32>,
    values: Vec<f32>,
    softmax: Vec<Softmax>,
    sums: Sums,
}

/// Some query heads of some rows.
struct HeadBlock {
    /// The row of `q` that the output begins with.
    first_row: usize,
    /// Rows of the output.
    rows: Range<usize>,
    /// Query heads that share a KV head.
    group: Range<usize>,
}

/// Attention of a block of query heads.
/// Every block of keys and values is read once for all of them.
#[inline(always)]
fn several_heads<V: Vectors>(
    q: &[f32],
    attention: &Attention<'_>,
    HeadBlock { first_row, rows, group }: HeadBlock,
    out: &mut Columns<'_>,
    scratch: &mut Scratch,
) {
    let (head_dim, heads) = (attention.head_dim, attention.q_to_kv.len());
    let first_head = out.range().start / head_dim;
    let kv_head = attention.q_to_kv[group.start];
    let kv = &attention.heads[kv_head];
    let seen = |row: usize| {
        let position = attention.first_position + first_row + row;
        let first =
            attention.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        let chunk = attention.chunk.map_or(0, |chunk| position - position % chunk.max(1) as usize);
        first.max(chunk)..position + 1
    };
    let all = seen(rows.start).start..seen(rows.end - 1).end;
    let Scratch { q: queries, keys, values, softmax, sums } = scratch;
    let each = rows.clone().map(|row| {
        let first = ((first_row + row) * heads + group.start) * head_dim;
        &q[first..][..group.len() * head_dim]
    });
    let (order, scale) = (attention.order, attention.scale);
    let shape = QueryShape { heads: group.len(), width: head_dim, scale };
    queries.fill::<V>(each, shape, (order, kv.keys[0]));
    softmax.clear();
    let none = Softmax { maximum: f32::NEG_INFINITY, total: 0.0 };
    softmax.resize(rows.len() * group.len(), none);
    let place = |head: usize| (head - first_head) * head_dim..(head + 1 - first_head) * head_dim;
    for row in rows.clone() {
        out.row(row)[place(group.start).start..place(group.end).start].fill(0.0);
    }
    for block in all.start / KEYS_PER_BLOCK..all.end.div_ceil(KEYS_PER_BLOCK) {
        let base = block * KEYS_PER_BLOCK;
        let within = |range: &Range<usize>| {
            range.start.max(base) - base..range.end.min(base + KEYS_PER_BLOCK).max(base) - base
        };
        let runs = |row: usize| {
            Runs::new(attention, (first_row + row, kv_head), block, within(&seen(row)))
        };
        if attention.chosen.is_some() && rows.clone().all(|row| runs(row).is_empty()) {
            continue;
        }
        let both = [kv.keys[block], kv.values[block]];
        let next = next_keys(attention, group.start, (block, &all));
        let some = (within(&all), rows.len());
        let mut held = match order {
            Order::Rows => Held::rows(both, some, head_dim, next, [keys, values]),
            Order::Lanes => Held::lanes::<V>(both, some, head_dim, next, [keys, values]),
        };
        for (index, (row, softmax)) in
            rows.clone().zip(softmax.chunks_exact_mut(group.len())).enumerate()
        {
            for visible in runs(row) {
                let block = held.seen(visible);
                let out = &mut out.row(row)[place(group.start).start..place(group.end).start];
                let q = queries.row(index, order);
                one_block::<V>(q, block, attention.softcap, softmax, sums, out);
            }
        }
    }
    let mut softmax = softmax.iter();
    for row in rows {
        for (head, softmax) in group.clone().zip(softmax.by_ref()) {
            let sink = attention.sinks.map(|sinks| sinks[head]);
            finish(*softmax, sink, &mut out.row(row)[place(head)]);
        }
    }
}

/// Keys and values of a block that some rows see.
struct Held<'a> {
    both: [KvBlock<'a>; 2],
    order: Order,
    /// The first of them in the block.
    first: usize,
    width: usize,
    prefetch: [Prefetch; 2],
}

impl<'a> Held<'a> {
    /// Of rows: what several rows read, or what does not come in whole vectors, is widened once.
    /// Products of integers stay such.
    #[inline(always)]
    fn rows(
        both: [KvBlock<'a>; 2],
        (held, rows): (Range<usize>, usize),
        head_dim: usize,
        next: Range<usize>,
        scratch: [&'a mut Vec<f32>; 2],
    ) -> Self {
        let width = head_dim.next_multiple_of(LANES);
        let both = both.map(|block| block.part(held.clone(), head_dim));
        let [keys, values] = both.map(|part| part.addresses(held.len(), head_dim));
        let prefetch = [Prefetch::new(&keys, &values), Prefetch::new(&values, &next)];
        let [mut keys, mut values] = both;
        let [keys_scratch, values_scratch] = scratch;
        if rows > 1 || width > head_dim {
            if !keys.is_for_integers(head_dim) {
                keys = keys.widened([head_dim, width], keys_scratch);
            }
            if !values.is_for_integers(head_dim) {
                values = values.widened([head_dim, width], values_scratch);
            }
        }
        Self { both: [keys, values], order: Order::Rows, first: held.start, width, prefetch }
    }

    /// Of lanes: the whole block. Floats that are cheap to convert stay as they are. Floats of
    /// 32 bits that are read from beginning to end are not fetched ahead: less is computed with a
    /// line of them than the processor takes to read it, and it does so faster when it is left to
    /// itself.
    #[inline(always)]
    fn lanes<V: Vectors>(
        both: [KvBlock<'a>; 2],
        (held, rows): (Range<usize>, usize),
        width: usize,
        next: Range<usize>,
        scratch: [&'a mut Vec<f32>; 2],
    ) -> Self {
        let floats = matches!(both, [KvBlock::Floats(Floats::F32(_)), _]);
        let prefetch = if floats && V::VALUE_VECTORS >= LINES_AT_ONCE {
            <[Prefetch; 2]>::default()
        } else {
            let [keys, values] = both.map(|block| block.addresses(held.end, width));
            [Prefetch::new(&keys, &values), Prefetch::new(&values, &next)]
        };
        let [mut keys, mut values] = both;
        let [keys_scratch, values_scratch] = scratch;
        if rows > 1 && matches!(keys, KvBlock::Floats(Floats::F16(_))) {
            keys = keys.widened([width, width], keys_scratch);
            values = values.widened([width, width], values_scratch);
        }
        Self { both: [keys, values], order: Order::Lanes, first: 0, width, prefetch }
    }

    /// As one row sees them. While the first row reads them, what comes next is fetched.
    #[inline(always)]
    fn seen(&mut self, visible: Range<usize>) -> Block<'a> {
        let (width, prefetch) = (self.width, std::mem::take(&mut self.prefetch));
        let (seen, [keys, values]) = match self.order {
            Order::Rows => {
                let part = visible.start - self.first..visible.end - self.first;
                (0..part.len(), self.both.map(|block| block.part(part.clone(), width)))
            }
            Order::Lanes => (visible, self.both),
        };
        Block { keys, values, seen, width, prefetch }
    }
}

/// The keys that are read after those of a block: of the next block, or of the next head's first.
fn next_keys(
    attention: &Attention<'_>,
    head: usize,
    (block, all): (usize, &Range<usize>),
) -> Range<usize> {
    let of = |head: usize, block: usize| {
        let keys = all.end.saturating_sub(block * KEYS_PER_BLOCK);
        let block = attention.heads.get(head)?.keys.get(block)?;
        Some(block.addresses(keys, attention.head_dim)).filter(|addresses| !addresses.is_empty())
    };
    if attention.chosen.is_some() {
        // The next block is likely not to be read.
        return 0..0;
    }
    let head = attention.q_to_kv[head];
    of(head, block + 1).or_else(|| of(head + 1, all.start / KEYS_PER_BLOCK)).unwrap_or_default()
}
