//! Keys and values of one sequence in MLX's arrays.
//!
//! A page is a copy, made when it is handed out: a sequence that begins with pages of another one is
//! spared their computation, but not their memory, since MLX's attention wants one array per
//! sequence. A slice in its place would keep the whole cache that it is cut from, and a cache that
//! has another holder is copied with every step.
//!
//! Sequences of equal capacity that decode in the same steps share one array, so that they attend
//! with one call. They are copied into it when they come together, and out of it when they part.

use std::sync::atomic::{AtomicU64, Ordering};

use shardpack_formats::memory::{KvType, TOKENS_PER_PAGE};
use shardpack_mlx::{Array, Element, Library};

use super::{
    Mlx,
    compressed_kv::{self, CompressedKvPage, Entries},
};
use crate::backend::{CacheShape, CompressedKvShape, KvCache};

impl KvCache for Mlx {
    type Cache = Cache;
    type Page = Page;

    fn cache(&self, shape: &CacheShape, pages: &[Page]) -> Cache {
        self.pool.install(|| Cache::new(self.library, self.element(), shape, pages))
    }

    fn page(&self, cache: &Cache, index: usize) -> Page {
        self.pool.install(|| {
            let page = cache.page(index);
            // An array that cannot be computed now says so again where it is read.
            let _ = self.library.eval(&page.arrays().collect::<Vec<_>>());
            page
        })
    }

    fn page_copies(&self) -> u64 {
        2
    }

    fn page_bytes(&self, shape: &CacheShape) -> u64 {
        page_bytes(shape, self.element())
    }

    fn kv_type(&self) -> KvType {
        self.kv
    }
}

/// Keys and values of one sequence; grows by pages.
#[derive(Clone)]
pub struct Cache {
    /// Of keys and values, those of indexes among them.
    element: Element,
    keys_are_values: bool,
    layers: Vec<LayerCache>,
    /// Keys of indexes, `[1, 1, capacity, index_width]`.
    indexes: Vec<LayerCache>,
    /// Of the layers with entries.
    pub(super) entries: Vec<Entries>,
    /// By layer: the inputs of the last tokens and, of linear attention, the memory; none before the
    /// first token.
    states: Vec<Vec<Array>>,
}

/// Keys and values `[1, kv_heads, keys, head_dim]` of some tokens of a layer.
pub(super) struct Held {
    pub(super) keys: Array,
    pub(super) values: Array,
    /// Theirs.
    pub(super) element: Element,
}

/// What a cache holds after rows were appended.
pub(super) struct Appended<T> {
    pub(super) all: T,
    /// Position of the first new row.
    pub(super) first: usize,
}

impl Held {
    /// The same of both.
    pub(super) fn map(&self, work: impl Fn(&Array) -> Array) -> Self {
        Self { keys: work(&self.keys), values: work(&self.values), element: self.element }
    }
}

/// Keys and values `[sequences, kv_heads, keys, head_dim]` of several sequences, after a row was
/// appended to each.
pub(super) struct HeldTogether {
    pub(super) all: Held,
    /// Positions of the new rows.
    pub(super) firsts: Vec<usize>,
}

#[derive(Clone, Default)]
struct LayerCache {
    /// Tokens held.
    len: usize,
    /// Keys and values `[slots, kv_heads, capacity, head_dim]`, keys alone where they are values;
    /// none before the first token.
    arrays: Vec<Array>,
    /// The sequence's place in arrays that several share.
    slot: Option<Slot>,
}

/// A sequence's place in shared arrays.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Slot {
    /// Number of the arrays.
    shared: u64,
    index: usize,
    /// Slots of the arrays.
    of: usize,
}

/// Shared arrays that were made.
static SHARED: AtomicU64 = AtomicU64::new(0);

/// [`TOKENS_PER_PAGE`] tokens in all layers and then in all indexes: keys and values
/// `[1, kv_heads, tokens, head_dim]`.
#[derive(Clone)]
pub struct Page {
    layers: Vec<Vec<Array>>,
    entries: Vec<CompressedKvPage>,
}

/// What keys and values are stored as, where MLX has it.
pub(super) const fn element(kind: KvType) -> Option<Element> {
    match kind {
        KvType::F32 => Some(Element::F32),
        KvType::F16 => Some(Element::F16),
        KvType::Bf16 => Some(Element::Bf16),
        KvType::Q8 => None,
    }
}

/// Bytes of one page.
pub(super) fn page_bytes(shape: &CacheShape, element: Element) -> u64 {
    let parts = if shape.keys_are_values { 1 } else { 2 };
    let elements: usize = shape.layers.iter().map(|layer| layer.kv_heads * layer.head_dim).sum();
    let elements = elements * parts + shape.indexes * shape.index_width;
    let elements = elements * TOKENS_PER_PAGE * element.size_bytes();
    let entries = shape.entries.iter().map(|shape| compressed_kv::page_bytes(*shape));
    elements as u64 + entries.sum::<u64>()
}

impl LayerCache {
    /// One that begins with pages of the same layer.
    fn begun(library: Library, pages: &[&[Array]]) -> Self {
        let parts = pages.first().map_or(0, |page| page.len());
        let joined = |part: usize| {
            let all: Vec<&Array> = pages.iter().map(|page| &page[part]).collect();
            library.concat(&all, 2)
        };
        let arrays = (0..parts).map(joined).collect();
        Self { len: pages.len() * TOKENS_PER_PAGE, arrays, slot: None }
    }

    /// Tokens that there is room for once so many more are held.
    const fn capacity_with(&self, rows: usize) -> usize {
        (self.len + rows).next_multiple_of(TOKENS_PER_PAGE)
    }

    /// The sequence's arrays, by themselves.
    fn own(&self) -> Vec<Array> {
        let Some(Slot { index, .. }) = self.slot else { return self.arrays.clone() };
        self.arrays.iter().map(|array| array.slice(0, index, index + 1)).collect()
    }

    /// The same; nothing else holds them, unless other sequences do.
    fn take(&mut self) -> Vec<Array> {
        let own = self.own();
        self.arrays.clear();
        self.slot = None;
        own
    }

    /// Takes the arrays that these sequences share with each other and nobody else, and their
    /// number; none where they do not.
    fn take_shared(caches: &mut [&mut Self]) -> Option<(u64, Vec<Array>)> {
        let shared = caches[0].slot?.shared;
        let of = caches.len();
        let place = |index| Slot { shared, index, of };
        if !caches.iter().enumerate().all(|(index, cache)| cache.slot == Some(place(index))) {
            return None;
        }
        let arrays = std::mem::take(&mut caches[0].arrays);
        for cache in caches.iter_mut() {
            cache.arrays.clear();
        }
        Some((shared, arrays))
    }

    /// Appends a row to each of several sequences of equal capacity, `[sequences, heads, 1, width]`
    /// of each part, rounded, and returns all of each part, `[sequences, heads, capacity, width]`.
    fn append_together(caches: &mut [&mut Self], element: Element, new: &[Array]) -> Vec<Array> {
        let capacity = caches[0].capacity_with(1);
        let library = new[0].library();
        let (shared, held) = Self::take_shared(caches).unwrap_or_else(|| {
            let own: Vec<Vec<Array>> = caches.iter_mut().map(|cache| cache.take()).collect();
            let part = |part: usize| {
                let all: Vec<Array> = own
                    .iter()
                    .map(|own| grown(own.get(part), capacity, element, &new[part]))
                    .collect();
                library.concat(&all.iter().collect::<Vec<_>>(), 0)
            };
            (SHARED.fetch_add(1, Ordering::Relaxed), (0..new.len()).map(part).collect())
        });
        let of = caches.len();
        let places: Vec<u32> = caches.iter().map(|cache| cache.len as u32).collect();
        let entries: Vec<u32> = (0..of as u32).collect();
        let [entries, places] = [entries, places].map(|all| library.indices(&all, &[of]));
        let arrays: Vec<Array> = (held.into_iter().zip(new))
            .map(|(held, new)| {
                let held = grown(Some(&held), capacity, element, new);
                held.with_rows([&entries, &places], &new.cast(element))
            })
            .collect();
        for (index, cache) in caches.iter_mut().enumerate() {
            cache.len += 1;
            cache.arrays.clone_from(&arrays);
            cache.slot = Some(Slot { shared, index, of });
        }
        arrays
    }

    /// Appends rows `[1, heads, rows, width]` of each part, rounded, and returns all of each.
    fn append(&mut self, element: Element, new: &[Array]) -> Appended<Vec<Array>> {
        let rows = new[0].shape()[2];
        let (first, len, capacity) = (self.len, self.len + rows, self.capacity_with(rows));
        let mut held = self.take().into_iter();
        for new in new {
            let grown = grown(held.next().as_ref(), capacity, element, new);
            self.arrays.push(grown.with_slice(2, first, len, &new.cast(element)));
        }
        self.len = len;
        Appended { all: self.arrays.iter().map(|array| array.slice(2, 0, len)).collect(), first }
    }

    /// The tokens of a full page.
    fn page(&self, index: usize) -> Vec<Array> {
        let (start, stop) = (index * TOKENS_PER_PAGE, (index + 1) * TOKENS_PER_PAGE);
        assert!(self.len >= stop, "page {index} is not full");
        self.own().iter().map(|array| array.slice(2, start, stop).contiguous()).collect()
    }
}

/// What is held, `[sequences, heads, keys, width]`, with room for `capacity` keys; `new` are rows
/// to come, of the same sequences or one.
fn grown(held: Option<&Array>, capacity: usize, element: Element, new: &Array) -> Array {
    let [_, heads, _, width] = new.shape()[..] else {
        unreachable!("rows of heads have four axes")
    };
    let [sequences, keys] = held.map_or([1, 0], |held| [held.shape()[0], held.shape()[2]]);
    let room = || new.library().full(0.0, element, &[sequences, heads, capacity - keys, width]);
    match held {
        Some(held) if keys >= capacity => held.clone(),
        Some(held) => new.library().concat(&[held, &room()], 2),
        None => room(),
    }
}

impl Page {
    /// Every array, for evaluation.
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let entries = self.entries.iter().flat_map(CompressedKvPage::arrays);
        self.layers.iter().flatten().chain(entries)
    }
}

impl Cache {
    pub(super) fn new(
        library: Library,
        element: Element,
        shape: &CacheShape,
        pages: &[Page],
    ) -> Self {
        let layer = |index: usize| {
            let pages: Vec<_> = pages.iter().map(|page| page.layers[index].as_slice()).collect();
            LayerCache::begun(library, &pages)
        };
        let layers = (0..shape.layers.len()).map(layer).collect();
        let indexes = (shape.layers.len()..shape.layers.len() + shape.indexes).map(layer).collect();
        let states = vec![Vec::new(); shape.states];
        let entries = |(layer, shape): (usize, &CompressedKvShape)| {
            let pages: Vec<_> = pages.iter().map(|page| &page.entries[layer]).collect();
            Entries::begun(library, *shape, &pages)
        };
        let entries = shape.entries.iter().enumerate().map(entries).collect();
        let keys_are_values = shape.keys_are_values;
        Self { element, keys_are_values, layers, indexes, entries, states }
    }

    /// A full page.
    pub(super) fn page(&self, index: usize) -> Page {
        let all = self.layers.iter().chain(&self.indexes);
        Page {
            layers: all.map(|layer| layer.page(index)).collect(),
            entries: self.entries.iter().map(|entries| entries.page(index)).collect(),
        }
    }

    /// Appends keys and values `[1, kv_heads, rows, head_dim]` to a layer and returns all of
    /// them.
    pub(super) fn append(&mut self, layer: usize, new: &[Array; 2]) -> Appended<Held> {
        let (layer, element) = (&mut self.layers[layer], self.element);
        let parts = if self.keys_are_values { 1 } else { 2 };
        let Appended { all, first } = layer.append(element, &new[..parts]);
        let [keys, values] = [&all[0], &all[parts - 1]].map(Array::clone);
        Appended { all: Held { keys, values, element }, first }
    }

    /// Tokens that a layer has room for once so many more are held.
    pub(super) fn capacity_with(&self, layer: usize, rows: usize) -> usize {
        self.layers[layer].capacity_with(rows)
    }

    /// Appends a row to a layer of each of these sequences, which have equal capacity: keys and
    /// values `[sequences, kv_heads, 1, head_dim]`.
    pub(super) fn append_together(
        caches: &mut [&mut Self],
        sequences: &[usize],
        layer: usize,
        new: &[Array; 2],
    ) -> HeldTogether {
        let Self { element, keys_are_values, .. } = *caches[sequences[0]];
        let parts = if keys_are_values { 1 } else { 2 };
        let those = caches.iter_mut().enumerate().filter(|(index, _)| sequences.contains(index));
        let mut layers: Vec<_> = those.map(|(_, cache)| &mut cache.layers[layer]).collect();
        let firsts = layers.iter().map(|layer| layer.len).collect();
        let all = LayerCache::append_together(&mut layers, element, &new[..parts]);
        let [keys, values] = [&all[0], &all[parts - 1]].map(Array::clone);
        HeldTogether { all: Held { keys, values, element }, firsts }
    }

    /// Appends keys `[1, 1, rows, index_width]` of an indexer and returns all of them.
    pub(super) fn append_index(&mut self, index: usize, keys: Array) -> Appended<Array> {
        let Appended { mut all, first } = self.indexes[index].append(self.element, &[keys]);
        Appended { all: all.remove(0), first }
    }

    /// A layer's state; none before the first token.
    pub(super) fn state(&mut self, layer: usize) -> &mut Vec<Array> {
        &mut self.states[layer]
    }

    /// Every array, for evaluation.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let layers = self.layers.iter().chain(&self.indexes).flat_map(|layer| &layer.arrays);
        let entries = self.entries.iter().flat_map(Entries::arrays);
        layers.chain(entries).chain(self.states.iter().flatten())
    }
}
