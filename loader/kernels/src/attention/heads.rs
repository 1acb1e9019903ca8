//! Query heads that share keys and values, block after block of these.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{marker::PhantomData, ops::Range};

use super::{
    Attention, KEYS_PER_BLOCK,
    ahead::Ahead,
    groups,
    keys::Line,
    softmax::{Block, Softmax, Sums, finish, one_block},
    vectors::Vectors,
};
use crate::{lanes::LANES, platform::Task, team::Columns};

/// Rows of queries that meet a block of keys together.
pub(super) const ROWS_AT_ONCE: usize = 8;

/// Some query heads of some rows.
pub(super) struct Heads<'a, 'b, V> {
    q: &'a [f32],
    attention: &'a Attention<'a>,
    first_row: usize,
    out: Columns<'b>,
    vectors: PhantomData<V>,
}

impl<'a, 'b, V> Heads<'a, 'b, V> {
    pub(super) const fn new(
        (q, attention, first_row): (&'a [f32], &'a Attention<'a>, usize),
        out: Columns<'b>,
    ) -> Self {
        Self { q, attention, first_row, out, vectors: PhantomData }
    }
}

impl<V: Vectors> Task for Heads<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { q, attention, first_row, mut out, .. } = self;
        let head_dim = attention.head_dim;
        let range = out.range();
        let heads = range.start / head_dim..range.end / head_dim;
        let mut scratch = Scratch::default();
        for first in (0..out.rows()).step_by(ROWS_AT_ONCE) {
            let rows = first..out.rows().min(first + ROWS_AT_ONCE);
            for group in groups(attention.q_to_kv, heads.clone()) {
                let at = (first_row, rows.clone(), group);
                several_heads::<V>(q, attention, at, &mut out, &mut scratch);
            }
        }
    }
}

/// Room for keys and values as floats, and for what is summed.
#[derive(Default)]
struct Scratch {
    q: Vec<Line>,
    keys: Vec<f32>,
    values: Vec<f32>,
    softmax: Vec<Softmax>,
    sums: Sums,
}

/// The query heads `group` of some `rows` of `out`, of which the first is row `first_row` of `q`.
/// Every block of keys and values is read once for all of them.
#[inline(always)]
fn several_heads<V: Vectors>(
    q: &[f32],
    attention: &Attention<'_>,
    (first_row, rows, group): (usize, Range<usize>, Range<usize>),
    out: &mut Columns<'_>,
    scratch: &mut Scratch,
) {
    let (head_dim, heads) = (attention.head_dim, attention.q_to_kv.len());
    let first_head = out.range().start / head_dim;
    let kv = &attention.heads[attention.q_to_kv[group.start]];
    let seen = |row: usize| {
        let position = attention.first_position + first_row + row;
        let first =
            attention.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        first..position + 1
    };
    let all = seen(rows.start).start..seen(rows.end - 1).end;
    let width = head_dim.next_multiple_of(LANES);
    let lines = width / LANES * group.len();
    let Scratch { q: q_lines, keys, values, softmax, sums } = scratch;
    q_lines.clear();
    for row in rows.clone() {
        let first = ((first_row + row) * heads + group.start) * head_dim;
        Line::append(&q[first..][..group.len() * head_dim], head_dim, attention.scale, q_lines);
    }
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
        let held = within(&all);
        let [mut keys_held, mut values_held] =
            [kv.keys[block], kv.values[block]].map(|block| block.part(held.clone(), head_dim));
        let [of_keys, of_values] =
            [keys_held, values_held].map(|part| part.addresses(held.len(), head_dim));
        let next = next_keys(attention, group.start, (block, &all));
        let mut ahead = [Ahead::new(&of_keys, &of_values), Ahead::new(&of_values, &next)];
        // What several rows read, or what does not come in whole vectors, is widened once.
        // Products of integers stay such.
        if rows.len() > 1 || width > head_dim {
            if !keys_held.is_for_integers(head_dim) {
                keys_held = keys_held.widened([head_dim, width], keys);
            }
            if !values_held.is_for_integers(head_dim) {
                values_held = values_held.widened([head_dim, width], values);
            }
        }
        let each = softmax.chunks_exact_mut(group.len()).zip(q_lines.chunks_exact(lines));
        for (row, (softmax, q)) in rows.clone().zip(each) {
            let visible = within(&seen(row));
            if visible.is_empty() {
                continue;
            }
            let part = visible.start - held.start..visible.end - held.start;
            let [keys, values] =
                [keys_held, values_held].map(|held| held.part(part.clone(), width));
            let block = Block { keys, values, count: part.len(), width, ahead };
            ahead = Default::default();
            let out = &mut out.row(row)[place(group.start).start..place(group.end).start];
            one_block::<V>(q, block, attention.softcap, softmax, sums, out);
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
    let head = attention.q_to_kv[head];
    of(head, block + 1).or_else(|| of(head + 1, all.start / KEYS_PER_BLOCK)).unwrap_or_default()
}
