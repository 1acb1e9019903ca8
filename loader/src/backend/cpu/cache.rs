//! Keys and values of one sequence, in pages of as many tokens as attention reads at a time. Full
//! pages never change and are shared between sequences that begin alike.

use std::{ops::Range, sync::Arc};

use half::{bf16, f16};
use shardpack_kernels::{Floats, KvBlock, KvHead, attention::KEYS_PER_BLOCK};

use super::delta::State;
use crate::backend::{CacheShape, KvType, TOKENS_PER_PAGE};

// Attention reads a page as one block.
const _: () = assert!(TOKENS_PER_PAGE == KEYS_PER_BLOCK);

/// Keys and values of one sequence; grows by pages.
#[derive(Clone, Debug)]
pub struct Cache {
    shape: CacheShape,
    kind: KvType,
    /// Tokens of each layer.
    lens: Vec<usize>,
    // Invariant: a page that is not full belongs to this sequence alone.
    pages: Vec<Arc<Page>>,
    /// Of each layer, for those with linear attention.
    states: Vec<State>,
}

/// [`TOKENS_PER_PAGE`] tokens in all layers.
#[derive(Clone, Debug)]
pub struct Page {
    /// For each layer `[kv_head][keys, values][token][head_dim]`.
    layers: Vec<Store>,
}

/// Numbers of one layer of a page.
#[derive(Clone, Debug)]
enum Store {
    F32(Aligned),
    F16(Vec<u16>),
    Bf16(Vec<u16>),
    /// Integers, and one scale for each row of `head_dim`.
    Q8(Vec<i8>, Vec<f32>),
}

/// Floats from a line of the processor's cache on, so that no vector of them lies in two.
#[derive(Clone, Debug)]
struct Aligned {
    values: Vec<f32>,
    start: usize,
}

impl Aligned {
    /// Bytes of a line, which are those of the widest vector too.
    const LINE: usize = 64;

    fn zeroed(len: usize) -> Self {
        let values = vec![0.0; len + Self::LINE / size_of::<f32>()];
        // It never grows, so it stays where it is; a copy may lie otherwise, which costs time only.
        let start = values.as_ptr().align_offset(Self::LINE);
        Self { start: start.min(values.len() - len), values }
    }

    fn get(&self, span: Range<usize>) -> &[f32] {
        &self.values[self.start + span.start..self.start + span.end]
    }

    fn get_mut(&mut self, span: Range<usize>) -> &mut [f32] {
        &mut self.values[self.start + span.start..self.start + span.end]
    }
}

impl Store {
    /// Memory that was never written is not resident: the system gives it when it is touched.
    fn new(kind: KvType, rows: usize, head_dim: usize) -> Self {
        let len = rows * head_dim;
        match kind {
            KvType::F32 => Self::F32(Aligned::zeroed(len)),
            KvType::F16 => Self::F16(vec![0; len]),
            KvType::Bf16 => Self::Bf16(vec![0; len]),
            KvType::Q8 => Self::Q8(vec![0; len], vec![0.0; rows]),
        }
    }

    fn write(&mut self, row: usize, values: &[f32]) {
        let span = row * values.len()..(row + 1) * values.len();
        let halves = |store: &mut [u16], bits: fn(f32) -> u16| {
            for (store, value) in store.iter_mut().zip(values) {
                *store = bits(*value);
            }
        };
        match self {
            Self::F32(store) => store.get_mut(span).copy_from_slice(values),
            Self::F16(store) => halves(&mut store[span], |value| f16::from_f32(value).to_bits()),
            Self::Bf16(store) => halves(&mut store[span], |value| bf16::from_f32(value).to_bits()),
            Self::Q8(store, scales) => {
                let largest =
                    values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let scale = largest / f32::from(i8::MAX);
                let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                scales[row] = scale;
                for (store, value) in store[span].iter_mut().zip(values) {
                    *store = (value * factor).round_ties_even() as i8;
                }
            }
        }
    }

    /// Rows of one head.
    fn block(&self, rows: Range<usize>, head_dim: usize) -> KvBlock<'_> {
        let span = rows.start * head_dim..rows.end * head_dim;
        match self {
            Self::F32(store) => KvBlock::Floats(Floats::F32(store.get(span))),
            Self::F16(store) => KvBlock::Floats(Floats::F16(&store[span])),
            Self::Bf16(store) => KvBlock::Floats(Floats::BF16(&store[span])),
            Self::Q8(store, scales) => KvBlock::Q8 { values: &store[span], scales: &scales[rows] },
        }
    }
}

/// Bytes of one page.
pub(super) fn page_bytes(shape: &CacheShape, kind: KvType) -> u64 {
    let rows = (shape.layers * shape.kv_heads * 2 * TOKENS_PER_PAGE) as u64;
    let values = rows * shape.head_dim as u64;
    match kind {
        KvType::F32 => values * 4,
        KvType::F16 | KvType::Bf16 => values * 2,
        KvType::Q8 => values + rows * 4,
    }
}

impl Page {
    fn new(shape: &CacheShape, kind: KvType) -> Self {
        let layer = || Store::new(kind, shape.kv_heads * 2 * TOKENS_PER_PAGE, shape.head_dim);
        Self { layers: (0..shape.layers).map(|_| layer()).collect() }
    }
}

/// The first row of a head's keys or values in a page.
const fn first_row(head: usize, part: Part) -> usize {
    (head * 2 + part as usize) * TOKENS_PER_PAGE
}

#[derive(Clone, Copy)]
enum Part {
    Keys = 0,
    Values = 1,
}

impl Cache {
    /// A sequence that begins with full pages.
    pub(super) fn new(shape: &CacheShape, kind: KvType, pages: &[Arc<Page>]) -> Self {
        let lens = vec![pages.len() * TOKENS_PER_PAGE; shape.layers];
        let states = vec![State::default(); shape.states];
        Self { shape: *shape, kind, lens, pages: pages.to_vec(), states }
    }

    /// What linear attention carries on in a layer.
    pub(super) fn state(&mut self, layer: usize) -> &mut State {
        &mut self.states[layer]
    }

    /// A full page.
    pub(super) fn page(&self, index: usize) -> Arc<Page> {
        let full = self.lens.iter().all(|len| *len >= (index + 1) * TOKENS_PER_PAGE);
        assert!(full, "page {index} is not full");
        Arc::clone(&self.pages[index])
    }

    /// Appends `rows` keys and values `[rows, kv_heads, head_dim]` to a layer and returns the
    /// position of the first.
    pub(super) fn append(&mut self, layer: usize, k: &[f32], v: &[f32], rows: usize) -> usize {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        assert_eq!(k.len(), rows * kv_heads * head_dim, "keys of {rows} rows");
        assert_eq!(v.len(), k.len(), "values of {rows} rows");
        let first = self.lens[layer];
        self.lens[layer] += rows;
        while self.pages.len() * TOKENS_PER_PAGE < self.lens[layer] {
            self.pages.push(Arc::new(Page::new(&self.shape, self.kind)));
        }
        for row in 0..rows {
            let position = first + row;
            let page = Arc::get_mut(&mut self.pages[position / TOKENS_PER_PAGE]);
            let page = page.expect("a page that is not full belongs to one sequence");
            let store = &mut page.layers[layer];
            for head in 0..kv_heads {
                let span =
                    (row * kv_heads + head) * head_dim..(row * kv_heads + head + 1) * head_dim;
                let at = |part| first_row(head, part) + position % TOKENS_PER_PAGE;
                store.write(at(Part::Keys), &k[span.clone()]);
                store.write(at(Part::Values), &v[span]);
            }
        }
        first
    }

    /// The heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> Blocks<'_> {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        let used = self.lens[layer].div_ceil(TOKENS_PER_PAGE);
        let blocks = |head: usize, part| -> Vec<KvBlock<'_>> {
            let rows = first_row(head, part)..first_row(head, part) + TOKENS_PER_PAGE;
            let pages = self.pages[..used].iter();
            pages.map(|page| page.layers[layer].block(rows.clone(), head_dim)).collect()
        };
        let head = |head| [blocks(head, Part::Keys), blocks(head, Part::Values)];
        Blocks((0..kv_heads).map(head).collect())
    }
}

/// Blocks of keys and of values of each head.
pub(super) struct Blocks<'a>(Vec<[Vec<KvBlock<'a>>; 2]>);

impl Blocks<'_> {
    pub(super) fn heads(&self) -> Vec<KvHead<'_>> {
        self.0.iter().map(|[keys, values]| KvHead { keys, values }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: CacheShape = CacheShape { layers: 2, states: 0, kv_heads: 3, head_dim: 8 };

    fn rows(first: usize, count: usize) -> Vec<f32> {
        let width = SHAPE.kv_heads * SHAPE.head_dim;
        (first * width..(first + count) * width).map(|i| (i as f32 * 0.713).sin() * 3.0).collect()
    }

    fn read(cache: &Cache, layer: usize) -> Vec<Vec<f32>> {
        let floats = |block: &KvBlock<'_>| match block {
            KvBlock::Floats(floats) => floats.to_vec(),
            KvBlock::Q8 { values, scales } => values
                .iter()
                .enumerate()
                .map(|(i, value)| f32::from(*value) * scales[i / SHAPE.head_dim])
                .collect(),
        };
        let blocks = cache.heads(layer);
        blocks.0.iter().flatten().map(|blocks| blocks.iter().flat_map(floats).collect()).collect()
    }

    fn fill(kind: KvType, pages: &[Arc<Page>], chunks: &[usize]) -> Cache {
        let mut cache = Cache::new(&SHAPE, kind, pages);
        let mut at = pages.len() * TOKENS_PER_PAGE;
        for count in chunks {
            for layer in 0..SHAPE.layers {
                let k = rows(at, *count);
                let v: Vec<f32> = k.iter().map(|k| k * 2.0 + layer as f32).collect();
                assert_eq!(cache.append(layer, &k, &v, *count), at);
            }
            at += count;
        }
        cache
    }

    #[test]
    fn a_sequence_on_shared_pages_holds_what_one_of_its_own_does() {
        for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8] {
            let whole = fill(kind, &[], &[600]);
            let first = fill(kind, &[], &[1, 255, 256, 3]);
            let second = fill(kind, &[first.page(0), first.page(1)], &[50, 38]);
            for layer in 0..SHAPE.layers {
                assert_eq!(read(&whole, layer), read(&second, layer), "{kind:?}");
            }
            drop(first);
            assert_eq!(read(&whole, 1), read(&second, 1), "{kind:?}");
        }
    }

    #[test]
    fn stored_numbers_are_as_close_as_their_type() {
        for (kind, tolerance) in [
            (KvType::F32, 0.0),
            (KvType::F16, 7.0 * 2.0_f32.powi(-11)),
            (KvType::Bf16, 7.0 * 2.0_f32.powi(-8)),
            // Half a step of the largest magnitude's 127th part.
            (KvType::Q8, 7.0 / 127.0 / 2.0 + 1e-6),
        ] {
            let found = read(&fill(kind, &[], &[300]), 1);
            let exact = read(&fill(KvType::F32, &[], &[300]), 1);
            let pairs = found.iter().flatten().zip(exact.iter().flatten());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= tolerance, "{kind:?}: {worst}");
        }
    }

    #[test]
    fn pages_are_as_large_as_they_say() {
        let f32_bytes = 2 * 3 * 2 * 256 * 8 * 4;
        assert_eq!(page_bytes(&SHAPE, KvType::F32), f32_bytes);
        assert_eq!(page_bytes(&SHAPE, KvType::Bf16), f32_bytes / 2);
        assert_eq!(page_bytes(&SHAPE, KvType::Q8), f32_bytes / 4 + 2 * 3 * 2 * 256 * 4);
    }
}
