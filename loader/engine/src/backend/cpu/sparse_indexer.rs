//! Sparse attention: the indexer's top-k keys, and attention to them, gathered.

use std::ops::Range;

use shardpack_formats::memory::MAX_INDEX_SCORES;
use shardpack_kernels::{
    Attention as Kernel, Floats, KvBlock, KvHead, attend as attend_one,
    attention::{Index, KEYS_PER_BLOCK, Order, largest},
};

use super::{Cache, Cpu, Tensor, compressed_kv::Completed};
use crate::backend::{
    AttentionParams, CompressedKvPart, IndexerInputs, IndexerParams, Qkv, SparseIndexer,
};

/// What a row attends to, counted from its sequence's beginning, in ascending order; none where this
/// is everything.
pub(super) type RowIndices = Option<Vec<u32>>;

/// The keys, or the compressed KV entries, that each row of a step attends to.
pub struct TopK(pub(super) Vec<RowIndices>);

impl SparseIndexer for Cpu {
    type TopK = TopK;

    fn top_k_keys(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        top_k_keys(&inputs, caches, params)
    }

    fn sparse_attention(
        &self,
        top_k: &TopK,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        attend(top_k, &qkv, caches, params)
    }
}

/// Rows of one sequence in a step.
#[derive(Clone)]
struct SequenceRows {
    /// Among the rows of the step.
    rows: Range<usize>,
    /// Position of the first.
    first: usize,
}

/// Index keys of one sequence, in blocks of [`KEYS_PER_BLOCK`] tokens.
struct IndexKeys<'a> {
    blocks: &'a [Floats<'a>],
    /// Tokens that each key stands for.
    ratio: usize,
}

/// Appends keys to the caches and selects among them.
fn top_k_keys(
    inputs: &IndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &IndexerParams<'_>,
) -> TopK {
    let k = inputs.k;
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(params.lengths.iter().sum::<usize>(), k.rows(), "rows of all sequences");
    let mut top_k = Vec::with_capacity(k.rows());
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let rows = row..row + length;
        let first =
            cache.append_index(params.layer, &k.values[rows.start * k.width..rows.end * k.width]);
        let keys = IndexKeys { blocks: &cache.index(params.layer), ratio: 1 };
        top_k.extend(best(inputs, SequenceRows { rows, first }, keys, params));
        row += length;
    }
    TopK(top_k)
}

/// Keeps the index keys of new entries and selects among those of all.
pub(super) fn top_k_entries(
    inputs: &IndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &IndexerParams<'_>,
) -> TopK {
    let k = inputs.k;
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(params.lengths.iter().sum::<usize>(), inputs.q.rows(), "rows of all sequences");
    let mut top_k = Vec::with_capacity(inputs.q.rows());
    let (mut row, mut entry) = (0, 0);
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let Completed { entries: new, first } = cache.completed(params.layer, *length);
        let span = entry * k.width..(entry + new) * k.width;
        cache.put_entries(params.layer, CompressedKvPart::Keys, &k.values[span]);
        let blocks = cache.entry_keys(params.layer);
        let keys = IndexKeys { blocks: &blocks, ratio: cache.entry_shape(params.layer).ratio };
        let rows = SequenceRows { rows: row..row + length, first };
        top_k.extend(best(inputs, rows, keys, params));
        entry += new;
        row += length;
    }
    TopK(top_k)
}

/// The top-k keys of each row of one sequence.
fn best(
    inputs: &IndexerInputs<'_, Tensor>,
    SequenceRows { rows, first }: SequenceRows,
    IndexKeys { blocks, ratio }: IndexKeys<'_>,
    params: &IndexerParams<'_>,
) -> Vec<RowIndices> {
    let of = |x: &'_ Tensor, rows: Range<usize>| rows.start * x.width..rows.end * x.width;
    let length = rows.len();
    // Rows that see no more keys than are selected.
    let all = ((params.top_k + 1) * ratio - 1).saturating_sub(first).min(length);
    let mut top_k = vec![None; all];
    let at_once = (MAX_INDEX_SCORES / (blocks.len() * KEYS_PER_BLOCK).max(1)).max(1);
    let mut from = all;
    while from < length {
        let until = length.min(from + at_once);
        let some = rows.start + from..rows.start + until;
        let seen = (first + until) / ratio;
        let keys = &blocks[..seen.div_ceil(KEYS_PER_BLOCK / ratio)];
        let (heads, width) = (params.heads, params.width);
        let index = Index { heads, width, every: ratio, keys, first_position: first + from };
        let mut scores = Tensor::unset(until - from, index.columns());
        let q = &inputs.q.values[of(inputs.q, some.clone())];
        let weights = &inputs.weights.values[of(inputs.weights, some)];
        index.scores(q, Some(weights), &mut scores.values);
        for (position, scores) in (first + from..).zip(scores.values.chunks_exact(index.columns()))
        {
            top_k.push(Some(largest(&index.seen(scores, position), params.top_k)));
        }
        from = until;
    }
    top_k
}

/// Appends keys and values to the caches and attends to the top-k keys.
fn attend(
    TopK(top_k): &TopK,
    qkv: &Qkv<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vec<f32>>,
) -> Tensor {
    let Qkv { q, k, v } = qkv;
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(top_k.len(), q.rows(), "top-k indices for every row");
    let mut out = Tensor::unset(q.rows(), q.width);
    let mut gathered = Gathered::default();
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let of = |x: &'_ Tensor, rows: Range<usize>| rows.start * x.width..rows.end * x.width;
        let rows = row..row + length;
        let span = of(k, rows.clone());
        let first = cache.append(params.layer, &k.values[span.clone()], &v.values[span], *length);
        let blocks = cache.heads(params.layer);
        let heads = blocks.heads();
        let [head] = &heads[..] else { unreachable!("keys that are values have one head") };
        let mut attend_rows = |rows: Range<usize>, keys: &[KvBlock<'_>], first_position: usize| {
            let attention = Kernel {
                head_dim: params.head_dim,
                scale: params.scale,
                softcap: params.softcap,
                sinks: params.sinks.map(Vec::as_slice),
                window: None,
                chunk: None,
                chosen: None,
                q_to_kv: params.q_to_kv,
                order: Order::Rows,
                heads: &[KvHead { keys, values: keys }],
                first_position,
            };
            let span = of(q, rows);
            attend_one(&q.values[span.clone()], &attention, &mut out.values[span]);
        };
        let all = top_k[rows.clone()].iter().take_while(|keys| keys.is_none()).count();
        if all > 0 {
            let keys = &head.keys[..(first + all).div_ceil(KEYS_PER_BLOCK)];
            attend_rows(row..row + all, keys, first);
        }
        for row in rows.skip(all) {
            let Some(keys) = &top_k[row] else { unreachable!("later rows have more keys") };
            gathered.take(head.keys, keys, params.head_dim);
            attend_rows(row..row + 1, &gathered.blocks(params.head_dim), keys.len() - 1);
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
