//! Keys and values of one sequence, in pages of as many tokens as attention reads at a time. Full
//! pages never change and are shared between sequences that begin alike.

use std::{ops::Range, sync::Arc};

use half::{bf16, f16};
use shardpack_formats::memory::{KvType, TOKENS_PER_PAGE};
use shardpack_kernels::{
    Floats, KvBlock, KvHead,
    attention::{KEYS_PER_BLOCK, Order, Row, TOGETHER_BF16, TOGETHER_Q8},
};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    Cpu,
    compressed_kv::{self, CompressedKvPage, Pending},
    linear_attention::State,
};
use crate::{
    backend::{CacheShape, CompressedKvShape, KvCache, KvRollback, LayerShape},
    loading::Memory,
};

// Attention reads a page as one block.
const _: () = assert!(TOKENS_PER_PAGE == KEYS_PER_BLOCK);

impl KvCache for Cpu {
    type Cache = Cache;
    type Page = Arc<Page>;

    fn cache(&self, shape: &CacheShape, pages: &[Arc<Page>]) -> Cache {
        Cache::new(shape, self.kv, pages)
    }

    fn page(&self, cache: &Cache, index: usize) -> Arc<Page> {
        cache.page(index)
    }

    fn page_bytes(&self, shape: &CacheShape) -> u64 {
        page_bytes(shape, self.kv)
    }

    fn kv_type(&self) -> KvType {
        self.kv
    }

    fn kv_rollback(&self) -> Option<&dyn KvRollback<Cache>> {
        Some(self)
    }
}

impl KvRollback<Cache> for Cpu {
    fn roll_back(&self, cache: &mut Cache, rows: usize) {
        self.team.run(|| cache.roll_back(rows));
    }
}

/// Keys and values of one sequence; grows by pages.
#[derive(Clone, Debug)]
pub struct Cache {
    offsets: Arc<[LayerOffset]>,
    indexes: Indexes,
    kind: KvType,
    /// Tokens of each layer, then of each index.
    lens: Vec<usize>,
    // Invariant: a page that is not full belongs to this sequence alone.
    pub(super) pages: Vec<Arc<Page>>,
    /// Of each layer with entries.
    pub(super) pending: Vec<Pending>,
    /// Of each layer, for those with linear attention.
    states: Vec<State>,
}

/// Where a layer is in a page.
#[derive(Clone, Copy, Debug)]
struct LayerOffset {
    shape: LayerShape,
    /// Keys, and values if they are others.
    parts: usize,
    /// How they lie.
    order: Order,
    /// Elements of all layers before it.
    first_element: usize,
    /// Rows of all layers before it.
    first_row: usize,
}

impl LayerOffset {
    /// The first row of a head's keys or values among those of the layer.
    const fn first(&self, head: usize, part: Part) -> usize {
        let part = if self.parts == 1 { 0 } else { part as usize };
        (head * self.parts + part) * TOKENS_PER_PAGE
    }
}

#[derive(Clone, Copy)]
enum Part {
    Keys = 0,
    Values = 1,
}

/// The indexes of a sequence.
#[derive(Clone, Copy, Debug)]
struct Indexes {
    count: usize,
    width: usize,
}

impl Indexes {
    const fn of(shape: &CacheShape) -> Self {
        Self { count: shape.indexes, width: shape.index_width }
    }

    /// Bytes of the keys of all of them in a page.
    const fn bytes(self, kind: KvType) -> usize {
        self.count * TOKENS_PER_PAGE * self.width * kind.of_indexer().element_bytes()
    }
}

/// The offsets of all layers, and one of no heads behind them.
fn offsets(shape: &CacheShape) -> Vec<LayerOffset> {
    let (mut first_element, mut first_row) = (0, 0);
    let parts = if shape.keys_are_values { 1 } else { 2 };
    let end = LayerShape { kv_heads: 0, head_dim: 1 };
    let layers = shape.layers.iter().copied().chain([end]);
    layers
        .map(|shape| {
            // What is key and value at once lies in rows.
            let order = if parts == 1 { Order::Rows } else { Order::fastest(shape.head_dim) };
            let place = LayerOffset { shape, parts, order, first_element, first_row };
            let rows = shape.kv_heads * parts * TOKENS_PER_PAGE;
            first_element += (rows * shape.head_dim).next_multiple_of(LINE);
            first_row += rows;
            place
        })
        .collect()
}

/// [`TOKENS_PER_PAGE`] tokens in all layers.
#[derive(Clone, Debug)]
pub struct Page {
    kind: KvType,
    offsets: Arc<[LayerOffset]>,
    /// For each layer `[kv_head][keys, values]` of the elements of all tokens, which lie as its place
    /// says, as one piece: a layer by itself would be too short for large pages of memory. Where
    /// keys are values there are keys alone.
    elements: Memory,
    /// Of integers one for each token's row of a head, `[kv_head][keys, values][token]`.
    scales: Vec<f32>,
    index_width: usize,
    /// For each index `[token][index_width]`.
    index: Memory,
    /// Of each layer with entries.
    pub(super) entries: Vec<CompressedKvPage>,
}

/// Bytes of a line of the cache, which are those of the widest vector too: none of a row then lies
/// in two.
pub(super) const LINE: usize = 64;

/// Pages of a sequence before those in large pages of memory. These are resident whole as soon as
/// their first token is, so a sequence takes at most a ninth more than its tokens need.
const PAGES_IN_SMALL: usize = 8;

impl Page {
    /// Page `index` of a sequence. Memory that was never written is not resident: the system gives
    /// it when it is touched.
    fn new(
        offsets: &Arc<[LayerOffset]>,
        indexes: Indexes,
        entries: impl Iterator<Item = CompressedKvShape>,
        kind: KvType,
        index: usize,
    ) -> Self {
        let end = offsets.last().expect("a place behind all layers");
        let rows = end.first_row;
        let memory = |bytes| {
            if index < PAGES_IN_SMALL {
                Memory::zeroed(bytes, LINE)
            } else {
                Memory::on_large_pages(bytes, LINE)
            }
        };
        Self {
            kind,
            offsets: Arc::clone(offsets),
            elements: memory(end.first_element * kind.element_bytes()),
            scales: vec![0.0; if kind == KvType::Q8 { rows } else { 0 }],
            index_width: indexes.width,
            index: memory(indexes.bytes(kind)),
            entries: entries.map(|shape| CompressedKvPage::new(shape, kind)).collect(),
        }
    }

    /// Writes a key of an indexer.
    fn write_index(&mut self, index: usize, row: usize, values: &[f32]) {
        let kind = self.kind.of_indexer();
        let bytes = values.len() * kind.element_bytes();
        let first = (index * TOKENS_PER_PAGE + row) * bytes;
        write_floats(kind, &mut self.index.bytes_mut()[first..first + bytes], values);
    }

    /// Keys of an index.
    fn index(&self, index: usize) -> Floats<'_> {
        let bytes = TOKENS_PER_PAGE * self.index_width * self.kind.of_indexer().element_bytes();
        let bytes = &self.index.bytes()[index * bytes..(index + 1) * bytes];
        match self.kind.of_indexer() {
            KvType::F32 => Floats::F32(<[f32]>::ref_from_bytes(bytes).expect(ALIGNED)),
            KvType::Bf16 => Floats::BF16(<[u16]>::ref_from_bytes(bytes).expect(ALIGNED)),
            KvType::F16 | KvType::Q8 => Floats::F16(<[u16]>::ref_from_bytes(bytes).expect(ALIGNED)),
        }
    }

    /// Writes a key or a value of a layer; the rows of its head begin at `head_row`.
    fn write(&mut self, layer: usize, head_row: usize, row: Row, values: &[f32]) {
        let LayerOffset { first_element, first_row, order, .. } = self.offsets[layer];
        let first = first_element + head_row * values.len();
        let elements = first..first + TOKENS_PER_PAGE * values.len();
        let width = self.kind.element_bytes();
        let block = &mut self.elements.bytes_mut()[elements.start * width..elements.end * width];
        match self.kind {
            KvType::F32 => {
                let block = <[f32]>::mut_from_bytes(block).expect(ALIGNED);
                order.put(row, 1, values.iter().copied(), block);
            }
            KvType::F16 => {
                let block = <[u16]>::mut_from_bytes(block).expect(ALIGNED);
                let bits = values.iter().map(|value| f16::from_f32(*value).to_bits());
                order.put(row, 1, bits, block);
            }
            KvType::Bf16 => {
                let block = <[u16]>::mut_from_bytes(block).expect(ALIGNED);
                let bits = values.iter().map(|value| bf16::from_f32(*value).to_bits());
                order.put(row, TOGETHER_BF16, bits, block);
            }
            KvType::Q8 => {
                let Quantized { scale, integers } = quantize(values);
                let (Row::Key(token) | Row::Value(token)) = row;
                self.scales[first_row + head_row + token] = scale;
                let block = <[i8]>::mut_from_bytes(block).expect(ALIGNED);
                order.put(row, TOGETHER_Q8, integers, block);
            }
        }
    }

    /// Rows of one head.
    fn block(&self, layer: usize, rows: Range<usize>) -> KvBlock<'_> {
        let LayerOffset { shape, first_element, first_row, .. } = self.offsets[layer];
        let width = shape.head_dim * self.kind.element_bytes();
        let first = first_element * self.kind.element_bytes();
        let bytes = &self.elements.bytes()[first + rows.start * width..first + rows.end * width];
        let rows = first_row + rows.start..first_row + rows.end;
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

const ALIGNED: &str = "memory begins on a line, and rows are whole elements";

/// A row as 8-bit integers.
pub(super) struct Quantized<I> {
    pub(super) scale: f32,
    pub(super) integers: I,
}

pub(super) fn quantize(values: &[f32]) -> Quantized<impl ExactSizeIterator<Item = i8>> {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / f32::from(i8::MAX);
    let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let integers = values.iter().map(move |value| (value * factor).round_ties_even() as i8);
    Quantized { scale, integers }
}

pub(super) fn write_floats(kind: KvType, place: &mut [u8], values: &[f32]) {
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

/// Bytes of one page.
pub(super) fn page_bytes(shape: &CacheShape, kind: KvType) -> u64 {
    let offsets = offsets(shape);
    let end = offsets.last().expect("a place behind all layers");
    let elements = end.first_element * kind.element_bytes() + end.first_row * kind.scale_bytes();
    let entries = shape.entries.iter().map(|shape| compressed_kv::page_bytes(*shape, kind));
    elements as u64 + Indexes::of(shape).bytes(kind) as u64 + entries.sum::<u64>()
}

impl Cache {
    /// A sequence that begins with full pages.
    pub(super) fn new(shape: &CacheShape, kind: KvType, pages: &[Arc<Page>]) -> Self {
        let lens = vec![pages.len() * TOKENS_PER_PAGE; shape.layers.len() + shape.indexes];
        let states = vec![State::default(); shape.states];
        let (offsets, indexes) = (offsets(shape).into(), Indexes::of(shape));
        let pending = |(layer, shape): (usize, &CompressedKvShape)| {
            Pending::new(*shape, pages.len(), pages.last().map(|page| &page.entries[layer]))
        };
        let pending = shape.entries.iter().enumerate().map(pending).collect();
        Self { offsets, indexes, kind, lens, pages: pages.to_vec(), pending, states }
    }

    /// The state of linear attention in a layer.
    pub(super) fn state(&mut self, layer: usize) -> &mut State {
        &mut self.states[layer]
    }

    /// A full page.
    pub(super) fn page(&self, index: usize) -> Arc<Page> {
        let lens = self.lens.iter().copied().chain(self.pending.iter().map(Pending::len));
        let full = lens.min().is_none_or(|len| len >= (index + 1) * TOKENS_PER_PAGE);
        assert!(full, "page {index} is not full");
        match self.pages.get(index) {
            Some(page) => Arc::clone(page),
            // Of a rank that attends to nothing.
            None => Arc::new(self.new_page(index)),
        }
    }

    fn new_page(&self, index: usize) -> Page {
        let entries = self.pending.iter().map(|pending| pending.shape);
        Page::new(&self.offsets, self.indexes, entries, self.kind, index)
    }

    /// Makes pages for so many tokens.
    pub(super) fn make_room(&mut self, tokens: usize) {
        while self.pages.len() * TOKENS_PER_PAGE < tokens {
            self.pages.push(Arc::new(self.new_page(self.pages.len())));
        }
    }

    /// The entries of a layer.
    pub(super) fn entry_shape(&self, layer: usize) -> CompressedKvShape {
        self.pending[layer].shape
    }

    /// The pages with room for `rows` more of a layer or an index, and the first's position.
    fn grow(&mut self, len: usize, rows: usize) -> usize {
        let first = self.lens[len];
        self.lens[len] += rows;
        self.make_room(self.lens[len]);
        first
    }

    /// The page of a position that was not there yet.
    pub(super) fn own_page(&mut self, position: usize) -> &mut Page {
        let page = Arc::get_mut(&mut self.pages[position / TOKENS_PER_PAGE]);
        page.expect("a page that is not full belongs to one sequence")
    }

    /// Where the tokens of an index stand among those of all layers.
    const fn index_len(&self, index: usize) -> usize {
        self.lens.len() - self.indexes.count + index
    }

    /// Appends keys `[rows, index_width]` to an index and returns the position of the first.
    pub(super) fn append_index(&mut self, index: usize, k: &[f32]) -> usize {
        let width = self.indexes.width;
        assert!(k.len().is_multiple_of(width), "keys of {width}");
        let first = self.grow(self.index_len(index), k.len() / width);
        for (position, k) in (first..).zip(k.chunks_exact(width)) {
            self.own_page(position).write_index(index, position % TOKENS_PER_PAGE, k);
        }
        first
    }

    /// Blocks of keys of an index.
    pub(super) fn index(&self, index: usize) -> Vec<Floats<'_>> {
        let used = self.lens[self.index_len(index)].div_ceil(TOKENS_PER_PAGE);
        self.pages[..used].iter().map(|page| page.index(index)).collect()
    }

    /// Appends `rows` keys and values `[rows, kv_heads, head_dim]` to a layer and returns the
    /// position of the first.
    pub(super) fn append(&mut self, layer: usize, k: &[f32], v: &[f32], rows: usize) -> usize {
        let LayerShape { kv_heads, head_dim } = self.offsets[layer].shape;
        assert_eq!(k.len(), rows * kv_heads * head_dim, "keys of {rows} rows");
        assert_eq!(v.len(), k.len(), "values of {rows} rows");
        let (first, place) = (self.grow(layer, rows), self.offsets[layer]);
        for row in 0..rows {
            let position = first + row;
            let page = self.own_page(position);
            for head in 0..kv_heads {
                let span =
                    (row * kv_heads + head) * head_dim..(row * kv_heads + head + 1) * head_dim;
                let token = position % TOKENS_PER_PAGE;
                page.write(layer, place.first(head, Part::Keys), Row::Key(token), &k[span.clone()]);
                if place.parts == 2 {
                    page.write(layer, place.first(head, Part::Values), Row::Value(token), &v[span]);
                }
            }
        }
        first
    }

    /// Rolls back the last rows of all layers. Their memory stays, for those that come instead.
    pub(super) fn roll_back(&mut self, rows: usize) {
        for state in &mut self.states {
            state.roll_back(rows);
        }
        for pending in &mut self.pending {
            pending.roll_back(rows);
        }
        for len in &mut self.lens {
            *len = len.checked_sub(rows).expect("rows that were appended");
        }
    }

    /// How the keys and values of a layer lie.
    pub(super) fn order(&self, layer: usize) -> Order {
        self.offsets[layer].order
    }

    /// The heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> Blocks<'_> {
        let place = self.offsets[layer];
        let used = self.lens[layer].div_ceil(TOKENS_PER_PAGE);
        let blocks = |head: usize, part| -> Vec<KvBlock<'_>> {
            let first = place.first(head, part);
            let rows = first..first + TOKENS_PER_PAGE;
            let pages = self.pages[..used].iter();
            pages.map(|page| page.block(layer, rows.clone())).collect()
        };
        let head = |head| [blocks(head, Part::Keys), blocks(head, Part::Values)];
        Blocks((0..place.shape.kv_heads).map(head).collect())
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

    /// Of both layers, unlike on purpose: the first lies in rows, the second in lanes.
    const SHAPES: [LayerShape; 2] =
        [LayerShape { kv_heads: 3, head_dim: 8 }, LayerShape { kv_heads: 2, head_dim: 96 }];

    const WITHOUT_INDEX: CacheShape = CacheShape {
        layers: Vec::new(),
        states: 0,
        keys_are_values: false,
        indexes: 0,
        index_width: 0,
        entries: Vec::new(),
    };

    /// One head of latents in each of two layers, and an index.
    fn indexed() -> CacheShape {
        CacheShape {
            layers: vec![LayerShape { kv_heads: 1, head_dim: 8 }; 2],
            states: 0,
            keys_are_values: true,
            indexes: 1,
            index_width: 16,
            entries: Vec::new(),
        }
    }

    fn shape() -> CacheShape {
        CacheShape { layers: SHAPES.to_vec(), ..WITHOUT_INDEX }
    }

    fn rows(layer: usize, first: usize, count: usize) -> Vec<f32> {
        let width = SHAPES[layer].kv_heads * SHAPES[layer].head_dim;
        (first * width..(first + count) * width).map(|i| (i as f32 * 0.713).sin() * 3.0).collect()
    }

    /// The elements of a layer's blocks, row by row.
    fn read(cache: &Cache, layer: usize) -> Vec<Vec<f32>> {
        let width = SHAPES[layer].head_dim;
        let together = match cache.kind {
            KvType::F32 | KvType::F16 => 1,
            KvType::Bf16 => TOGETHER_BF16,
            KvType::Q8 => TOGETHER_Q8,
        };
        let row_by_row = |part: fn(usize) -> Row, block: &KvBlock<'_>| -> Vec<f32> {
            let mut offsets = vec![0; TOKENS_PER_PAGE * width];
            for token in 0..TOKENS_PER_PAGE {
                let elements = token * width..(token + 1) * width;
                cache.order(layer).put(part(token), together, elements, &mut offsets);
            }
            let (floats, scales) = match block {
                KvBlock::Floats(floats) => (floats.to_vec(), [1.0; TOKENS_PER_PAGE].as_slice()),
                KvBlock::Q8 { values, scales } => {
                    (values.iter().map(|value| f32::from(*value)).collect(), *scales)
                }
            };
            let mut rows = vec![0.0; TOKENS_PER_PAGE * width];
            for (place, value) in offsets.iter().zip(floats) {
                rows[*place] = value * scales[place / width];
            }
            rows
        };
        let part = |part, blocks: &[KvBlock<'_>]| {
            blocks.iter().flat_map(|block| row_by_row(part, block)).collect()
        };
        let blocks = cache.heads(layer);
        let heads = blocks.0.iter();
        heads.flat_map(|[keys, values]| [part(Row::Key, keys), part(Row::Value, values)]).collect()
    }

    fn fill(kind: KvType, pages: &[Arc<Page>], chunks: &[usize]) -> Cache {
        let mut cache = Cache::new(&shape(), kind, pages);
        let mut at = pages.len() * TOKENS_PER_PAGE;
        for count in chunks {
            for layer in 0..SHAPES.len() {
                let k = rows(layer, at, *count);
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
            for layer in 0..SHAPES.len() {
                assert_eq!(read(&whole, layer), read(&second, layer), "{kind:?}");
            }
            drop(first);
            assert_eq!(read(&whole, 1), read(&second, 1), "{kind:?}");
        }
    }

    #[test]
    fn rolled_back_rows_leave_nothing_behind() {
        for kind in [KvType::F32, KvType::Bf16, KvType::Q8] {
            let whole = fill(kind, &[], &[600]);
            let mut cache = fill(kind, &[], &[250]);
            for (layer, shape) in SHAPES.iter().enumerate() {
                let wrong = vec![9.0; 20 * shape.kv_heads * shape.head_dim];
                cache.append(layer, &wrong, &wrong, 20);
            }
            cache.roll_back(20);
            for layer in 0..SHAPES.len() {
                let k = rows(layer, 250, 350);
                let v: Vec<f32> = k.iter().map(|k| k * 2.0 + layer as f32).collect();
                assert_eq!(cache.append(layer, &k, &v, 350), 250);
                assert_eq!(read(&whole, layer), read(&cache, layer), "{kind:?}");
            }
        }
    }

    #[test]
    fn stored_elements_are_as_close_as_their_type() {
        for (kind, tolerance) in [
            (KvType::F32, 0.0),
            (KvType::F16, 7.0 * 2.0_f32.powi(-11)),
            (KvType::Bf16, 7.0 * 2.0_f32.powi(-8)),
            // Half a step of the largest magnitude's 127th part.
            (KvType::Q8, 7.0 / 127.0 / 2.0 + 1e-6),
        ] {
            let all = |kind| {
                let cache = fill(kind, &[], &[300]);
                [read(&cache, 0).concat(), read(&cache, 1).concat()].concat()
            };
            let (found, exact) = (all(kind), all(KvType::F32));
            let pairs = found.iter().zip(&exact);
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
                let mut cache = Cache::new(&indexed(), kind, pages);
                let mut at = pages.len() * TOKENS_PER_PAGE;
                for count in chunks {
                    assert_eq!(cache.append_index(0, &keys(at..at + count)), at);
                    for layer in 0..2 {
                        let k = &rows(0, at, *count)[..count * 8];
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
        let nothing = CacheShape { layers: Vec::new(), indexes: 0, ..indexed() };
        let cache = Cache::new(&nothing, KvType::F32, &[]);
        let again = Cache::new(&nothing, KvType::F32, &[cache.page(0), cache.page(1)]);
        assert_eq!(again.page(1).elements.bytes().len(), 0);
        assert_eq!(page_bytes(&nothing, KvType::F32), 0);
    }

    #[test]
    fn pages_are_as_large_as_they_say() {
        let f32_bytes = (3 * 8 + 2 * 96) * 2 * 256 * 4;
        assert_eq!(page_bytes(&shape(), KvType::F32), f32_bytes);
        assert_eq!(page_bytes(&shape(), KvType::Bf16), f32_bytes / 2);
        assert_eq!(page_bytes(&shape(), KvType::Q8), f32_bytes / 4 + (3 + 2) * 2 * 256 * 4);
        assert_eq!(page_bytes(&indexed(), KvType::F32), 256 * (2 * 8 + 16) * 4);
        assert_eq!(page_bytes(&indexed(), KvType::Q8), 256 * (2 * (8 + 4) + 16 * 2));
    }
}
