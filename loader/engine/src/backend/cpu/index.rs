//! Attention to chosen keys: the choice, and the keys brought together.

use std::ops::Range;

use shardpack_formats::memory::MAX_INDEX_SCORES;
use shardpack_kernels::{
    Attention, Floats, KvBlock, KvHead, attend,
    attention::{Index, KEYS_PER_BLOCK, Order, largest},
};

use super::{Cache, Tensor};
use crate::backend::{AttentionStep, EntryPart, IndexInputs, IndexStep, Qkv};

/// What a row attends to, counted from its sequence's beginning, in ascending order; none where this
/// is everything.
pub(super) type Choice = Option<Vec<u32>>;

/// What the rows of a step attend to.
pub enum Chosen {
    /// Keys, for each row.
    Keys(Vec<Choice>),
    /// Blocks of so many keys, for each row and, within it, each key-value head.
    Blocks(usize, Vec<Choice>),
}

/// Appends keys to the caches and chooses among them.
pub(super) fn choose(
    inputs: &IndexInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    step: &IndexStep<'_>,
) -> Chosen {
    let k = inputs.k;
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    assert_eq!(step.lengths.iter().sum::<usize>(), k.rows(), "rows of all sequences");
    let mut chosen = Vec::with_capacity(k.rows());
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(step.lengths) {
        let rows = row..row + length;
        let first =
            cache.append_index(step.layer, &k.values[rows.start * k.width..rows.end * k.width]);
        chosen.extend(best(inputs, (rows, first), (&cache.index(step.layer), 1), step));
        row += length;
    }
    Chosen::Keys(chosen)
}

/// Keeps the keys of new entries and chooses among those of all.
pub(super) fn choose_entries(
    inputs: &IndexInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    step: &IndexStep<'_>,
) -> Chosen {
    let k = inputs.k;
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    assert_eq!(step.lengths.iter().sum::<usize>(), inputs.q.rows(), "rows of all sequences");
    let mut chosen = Vec::with_capacity(inputs.q.rows());
    let (mut row, mut entry) = (0, 0);
    for (cache, length) in caches.iter_mut().zip(step.lengths) {
        let (new, first) = cache.completed(step.layer, *length);
        let span = entry * k.width..(entry + new) * k.width;
        cache.put_entries((step.layer, EntryPart::Keys), &k.values[span]);
        let blocks = (cache.entry_keys(step.layer), cache.entry_shape(step.layer).every);
        chosen.extend(best(inputs, (row..row + length, first), (&blocks.0, blocks.1), step));
        entry += new;
        row += length;
    }
    Chosen::Keys(chosen)
}

/// The best keys of each row of one sequence, of which the first stands at `first`: those of
/// `every` tokens each, in blocks of [`KEYS_PER_BLOCK`] tokens.
fn best(
    inputs: &IndexInputs<'_, Tensor>,
    (rows, first): (Range<usize>, usize),
    (blocks, every): (&[Floats<'_>], usize),
    step: &IndexStep<'_>,
) -> Vec<Choice> {
    let of = |x: &'_ Tensor, rows: Range<usize>| rows.start * x.width..rows.end * x.width;
    let length = rows.len();
    // Rows that see no more keys than are chosen.
    let all = ((step.top_k + 1) * every - 1).saturating_sub(first).min(length);
    let mut chosen = vec![None; all];
    let at_once = (MAX_INDEX_SCORES / (blocks.len() * KEYS_PER_BLOCK).max(1)).max(1);
    let mut from = all;
    while from < length {
        let until = length.min(from + at_once);
        let some = rows.start + from..rows.start + until;
        let seen = (first + until) / every;
        let keys = &blocks[..seen.div_ceil(KEYS_PER_BLOCK / every)];
        let (heads, width) = (step.heads, step.width);
        let index = Index { heads, width, every, keys, first_position: first + from };
        let mut scores = Tensor::unset(until - from, index.columns());
        let q = &inputs.q.values[of(inputs.q, some.clone())];
        let weights = &inputs.weights.values[of(inputs.weights, some)];
        index.scores(q, Some(weights), &mut scores.values);
        for (position, scores) in (first + from..).zip(scores.values.chunks_exact(index.columns()))
        {
            chosen.push(Some(largest(&index.seen(scores, position), step.top_k)));
        }
        from = until;
    }
    chosen
}

/// Appends keys and values to the caches and attends to the chosen keys.
pub(super) fn attend_to(
    chosen: &[Choice],
    qkv: &Qkv<'_, Tensor>,
    caches: &mut [&mut Cache],
    step: &AttentionStep<'_, Vec<f32>>,
) -> Tensor {
    let Qkv { q, k, v } = qkv;
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    assert_eq!(chosen.len(), q.rows(), "a choice for every row");
    let mut out = Tensor::unset(q.rows(), q.width);
    let mut gathered = Gathered::default();
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(step.lengths) {
        let of = |x: &'_ Tensor, rows: Range<usize>| rows.start * x.width..rows.end * x.width;
        let rows = row..row + length;
        let span = of(k, rows.clone());
        let first = cache.append(step.layer, &k.values[span.clone()], &v.values[span], *length);
        let blocks = cache.heads(step.layer);
        let heads = blocks.heads();
        let [head] = &heads[..] else { unreachable!("keys that are values have one head") };
        let mut attend = |rows: Range<usize>, keys: &[KvBlock<'_>], first_position: usize| {
            let attention = Attention {
                head_dim: step.head_dim,
                scale: step.scale,
                softcap: step.softcap,
                sinks: step.sinks.map(Vec::as_slice),
                window: None,
                chunk: None,
                chosen: None,
                q_to_kv: step.q_to_kv,
                order: Order::Rows,
                heads: &[KvHead { keys, values: keys }],
                first_position,
            };
            let span = of(q, rows);
            attend(&q.values[span.clone()], &attention, &mut out.values[span]);
        };
        let all = chosen[rows.clone()].iter().take_while(|keys| keys.is_none()).count();
        if all > 0 {
            let keys = &head.keys[..(first + all).div_ceil(KEYS_PER_BLOCK)];
            attend(row..row + all, keys, first);
        }
        for row in rows.skip(all) {
            let Some(keys) = &chosen[row] else { unreachable!("later rows have more keys") };
            gathered.take(head.keys, keys, step.head_dim);
            attend(row..row + 1, &gathered.blocks(step.head_dim), keys.len() - 1);
        }
        row += length;
    }
    out
}

/// Keys that lie apart, brought together in the form in which they are cached.
#[derive(Default)]
pub(super) struct Gathered {
    floats: Vec<f32>,
    halves: Vec<u16>,
    bytes: Vec<i8>,
    scales: Vec<f32>,
    kind: Kind,
}

#[derive(Clone, Copy, Default)]
enum Kind {
    #[default]
    F32,
    F16,
    Bf16,
    Q8,
}

impl Gathered {
    pub(super) fn clear(&mut self) {
        self.floats.clear();
        self.halves.clear();
        self.bytes.clear();
        self.scales.clear();
    }

    /// Some keys of `width` of one block.
    pub(super) fn add(&mut self, block: KvBlock<'_>, keys: Range<usize>, width: usize) {
        let span = keys.start * width..keys.end * width;
        self.kind = match block {
            KvBlock::Floats(Floats::F32(values)) => {
                self.floats.extend_from_slice(&values[span]);
                Kind::F32
            }
            KvBlock::Floats(Floats::F16(values)) => {
                self.halves.extend_from_slice(&values[span]);
                Kind::F16
            }
            KvBlock::Floats(Floats::BF16(values)) => {
                self.halves.extend_from_slice(&values[span]);
                Kind::Bf16
            }
            KvBlock::Q8 { values, scales } => {
                self.bytes.extend_from_slice(&values[span]);
                self.scales.extend_from_slice(&scales[keys]);
                Kind::Q8
            }
        };
    }

    /// Consecutive keys of blocks of `each`.
    pub(super) fn add_run(
        &mut self,
        blocks: &[KvBlock<'_>],
        keys: Range<usize>,
        each: usize,
        width: usize,
    ) {
        let mut next = keys.start;
        while next < keys.end {
            let (block, from) = (next / each, next % each);
            let count = (each - from).min(keys.end - next);
            self.add(blocks[block], from..from + count, width);
            next += count;
        }
    }

    fn take(&mut self, blocks: &[KvBlock<'_>], keys: &[u32], width: usize) {
        self.clear();
        for key in keys {
            let (block, key) = (*key as usize / KEYS_PER_BLOCK, *key as usize % KEYS_PER_BLOCK);
            self.add(blocks[block], key..key + 1, width);
        }
    }

    /// Keys of `width` so far.
    pub(super) fn keys(&self, width: usize) -> usize {
        (self.floats.len() + self.halves.len() + self.bytes.len()) / width
    }

    pub(super) fn blocks(&self, width: usize) -> Vec<KvBlock<'_>> {
        let block = KEYS_PER_BLOCK * width;
        let halves = || self.halves.chunks(block);
        match self.kind {
            Kind::F32 => {
                self.floats.chunks(block).map(|keys| KvBlock::Floats(Floats::F32(keys))).collect()
            }
            Kind::F16 => halves().map(|keys| KvBlock::Floats(Floats::F16(keys))).collect(),
            Kind::Bf16 => halves().map(|keys| KvBlock::Floats(Floats::BF16(keys))).collect(),
            Kind::Q8 => {
                let scales = self.scales.chunks(KEYS_PER_BLOCK);
                let blocks = self.bytes.chunks(block).zip(scales);
                blocks.map(|(values, scales)| KvBlock::Q8 { values, scales }).collect()
            }
        }
    }
}
