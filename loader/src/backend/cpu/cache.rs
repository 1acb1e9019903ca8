//! Keys and values of one sequence, in pages of as many tokens as attention reads at a time. Full
//! pages never change and are shared between sequences that begin alike.

use std::{ops::Range, sync::Arc};

use half::{bf16, f16};
use shardpack_kernels::{Floats, KvBlock, KvHead, attention::KEYS_PER_BLOCK};
use zerocopy::{FromBytes, IntoBytes};

use super::delta::State;
use crate::{
    backend::{CacheShape, KvType, TOKENS_PER_PAGE},
    open::Memory,
};

// Attention reads a page as one block.
const _: () = assert!(TOKENS_PER_PAGE == KEYS_PER_BLOCK);

/// Keys and values of one sequence; grows by pages.
#[derive(Clone, Debug)]
pub struct Cache {
    shape: CacheShape,
    kind: KvType,
    /// Tokens of each layer, then of each index.
    lens: Vec<usize>,
    // Invariant: a page that is not full belongs to this sequence alone.
    pages: Vec<Arc<Page>>,
    /// Of each layer, for those with linear attention.
    states: Vec<State>,
}

/// [`TOKENS_PER_PAGE`] tokens in all layers.
#[derive(Clone, Debug)]
pub struct Page {
    kind: KvType,
    head_dim: usize,
    rows_per_layer: usize,
    /// For each layer `[kv_head][keys, values][token][head_dim]`, as one piece: a layer by itself
    /// would be too short for large pages of memory. Where keys are values there are keys alone.
    numbers: Memory,
    /// Of integers one for each row of `head_dim`, in the same order.
    scales: Vec<f32>,
    index_width: usize,
    /// For each index `[token][index_width]`.
    index: Memory,
}

/// Bytes of a line of the cache, which are those of the widest vector too: none of a row then lies
/// in two.
const LINE: usize = 64;

/// Pages of a sequence before those in large pages of memory. These are resident whole as soon as
/// their first token is, so a sequence takes at most a ninth more than its tokens need.
const PAGES_IN_SMALL: usize = 8;

impl Page {
    /// Page `index` of a sequence. Memory that was never written is not resident: the system gives
    /// it when it is touched.
    fn new(shape: &CacheShape, kind: KvType, index: usize) -> Self {
        let rows_per_layer = shape.kv_heads * parts(shape) * TOKENS_PER_PAGE;
        let rows = shape.layers * rows_per_layer;
        let memory = |bytes| {
            if index < PAGES_IN_SMALL {
                Memory::zeroed(bytes, LINE)
            } else {
                Memory::on_large_pages(bytes, LINE)
            }
        };
        Self {
            kind,
            head_dim: shape.head_dim,
            rows_per_layer,
            numbers: memory(rows * shape.head_dim * number_bytes(kind)),
            scales: vec![0.0; if kind == KvType::Q8 { rows } else { 0 }],
            index_width: shape.index_width,
            index: memory(index_bytes(shape, kind)),
        }
    }

    /// A row of an index is given its numbers.
    fn write_index(&mut self, (index, row): (usize, usize), values: &[f32]) {
        let kind = index_kind(self.kind);
        let bytes = values.len() * number_bytes(kind);
        let first = (index * TOKENS_PER_PAGE + row) * bytes;
        write_floats(kind, &mut self.index.bytes_mut()[first..first + bytes], values);
    }

    /// Keys of an index.
    fn index(&self, index: usize) -> Floats<'_> {
        let bytes = TOKENS_PER_PAGE * self.index_width * number_bytes(index_kind(self.kind));
        let bytes = &self.index.bytes()[index * bytes..(index + 1) * bytes];
        match index_kind(self.kind) {
            KvType::F32 => Floats::F32(<[f32]>::ref_from_bytes(bytes).expect(ALIGNED)),
            KvType::Bf16 => Floats::BF16(<[u16]>::ref_from_bytes(bytes).expect(ALIGNED)),
            KvType::F16 | KvType::Q8 => Floats::F16(<[u16]>::ref_from_bytes(bytes).expect(ALIGNED)),
        }
    }

    /// Row `row` of a layer is given its numbers.
    fn write(&mut self, (layer, row): (usize, usize), values: &[f32]) {
        let row = layer * self.rows_per_layer + row;
        let bytes = values.len() * number_bytes(self.kind);
        let place = &mut self.numbers.bytes_mut()[row * bytes..][..bytes];
        match self.kind {
            KvType::F32 | KvType::F16 | KvType::Bf16 => write_floats(self.kind, place, values),
            KvType::Q8 => {
                let largest =
                    values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let scale = largest / f32::from(i8::MAX);
                let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                self.scales[row] = scale;
                for (place, value) in place.iter_mut().zip(values) {
                    *place = ((value * factor).round_ties_even() as i8).cast_unsigned();
                }
            }
        }
    }

    /// Rows of one head.
    fn block(&self, layer: usize, rows: Range<usize>) -> KvBlock<'_> {
        let first = layer * self.rows_per_layer;
        let rows = first + rows.start..first + rows.end;
        let width = self.head_dim * number_bytes(self.kind);
        let bytes = &self.numbers.bytes()[rows.start * width..rows.end * width];
        let halves = || <[u16]>::ref_from_bytes(bytes).expect(ALIGNED);
        match self.kind {
            KvType::F32 => {
                KvBlock::Floats(Floats::F32(<[f32]>::ref_from_bytes(bytes).expect(ALIGNED)))
            }
            KvType::F16 => KvBlock::Floats(Floats::F16(halves())),
            KvType::Bf16 => KvBlock::Floats(Floats::BF16(halves())),
            KvType::Q8 => KvBlock::Q8 {
                values: <[i8]>::ref_from_bytes(bytes).expect(ALIGNED),
                scales: &self.scales[rows],
            },
        }
    }
}

const ALIGNED: &str = "memory begins on a line, and rows are whole numbers";

/// How an index's keys are stored: integers are too coarse for scores that decide.
const fn index_kind(kind: KvType) -> KvType {
    match kind {
        KvType::Q8 => KvType::F16,
        kind => kind,
    }
}

fn write_floats(kind: KvType, place: &mut [u8], values: &[f32]) {
    match kind {
        KvType::F32 => place.copy_from_slice(values.as_bytes()),
        KvType::Bf16 => halves(place, values, |value| bf16::from_f32(value).to_bits()),
        KvType::F16 | KvType::Q8 => {
            halves(place, values, |value| f16::from_f32(value).to_bits());
        }
    }
}

fn halves(place: &mut [u8], values: &[f32], bits: fn(f32) -> u16) {
    for (place, value) in place.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *place = bits(*value).to_ne_bytes();
    }
}

const fn number_bytes(kind: KvType) -> usize {
    match kind {
        KvType::F32 => 4,
        KvType::F16 | KvType::Bf16 => 2,
        KvType::Q8 => 1,
    }
}

/// Bytes of one page.
pub(super) fn page_bytes(shape: &CacheShape, kind: KvType) -> u64 {
    let rows = (shape.layers * shape.kv_heads * parts(shape) * TOKENS_PER_PAGE) as u64;
    let values = rows * shape.head_dim as u64;
    let numbers = match kind {
        KvType::F32 => values * 4,
        KvType::F16 | KvType::Bf16 => values * 2,
        KvType::Q8 => values + rows * 4,
    };
    numbers + index_bytes(shape, kind) as u64
}

/// Bytes of the keys of all indexes in a page.
const fn index_bytes(shape: &CacheShape, kind: KvType) -> usize {
    shape.indexes * TOKENS_PER_PAGE * shape.index_width * number_bytes(index_kind(kind))
}

/// Keys, and values if they are others.
const fn parts(shape: &CacheShape) -> usize {
    if shape.keys_are_values { 1 } else { 2 }
}

/// The first row of a head's keys or values in a page.
const fn first_row(shape: &CacheShape, head: usize, part: Part) -> usize {
    let part = if shape.keys_are_values { 0 } else { part as usize };
    (head * parts(shape) + part) * TOKENS_PER_PAGE
}

#[derive(Clone, Copy)]
enum Part {
    Keys = 0,
    Values = 1,
}

impl Cache {
    /// A sequence that begins with full pages.
    pub(super) fn new(shape: &CacheShape, kind: KvType, pages: &[Arc<Page>]) -> Self {
        let lens = vec![pages.len() * TOKENS_PER_PAGE; shape.layers + shape.indexes];
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
        match self.pages.get(index) {
            Some(page) => Arc::clone(page),
            // Of a rank that attends to nothing.
            None => Arc::new(Page::new(&self.shape, self.kind, index)),
        }
    }

    /// The pages with room for `rows` more of a layer or an index, and the first's position.
    fn grow(&mut self, len: usize, rows: usize) -> usize {
        let first = self.lens[len];
        self.lens[len] += rows;
        while self.pages.len() * TOKENS_PER_PAGE < self.lens[len] {
            let page = Page::new(&self.shape, self.kind, self.pages.len());
            self.pages.push(Arc::new(page));
        }
        first
    }

    /// The page of a position that was not there yet.
    fn own_page(&mut self, position: usize) -> &mut Page {
        let page = Arc::get_mut(&mut self.pages[position / TOKENS_PER_PAGE]);
        page.expect("a page that is not full belongs to one sequence")
    }

    /// Appends keys `[rows, index_width]` to an index and returns the position of the first.
    pub(super) fn append_index(&mut self, index: usize, k: &[f32]) -> usize {
        let width = self.shape.index_width;
        assert!(k.len().is_multiple_of(width), "keys of {width}");
        let first = self.grow(self.shape.layers + index, k.len() / width);
        for (position, k) in (first..).zip(k.chunks_exact(width)) {
            self.own_page(position).write_index((index, position % TOKENS_PER_PAGE), k);
        }
        first
    }

    /// Blocks of keys of an index.
    pub(super) fn index(&self, index: usize) -> Vec<Floats<'_>> {
        let used = self.lens[self.shape.layers + index].div_ceil(TOKENS_PER_PAGE);
        self.pages[..used].iter().map(|page| page.index(index)).collect()
    }

    /// Appends `rows` keys and values `[rows, kv_heads, head_dim]` to a layer and returns the
    /// position of the first.
    pub(super) fn append(&mut self, layer: usize, k: &[f32], v: &[f32], rows: usize) -> usize {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        assert_eq!(k.len(), rows * kv_heads * head_dim, "keys of {rows} rows");
        assert_eq!(v.len(), k.len(), "values of {rows} rows");
        let (first, shape) = (self.grow(layer, rows), self.shape);
        for row in 0..rows {
            let position = first + row;
            let page = self.own_page(position);
            for head in 0..kv_heads {
                let span =
                    (row * kv_heads + head) * head_dim..(row * kv_heads + head + 1) * head_dim;
                let at = |part| first_row(&shape, head, part) + position % TOKENS_PER_PAGE;
                page.write((layer, at(Part::Keys)), &k[span.clone()]);
                if !shape.keys_are_values {
                    page.write((layer, at(Part::Values)), &v[span]);
                }
            }
        }
        first
    }

    /// Takes back the last rows of all layers. Their memory stays, for those that come instead.
    pub(super) fn rewind(&mut self, rows: usize) {
        for state in &mut self.states {
            state.rewind(rows);
        }
        for len in &mut self.lens {
            *len = len.checked_sub(rows).expect("rows that were appended");
        }
    }

    /// The heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> Blocks<'_> {
        let kv_heads = self.shape.kv_heads;
        let used = self.lens[layer].div_ceil(TOKENS_PER_PAGE);
        let blocks = |head: usize, part| -> Vec<KvBlock<'_>> {
            let first = first_row(&self.shape, head, part);
            let rows = first..first + TOKENS_PER_PAGE;
            let pages = self.pages[..used].iter();
            pages.map(|page| page.block(layer, rows.clone())).collect()
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

    const SHAPE: CacheShape = CacheShape {
        layers: 2,
        states: 0,
        kv_heads: 3,
        head_dim: 8,
        keys_are_values: false,
        indexes: 0,
        index_width: 0,
    };

    const INDEXED: CacheShape =
        CacheShape { kv_heads: 1, keys_are_values: true, indexes: 1, index_width: 16, ..SHAPE };

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
    fn rows_that_were_taken_back_leave_nothing_behind() {
        for kind in [KvType::F32, KvType::Bf16, KvType::Q8] {
            let whole = fill(kind, &[], &[600]);
            let mut cache = fill(kind, &[], &[250]);
            let wrong = vec![9.0; 20 * SHAPE.kv_heads * SHAPE.head_dim];
            for layer in 0..SHAPE.layers {
                cache.append(layer, &wrong, &wrong, 20);
            }
            cache.rewind(20);
            for layer in 0..SHAPE.layers {
                let k = rows(250, 350);
                let v: Vec<f32> = k.iter().map(|k| k * 2.0 + layer as f32).collect();
                assert_eq!(cache.append(layer, &k, &v, 350), 250);
                assert_eq!(read(&whole, layer), read(&cache, layer), "{kind:?}");
            }
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
    fn keys_of_an_index_lie_in_the_pages_of_the_sequence() {
        for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8] {
            let key = |at: usize| -> Vec<f32> {
                (0..16).map(|i| ((at * 16 + i) as f32 * 0.37).sin()).collect()
            };
            let keys = |range: Range<usize>| range.flat_map(key).collect::<Vec<f32>>();
            let fill = |pages: &[Arc<Page>], chunks: &[usize]| {
                let mut cache = Cache::new(&INDEXED, kind, pages);
                let mut at = pages.len() * TOKENS_PER_PAGE;
                for count in chunks {
                    assert_eq!(cache.append_index(0, &keys(at..at + count)), at);
                    for layer in 0..INDEXED.layers {
                        let k = &rows(at, *count)[..count * INDEXED.head_dim];
                        assert_eq!(cache.append(layer, k, k, *count), at);
                    }
                    at += count;
                }
                cache
            };
            let found = |cache: &Cache| -> Vec<f32> {
                cache.index(0).iter().flat_map(Floats::to_vec).take(600 * 16).collect()
            };
            let whole = fill(&[], &[600]);
            let first = fill(&[], &[1, 255, 256, 3]);
            let second = fill(&[first.page(0), first.page(1)], &[50, 38]);
            assert_eq!(found(&whole), found(&second), "{kind:?}");
            let tolerance = match kind {
                KvType::F32 => 0.0,
                KvType::F16 | KvType::Q8 => 2.0_f32.powi(-11),
                KvType::Bf16 => 2.0_f32.powi(-8),
            };
            let pairs = found(&whole).into_iter().zip(keys(0..600));
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= tolerance, "{kind:?}: {worst}");
            let [keys, values] = [0, 1].map(|part| {
                let blocks = &second.heads(1).0[0][part];
                format!("{blocks:?}")
            });
            assert!(keys == values, "{kind:?}: keys are values");
        }
    }

    #[test]
    fn a_rank_that_attends_to_nothing_has_pages_without_anything() {
        let nothing = CacheShape { layers: 0, indexes: 0, ..INDEXED };
        let cache = Cache::new(&nothing, KvType::F32, &[]);
        let again = Cache::new(&nothing, KvType::F32, &[cache.page(0), cache.page(1)]);
        assert_eq!(again.page(1).numbers.bytes().len(), 0);
        assert_eq!(page_bytes(&nothing, KvType::F32), 0);
    }

    #[test]
    fn pages_are_as_large_as_they_say() {
        let f32_bytes = 2 * 3 * 2 * 256 * 8 * 4;
        assert_eq!(page_bytes(&SHAPE, KvType::F32), f32_bytes);
        assert_eq!(page_bytes(&SHAPE, KvType::Bf16), f32_bytes / 2);
        assert_eq!(page_bytes(&SHAPE, KvType::Q8), f32_bytes / 4 + 2 * 3 * 2 * 256 * 4);
        assert_eq!(page_bytes(&INDEXED, KvType::F32), 256 * (2 * 8 + 16) * 4);
        assert_eq!(page_bytes(&INDEXED, KvType::Q8), 256 * (2 * (8 + 4) + 16 * 2));
    }
}
