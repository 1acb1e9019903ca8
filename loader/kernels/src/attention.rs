//! Causal attention over cached keys and values.
//!
//! Keys are taken in fixed blocks of 256 counted from position 0, with a running maximum and
//! sum (online softmax), so the order of summation depends on a query's position and window
//! alone. The cache is stored in the same blocks. Within one they lie row by row, or with every
//! key in a SIMD lane of its own ([`Order`]): the layout decides the order of summation.
//!
//! Products and their sums are fused: an element is rounded once, with the same bits wherever it
//! is computed.

use std::{iter, ops::Range};

use shardpack_quantize::Platform;

use crate::{Floats, team};

mod block;
mod block_sparse;
mod heads;
mod indexer;
mod integers;
mod keys;
mod kv_layout;
mod kv_types;
mod lane_products;
mod lane_types;
mod prefetch;
mod queries;
mod softmax;
mod values;
mod vectors;

use heads::{Heads, HeadsInput, ROWS_AT_ONCE};
pub use indexer::{Index, largest};
pub use kv_layout::{Order, Row, TOGETHER_BF16, TOGETHER_Q8};
pub(crate) use vectors::{Plain, Vectors};

/// Keys of one block.
pub const KEYS_PER_BLOCK: usize = 256;

/// Keys and values of one key-value head of one sequence. Every block but the last has
/// [`KEYS_PER_BLOCK`] keys; what a block holds beyond the sequence's end makes no difference.
#[derive(Clone, Copy, Debug)]
pub struct KvHead<'a> {
    /// Blocks of keys.
    pub keys: &'a [KvBlock<'a>],
    /// Blocks of values.
    pub values: &'a [KvBlock<'a>],
}

/// Keys or values as they are cached, in the layout that the [`Attention`] names.
#[derive(Clone, Copy, Debug)]
pub enum KvBlock<'a> {
    /// Floats.
    Floats(Floats<'a>),
    /// Each row as integers times the row's scale. Where rows are whole numbers of 32 integers,
    /// queries and weights are rounded to 16 bits.
    Q8 {
        /// Integers, as many for each key as the head is wide.
        values: &'a [i8],
        /// One for each key.
        scales: &'a [f32],
    },
}

/// The key blocks that queries attend to in block-sparse attention.
#[derive(Clone, Copy, Debug)]
pub struct ChosenBlocks<'a> {
    /// Keys of a block, counted from position 0: a divisor of [`KEYS_PER_BLOCK`].
    pub keys: usize,
    /// For each query and, within it, each entry of [`Attention::heads`] its blocks in ascending
    /// order; all where there is no list.
    pub blocks: &'a [Option<Vec<u32>>],
}

/// Attention of one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q · k`.
    pub scale: f32,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// For each query head one more score, which only enlarges the softmax's denominator.
    pub sinks: Option<&'a [f32]>,
    /// A query sees keys with `query − key < window`; all up to its own if absent.
    pub window: Option<u32>,
    /// A query sees keys of its own chunk: `query / chunk = key / chunk`; of all if absent.
    pub chunk: Option<u32>,
    /// Block-sparse attention: a query sees the keys of its selected blocks; of all if absent.
    pub chosen: Option<ChosenBlocks<'a>>,
    /// The entry of `heads` that each query head reads.
    pub q_to_kv: &'a [usize],
    /// The KV layout.
    pub order: Order,
    /// Cached keys and values, those of the queries' own positions included.
    pub heads: &'a [KvHead<'a>],
    /// Position of the first query.
    pub first_position: usize,
}

/// Attention of `q` `[queries, heads, head_dim]` at consecutive positions, to `out` of the same
/// shape.
pub fn attend(q: &[f32], attention: &Attention<'_>, out: &mut [f32]) {
    let head_dim = attention.head_dim;
    let width = attention.q_to_kv.len() * head_dim;
    assert_eq!(q.len(), out.len(), "queries and results");
    if q.is_empty() {
        return;
    }
    assert!(q.len().is_multiple_of(width), "queries of {width} elements");
    let sinks = attention.sinks.map_or(attention.q_to_kv.len(), <[f32]>::len);
    assert_eq!(sinks, attention.q_to_kv.len(), "one sink per query head");
    let keys = attention.first_position + q.len() / width;
    for head in attention.heads {
        assert_eq!(head.keys.len(), keys.div_ceil(KEYS_PER_BLOCK), "blocks of keys");
        assert_eq!(head.values.len(), head.keys.len(), "blocks of values");
    }
    if let Some(chosen) = attention.chosen {
        assert!(KEYS_PER_BLOCK.is_multiple_of(chosen.keys), "blocks of {} keys", chosen.keys);
        let lists = q.len() / width * attention.heads.len();
        assert_eq!(chosen.blocks.len(), lists, "selected blocks of every query for every head");
    }
    let on = team::current();
    let units = q.len() / head_dim;
    let heads = attention.q_to_kv.len();
    let (length, ranges) = if on.units_per_task(units, 4 * keys * head_dim) >= units {
        // Not worth the handing over.
        (units, iter::once(0..width).collect::<Vec<_>>())
    } else {
        let groups = groups(attention.q_to_kv, 0..heads);
        let columns = |heads: Range<usize>| heads.start * head_dim..heads.end * head_dim;
        (ROWS_AT_ONCE, groups.map(columns).collect())
    };
    team::parts(&on, out, width, (length, &ranges), |first_row, out| {
        let input = HeadsInput { q, attention, first_row };
        // Each platform's vectors run with its own instructions: `platform::run` would compile them
        // for every platform.
        match on.platform {
            #[cfg(target_arch = "x86_64")]
            Platform::Avx512 => {
                crate::avx512::run(Heads::<crate::avx512::Sixteen>::new(input, out));
            }
            #[cfg(target_arch = "x86_64")]
            Platform::Avx2 => {
                crate::avx2::run(Heads::<crate::avx2::Sixteen>::new(input, out));
            }
            #[cfg(target_arch = "aarch64")]
            Platform::Neon => {
                crate::neon::run(Heads::<crate::neon::Sixteen>::new(input, out));
            }
            _ => Plain::run(Heads::<Plain>::new(input, out)),
        }
    });
}

/// Query heads that are computed with a block of keys together; several groups for the threads remain where
/// all heads read the same keys.
const HEADS_AT_ONCE: usize = 8;

/// Runs of `heads` that read the same keys and values.
fn groups(q_to_kv: &[usize], heads: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut next = heads.start;
    iter::from_fn(move || {
        let first = next;
        while next < heads.end.min(first + HEADS_AT_ONCE) && q_to_kv[next] == q_to_kv[first] {
            next += 1;
        }
        (first < next).then_some(first..next)
    })
}

#[cfg(test)]
mod tests;
