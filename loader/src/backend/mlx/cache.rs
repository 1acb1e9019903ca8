//! Keys and values of one sequence in MLX's arrays.
//!
//! A page is a copy: a sequence that begins with pages of another one is spared their
//! computation, but not their memory, since MLX's attention wants one array per sequence.

use shardpack_mlx::{Array, Element, Library};

use crate::backend::{CacheShape, TOKENS_PER_PAGE};

/// Keys and values of one sequence; grows by pages.
pub struct Cache {
    library: Library,
    shape: CacheShape,
    layers: Vec<LayerCache>,
    /// Of linear attention, by layer: the inputs of the last tokens and the memory.
    states: Vec<Option<[Array; 2]>>,
}

#[derive(Clone)]
struct LayerCache {
    /// Tokens held.
    len: usize,
    /// Keys and values `[1, kv_heads, capacity, head_dim]`; none before the first token.
    arrays: Option<[Array; 2]>,
}

/// [`TOKENS_PER_PAGE`] tokens in all layers: keys and values `[1, kv_heads, tokens, head_dim]`.
#[derive(Clone)]
pub struct Page {
    layers: Vec<[Array; 2]>,
}

/// Bytes of one page.
pub(super) const fn page_bytes(shape: &CacheShape) -> u64 {
    (shape.layers * shape.kv_heads * 2 * TOKENS_PER_PAGE * shape.head_dim * 4) as u64
}

impl Cache {
    pub(super) fn new(library: Library, shape: &CacheShape, pages: &[Page]) -> Self {
        let layer = |index: usize| {
            let part = |which: usize| {
                let all: Vec<&Array> =
                    pages.iter().map(|page| &page.layers[index][which]).collect();
                library.concat(&all, 2)
            };
            let arrays = (!pages.is_empty()).then(|| [part(0), part(1)]);
            LayerCache { len: pages.len() * TOKENS_PER_PAGE, arrays }
        };
        let layers = (0..shape.layers).map(layer).collect();
        Self { library, shape: *shape, layers, states: vec![None; shape.states] }
    }

    /// A full page.
    pub(super) fn page(&self, index: usize) -> Page {
        let (start, stop) = (index * TOKENS_PER_PAGE, (index + 1) * TOKENS_PER_PAGE);
        let cut = |layer: &LayerCache| {
            assert!(layer.len >= stop, "page {index} is not full");
            let arrays = layer.arrays.as_ref().expect("a layer with tokens has arrays");
            arrays.each_ref().map(|array| array.slice(2, start, stop))
        };
        Page { layers: self.layers.iter().map(cut).collect() }
    }

    /// Appends keys and values `[1, kv_heads, rows, head_dim]` to a layer and returns all of
    /// them with the position of the first new one.
    pub(super) fn append(
        &mut self,
        layer: usize,
        new: [Array; 2],
        rows: usize,
    ) -> ([Array; 2], usize) {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        let library = self.library;
        let layer = &mut self.layers[layer];
        let (first, len) = (layer.len, layer.len + rows);
        let held = layer.arrays.take();
        let capacity = held.as_ref().map_or(0, |[keys, _]| keys.shape()[2]);
        let wanted = len.next_multiple_of(TOKENS_PER_PAGE);
        let grown = |held: Option<Array>| {
            if capacity >= wanted {
                return held.expect("an array with room");
            }
            let room = [1, kv_heads, wanted - capacity, head_dim];
            let room = library.full(0.0, Element::F32, &room);
            match held {
                Some(held) => library.concat(&[&held, &room], 2),
                None => room,
            }
        };
        let (keys, values) = match held {
            Some([keys, values]) => (Some(keys), Some(values)),
            None => (None, None),
        };
        let [new_keys, new_values] = new;
        let keys = grown(keys).with_slice(2, first, len, &new_keys);
        let values = grown(values).with_slice(2, first, len, &new_values);
        let all = [keys.slice(2, 0, len), values.slice(2, 0, len)];
        layer.len = len;
        layer.arrays = Some([keys, values]);
        (all, first)
    }

    /// A layer's state of linear attention; none before the first token.
    pub(super) fn state(&mut self, layer: usize) -> &mut Option<[Array; 2]> {
        &mut self.states[layer]
    }

    /// Every array, for evaluation.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let layers = self.layers.iter().filter_map(|layer| layer.arrays.as_ref()).flatten();
        layers.chain(self.states.iter().flatten().flatten())
    }
}
