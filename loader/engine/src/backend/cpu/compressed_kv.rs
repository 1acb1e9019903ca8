//! Compressed KV entries: computed from their tokens' projections, kept in the pages of their sequence,
//! and attended to together with the tokens of a window. An entry is computed from its own tokens
//! alone and in their order, so a prompt gives the same bits as its tokens one by one.

use std::ops::Range;

use shardpack_formats::memory::{KvType, TOKENS_PER_PAGE};
use shardpack_kernels::{
    Attention as Kernel, Floats, KvBlock, KvHead, attend as attend_one, attention::Order, exp::exp,
};
use zerocopy::FromBytes;

use super::{
    Cache, Cpu, Tensor, TopK,
    cache::{LINE, Quantized, quantize, write_floats},
    sparse_indexer::{Gathered, top_k_entries},
};
use crate::{
    backend::{
        AttentionParams, CompressedEntries, CompressedKv, CompressedKvPart, CompressedKvShape,
        CompressorInputs, CompressorParams, IndexerInputs, IndexerParams, Qkv,
    },
    loading::Memory,
};

impl CompressedKv for Cpu {
    fn compress(
        &self,
        inputs: CompressorInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &CompressorParams<'_, Vec<f32>>,
    ) -> Tensor {
        compress(inputs, caches, params)
    }

    fn top_k_entries(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        top_k_entries(&inputs, caches, params)
    }

    fn compressed_attention(
        &self,
        entries: CompressedEntries<'_, Tensor, TopK>,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        attend(&entries, &qkv, caches, params)
    }
}

/// Entries of one layer in a page.
#[derive(Clone, Debug)]
pub(super) struct CompressedKvPage {
    /// Of entries and of the keys of their indexer.
    parts: [Rows; 2],
    /// Elements of the page's last tokens, of which the next page's first entry is made too: of each
    /// part `[ratio][c, z]`.
    tails: [Vec<f32>; 2],
}

/// Vectors, one after the other.
#[derive(Clone, Debug)]
struct Rows {
    kind: KvType,
    width: usize,
    elements: Memory,
    /// Of integers one for each row.
    scales: Vec<f32>,
}

impl CompressedKvPage {
    pub(super) fn new(shape: CompressedKvShape, kind: KvType) -> Self {
        let count = TOKENS_PER_PAGE / shape.ratio;
        let rows = |part, kind: KvType| {
            let width = shape.width(part);
            Rows {
                kind,
                width,
                elements: Memory::zeroed(count * width * kind.element_bytes(), LINE),
                scales: vec![0.0; if kind == KvType::Q8 { count } else { 0 }],
            }
        };
        let tail = |part| vec![0.0; tail_len(shape, part)];
        Self {
            parts: [
                rows(CompressedKvPart::Entries, kind),
                rows(CompressedKvPart::Keys, kind.of_indexer()),
            ],
            tails: [tail(CompressedKvPart::Entries), tail(CompressedKvPart::Keys)],
        }
    }

    /// Entries as blocks of keys and values.
    fn block(&self) -> KvBlock<'_> {
        let Rows { kind, elements, scales, .. } = &self.parts[CompressedKvPart::Entries as usize];
        match kind {
            KvType::Q8 => KvBlock::Q8 {
                values: <[i8]>::ref_from_bytes(elements.bytes()).expect(ALIGNED),
                scales,
            },
            _ => KvBlock::Floats(floats(*kind, elements.bytes())),
        }
    }

    /// The indexer's keys.
    fn keys(&self) -> Floats<'_> {
        let Rows { kind, elements, .. } = &self.parts[CompressedKvPart::Keys as usize];
        floats(*kind, elements.bytes())
    }
}

const ALIGNED: &str = "memory begins on a line, and rows are whole elements";

fn floats(kind: KvType, bytes: &[u8]) -> Floats<'_> {
    let halves = || <[u16]>::ref_from_bytes(bytes).expect(ALIGNED);
    match kind {
        KvType::F32 => Floats::F32(<[f32]>::ref_from_bytes(bytes).expect(ALIGNED)),
        KvType::Bf16 => Floats::BF16(halves()),
        KvType::F16 | KvType::Q8 => Floats::F16(halves()),
    }
}

impl Rows {
    fn write(&mut self, row: usize, values: &[f32]) {
        let span = row * self.width * self.kind.element_bytes()
            ..(row + 1) * self.width * self.kind.element_bytes();
        let place = &mut self.elements.bytes_mut()[span];
        if self.kind != KvType::Q8 {
            return write_floats(self.kind, place, values);
        }
        let Quantized { scale, integers } = quantize(values);
        self.scales[row] = scale;
        for (place, integer) in place.iter_mut().zip(integers) {
            *place = integer.cast_unsigned();
        }
    }
}

/// Bytes of a layer's entries in a page.
pub(super) fn page_bytes(shape: CompressedKvShape, kind: KvType) -> u64 {
    let count = TOKENS_PER_PAGE / shape.ratio;
    let row = shape.width(CompressedKvPart::Entries) * kind.element_bytes()
        + kind.scale_bytes()
        + shape.width(CompressedKvPart::Keys) * kind.of_indexer().element_bytes();
    let tails =
        [CompressedKvPart::Entries, CompressedKvPart::Keys].map(|part| tail_len(shape, part));
    (count * row + tails.iter().sum::<usize>() * size_of::<f32>()) as u64
}

/// Elements of a page's last tokens that are kept.
const fn tail_len(shape: CompressedKvShape, part: CompressedKvPart) -> usize {
    if shape.overlaps() { shape.ratio * 2 * shape.width(part) } else { 0 }
}

/// What a sequence carries on in one layer with entries: elements of its latest tokens, of entries
/// and of the keys of their indexer.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) shape: CompressedKvShape,
    parts: [Latest; 2],
}

/// Elements of the tokens of which the next entries are made.
#[derive(Clone, Debug)]
struct Latest {
    /// Tokens so far.
    len: usize,
    /// The first that is held.
    first: usize,
    /// `[token][c, z]`, as wide as they are projected.
    elements: Vec<f32>,
}

impl Pending {
    /// Of a sequence that begins with so many full pages, the last of which is given.
    pub(super) fn new(
        shape: CompressedKvShape,
        pages: usize,
        last: Option<&CompressedKvPage>,
    ) -> Self {
        let len = pages * TOKENS_PER_PAGE;
        let latest = |part| {
            let (width, columns) = (shape.width(part), shape.columns(part));
            let mut elements = Vec::new();
            if let Some(page) = last.filter(|_| shape.overlaps()) {
                // The second halves of these tokens have gone into an entry already.
                let tokens = page.tails[part as usize].chunks_exact(2 * width.max(1));
                for both in tokens.flat_map(|token| token.chunks_exact(width.max(1))) {
                    elements.extend_from_slice(both);
                    elements.extend(std::iter::repeat_n(0.0, columns - width));
                }
            }
            let held = elements.len().checked_div(2 * columns).unwrap_or(0);
            Latest { len, first: len - held, elements }
        };
        Self { shape, parts: [latest(CompressedKvPart::Entries), latest(CompressedKvPart::Keys)] }
    }

    pub(super) fn roll_back(&mut self, rows: usize) {
        for part in [CompressedKvPart::Entries, CompressedKvPart::Keys] {
            let token = 2 * self.shape.columns(part);
            let latest = &mut self.parts[part as usize];
            // A layer without an index has no elements of its keys.
            latest.len = latest.len.saturating_sub(rows);
            latest.elements.truncate((latest.len.saturating_sub(latest.first)) * token);
        }
    }

    /// Tokens whose elements have come.
    pub(super) fn len(&self) -> usize {
        self.parts[CompressedKvPart::Entries as usize].len
    }

    /// Entries of complete tokens.
    fn count(&self, part: CompressedKvPart) -> usize {
        self.parts[part as usize].len / self.shape.ratio
    }
}

/// A token that an entry covers.
#[derive(Clone, Copy)]
struct CoveredToken {
    /// Its position.
    token: usize,
    /// The row of its bias.
    at: usize,
    /// The first of its columns that count.
    column: usize,
}

impl Latest {
    /// A part of a token's elements.
    fn token(&self, token: usize, columns: usize, part: Range<usize>) -> &[f32] {
        let first = (token - self.first) * 2 * columns;
        &self.elements[first + part.start..first + part.end]
    }

    /// The entry whose tokens end with the latest one, before its norm.
    fn entry(
        &self,
        shape: CompressedKvShape,
        part: CompressedKvPart,
        bias: &[f32],
        out: &mut [f32],
    ) {
        let (ratio, width, columns) = (shape.ratio, shape.width(part), shape.columns(part));
        let own = self.len - ratio;
        // Tokens with the columns that count of them and the row of their bias.
        let before = own.checked_sub(ratio).filter(|_| shape.overlaps());
        let covered = move |first: usize, column: usize| {
            (0..ratio).map(move |at| CoveredToken { token: first + at, at, column })
        };
        let before = before.into_iter().flat_map(|first| covered(first, 0));
        let tokens = before.chain(covered(own, columns - width));
        let mut largest = vec![f32::NEG_INFINITY; width];
        let z = |CoveredToken { token, at, column }: CoveredToken| {
            let z = self.token(token, columns, columns + column..columns + column + width);
            z.iter().zip(&bias[at * columns + column..][..width]).map(|(z, bias)| z + bias)
        };
        for token in tokens.clone() {
            largest.iter_mut().zip(z(token)).for_each(|(all, z)| *all = all.max(z));
        }
        let mut sum = vec![0.0; width];
        out.fill(0.0);
        for token in tokens {
            let column = token.column;
            let c = self.token(token.token, columns, column..column + width);
            let each = out.iter_mut().zip(&mut sum).zip(c.iter().zip(z(token)).zip(&largest));
            for ((out, sum), ((c, z), largest)) in each {
                let weight = exp(z - largest);
                *sum += weight;
                *out += weight * c;
            }
        }
        out.iter_mut().zip(&sum).for_each(|(out, sum)| *out /= sum);
    }
}

impl Cache {
    /// Takes the projections `c` and `z` of rows, of which the last `drafts` may be rolled back, and
    /// appends the entries that they complete to `out`.
    fn compress(
        &mut self,
        params: &CompressorParams<'_, Vec<f32>>,
        drafts: usize,
        [c, z]: [&[f32]; 2],
        out: &mut Vec<f32>,
    ) {
        let CompressorParams { layer, part, bias, .. } = *params;
        let Pending { shape, .. } = self.pending[layer];
        let (ratio, width, columns) = (shape.ratio, shape.width(part), shape.columns(part));
        let end = self.pending[layer].parts[part as usize].len + c.len() / columns;
        self.make_room(end);
        for (c, z) in c.chunks_exact(columns).zip(z.chunks_exact(columns)) {
            let latest = &mut self.pending[layer].parts[part as usize];
            latest.elements.extend_from_slice(c);
            latest.elements.extend_from_slice(z);
            latest.len += 1;
            if !latest.len.is_multiple_of(ratio) {
                continue;
            }
            let first = out.len();
            out.resize(first + width, 0.0);
            latest.entry(shape, part, bias, &mut out[first..]);
            if shape.overlaps() && latest.len.is_multiple_of(TOKENS_PER_PAGE) {
                let mut tail = Vec::with_capacity(tail_len(shape, part));
                for token in latest.len - ratio..latest.len {
                    tail.extend_from_slice(latest.token(token, columns, 0..width));
                    tail.extend_from_slice(latest.token(token, columns, columns..columns + width));
                }
                let position = latest.len - 1;
                self.own_page(position).entries[layer].tails[part as usize] = tail;
            }
        }
        // What may be rolled back is still followed by tokens of an entry that is complete now.
        let latest = &mut self.pending[layer].parts[part as usize];
        let overlap = if shape.overlaps() { ratio } else { 0 };
        let kept = latest.len.saturating_sub(drafts) / ratio * ratio;
        let kept = kept.saturating_sub(overlap).max(latest.first);
        latest.elements.drain(..(kept - latest.first) * 2 * columns);
        latest.first = kept;
    }

    /// Keeps the latest complete entries of a part, `[entries, width]`.
    pub(super) fn put_entries(&mut self, layer: usize, part: CompressedKvPart, entries: &[f32]) {
        let pending = &self.pending[layer];
        let (ratio, width) = (pending.shape.ratio, pending.shape.width(part));
        let first = pending.count(part) - entries.len() / width;
        for (entry, values) in (first..).zip(entries.chunks_exact(width)) {
            let row = entry % (TOKENS_PER_PAGE / ratio);
            // Its last token was not there before this step.
            let page = self.own_page((entry + 1) * ratio - 1);
            page.entries[layer].parts[part as usize].write(row, values);
        }
    }

    /// Blocks of the indexer's keys, those of a page each.
    pub(super) fn entry_keys(&self, layer: usize) -> Vec<Floats<'_>> {
        self.pages.iter().map(|page| page.entries[layer].keys()).collect()
    }

    /// What a step of so many rows completes in a layer.
    pub(super) fn completed(&self, layer: usize, rows: usize) -> Completed {
        let Pending { shape, parts } = &self.pending[layer];
        let len = parts[CompressedKvPart::Entries as usize].len;
        let first = len - rows;
        Completed { entries: len / shape.ratio - first / shape.ratio, first }
    }
}

/// What a step completes in one layer of a sequence.
pub(super) struct Completed {
    /// Number of entries.
    pub(super) entries: usize,
    /// Position of the first row.
    pub(super) first: usize,
}

/// Takes the projections of the step's rows, and returns the entries that are complete with them.
pub(super) fn compress(
    CompressorInputs { values: c, gates: z }: CompressorInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &CompressorParams<'_, Vec<f32>>,
) -> Tensor {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(params.lengths.iter().sum::<usize>(), c.rows(), "rows of all sequences");
    let mut out = Vec::new();
    let (mut row, mut width) = (0, 1);
    let drafts = params.drafts.iter().copied().chain(std::iter::repeat(0));
    for ((cache, length), drafts) in caches.iter_mut().zip(params.lengths).zip(drafts) {
        let span = row * c.width..(row + length) * c.width;
        width = cache.pending[params.layer].shape.width(params.part);
        cache.compress(params, drafts, [&c.values[span.clone()], &z.values[span]], &mut out);
        row += length;
    }
    Tensor { width, values: out.into() }
}

/// Appends keys, which are values, to the caches, keeps new entries, and attends to the tokens of a
/// window and to entries: the top-k ones, or all that a row sees.
pub(super) fn attend(
    compressed: &CompressedEntries<'_, Tensor, TopK>,
    qkv: &Qkv<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vec<f32>>,
) -> Tensor {
    let CompressedEntries { layer, new: entries, window, .. } = *compressed;
    let top_k = compressed.top_k.map(|TopK(top_k)| top_k.as_slice());
    let Qkv { q, k, v } = qkv;
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert!(top_k.is_none_or(|top_k| top_k.len() == q.rows()), "top-k indices for every row");
    let mut out = Tensor::unset(q.rows(), q.width);
    let mut gathered = Gathered::default();
    let (mut row, mut entry) = (0, 0);
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let of = |x: &'_ Tensor, rows: Range<usize>| rows.start * x.width..rows.end * x.width;
        let Completed { entries: new, .. } = cache.completed(layer, *length);
        let put = &entries.values[of(entries, entry..entry + new)];
        cache.put_entries(layer, CompressedKvPart::Entries, put);
        entry += new;
        let span = of(k, row..row + length);
        let first = cache.append(params.layer, &k.values[span.clone()], &v.values[span], *length);
        let ratio = cache.pending[layer].shape.ratio;
        let per_page = TOKENS_PER_PAGE / ratio;
        let blocks: Vec<_> = cache.pages.iter().map(|page| page.entries[layer].block()).collect();
        let tokens = cache.heads(params.layer);
        let tokens = tokens.heads();
        let [head] = &tokens[..] else { unreachable!("keys that are values have one head") };
        for (row, position) in (row..row + length).zip(first..) {
            gathered.clear();
            match top_k.and_then(|top_k| top_k[row].as_ref()) {
                Some(entries) => {
                    for entry in entries {
                        let (page, at) = (*entry as usize / per_page, *entry as usize % per_page);
                        gathered.add(blocks[page], at..at + 1, params.head_dim);
                    }
                }
                None => {
                    gathered.add_run(&blocks, 0..(position + 1) / ratio, per_page, params.head_dim);
                }
            }
            let seen = (position + 1).saturating_sub(window)..position + 1;
            gathered.add_run(head.keys, seen, TOKENS_PER_PAGE, params.head_dim);
            let keys = gathered.blocks(params.head_dim);
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
                heads: &[KvHead { keys: &keys, values: &keys }],
                first_position: gathered.keys(params.head_dim) - 1,
            };
            let span = of(q, row..row + 1);
            attend_one(&q.values[span.clone()], &attention, &mut out.values[span]);
        }
        row += length;
    }
    out
}

#[cfg(test)]
mod tests;
