//! The KV cache: what a sequence keeps from step to step on one rank.

use shardpack_formats::memory::KvType;

use super::Tensors;

/// Caches of sequences, and their pages.
pub trait KvCache: Tensors {
    /// Keys, values and states of one sequence in all layers; grows with it.
    type Cache: Send;
    /// A handle to a full page of a cache,
    /// [`TOKENS_PER_PAGE`](shardpack_formats::memory::TOKENS_PER_PAGE) tokens in all layers; cheap to
    /// clone. The page lives as long as a cache or a handle holds it.
    type Page: Clone + Send + Sync;

    /// The cache of a sequence that begins with the tokens of `pages`; empty without pages.
    fn cache(&self, shape: &CacheShape, pages: &[Self::Page]) -> Self::Cache;

    /// A page of a cache, counted from the sequence's beginning, which has to be full.
    fn page(&self, cache: &Self::Cache, index: usize) -> Self::Page;

    /// Memory of one page.
    fn page_bytes(&self, shape: &CacheShape) -> u64;

    /// How often the memory of a page is taken: once, or once more by a handle to it.
    fn page_copies(&self) -> u64 {
        1
    }

    /// How keys and values are stored; the same on all ranks.
    fn kv_type(&self) -> KvType;

    /// How draft tokens are rolled back; none where a step must not have any.
    fn kv_rollback(&self) -> Option<&dyn KvRollback<Self::Cache>> {
        None
    }
}

/// KV rollback, of backends that compute every row as if it were alone, bit for bit: draft tokens
/// then never change a token.
pub trait KvRollback<Cache> {
    /// Removes the last `rows` that the latest step has appended to a cache, none of them in a page
    /// that was handed out; called after every step in which the cache's sequence had drafts, also
    /// with zero rows.
    fn roll_back(&self, cache: &mut Cache, rows: usize);
}

/// What one sequence caches on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers that keep keys and values.
    pub layers: Vec<LayerShape>,
    /// Layers that keep a state: linear attention and short convolutions.
    pub states: usize,
    /// Whether keys serve as values too, which are not kept then (MLA, compressed KV).
    pub keys_are_values: bool,
    /// Layers that keep the keys of an indexer besides.
    pub indexes: usize,
    /// Width of an indexer's key.
    pub index_width: usize,
    /// Layers that keep compressed KV entries besides.
    pub entries: Vec<CompressedKvShape>,
}

/// Keys and values of one token in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Key-value heads held here.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Compressed KV entries of one layer, each of several tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedKvShape {
    /// Tokens per entry, a divisor of
    /// [`TOKENS_PER_PAGE`](shardpack_formats::memory::TOKENS_PER_PAGE).
    pub ratio: usize,
    /// Width of an entry.
    pub width: usize,
    /// Width of the indexer's keys; 0 where all entries are attended to. Entries with an indexer
    /// cover the tokens of the entry before theirs too.
    pub key_width: usize,
}

impl CompressedKvShape {
    /// Whether an entry also covers the tokens of the entry before it.
    #[must_use]
    pub const fn overlaps(&self) -> bool {
        self.key_width > 0
    }

    /// Width of a part.
    #[must_use]
    pub const fn width(&self, part: CompressedKvPart) -> usize {
        match part {
            CompressedKvPart::Entries => self.width,
            CompressedKvPart::Keys => self.key_width,
        }
    }

    /// Projected values `c` of a token, and as many gates `z`: where entries overlap, those for
    /// the next entry come first.
    #[must_use]
    pub const fn columns(&self, part: CompressedKvPart) -> usize {
        self.width(part) * if self.overlaps() { 2 } else { 1 }
    }
}

/// What a compressor makes of several tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressedKvPart {
    /// Compressed KV entries, which are keys and values.
    Entries = 0,
    /// The indexer's keys.
    Keys = 1,
}
