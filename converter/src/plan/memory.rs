//! What a rank needs to run its package, against what its node has.

use std::ops::Range;

use serde::Serialize;
use shardpack_formats::{Mask, Normalised};
use shardpack_manifests::Layout;

use super::{NodeLimit, Nodes};

/// Bytes of a cached key or value: the engine keeps them in f32.
const CACHE_ELEMENT_BYTES: u64 = 4;

/// Prompt tokens that the engine runs in one step.
const STEP_TOKENS: u64 = 512;

/// Code, tokenizer, buffers of links, allocator.
const PROCESS_BYTES: u64 = 64 << 20;

/// What one rank needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// Name of the node, if it has one.
    pub node: Option<String>,
    /// Weights.
    pub weight_bytes: u64,
    /// Keys and values of one sequence of the planned context.
    pub cache_bytes: u64,
    /// Activations of one step, and the process itself.
    pub working_bytes: u64,
    /// What the node allows.
    pub limit_bytes: Option<u64>,
}

impl RankMemory {
    /// Everything together.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.weight_bytes + self.cache_bytes + self.working_bytes
    }

    /// Whether the node allows it.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.limit_bytes.is_none_or(|limit| self.total_bytes() <= limit)
    }
}

/// Memory of every rank, in rank order, at `context` tokens.
pub(super) fn of_ranks(
    normalised: &Normalised,
    layout: &Layout,
    weights: &[u64],
    nodes: &Nodes,
    context: u32,
) -> Vec<RankMemory> {
    let limit = |rank: usize| match nodes {
        Nodes::Equal(_) => None,
        Nodes::Limited(limits) => limits.get(rank),
    };
    let rank = |(rank, weight_bytes): (usize, &u64)| RankMemory {
        node: limit(rank).map(|limit| limit.name.clone()),
        weight_bytes: *weight_bytes,
        cache_bytes: cache(normalised, layout, rank as u32, context),
        working_bytes: working(normalised, layout, rank as u32),
        limit_bytes: limit(rank).map(|limit: &NodeLimit| limit.usable_bytes),
    };
    weights.iter().enumerate().map(rank).collect()
}

fn units(layout: &Layout, axis: &str, rank: u32) -> u64 {
    layout.axes.get(axis).map_or(0, |axis| {
        let units = axis.units(rank);
        (units.end - units.start) * axis.unit
    })
}

/// Keys and values of one sequence in the layers that a rank runs.
fn cache(normalised: &Normalised, layout: &Layout, rank: u32, context: u32) -> u64 {
    let layers = own_layers(normalised, layout, rank);
    layers.map(|layer| layer_cache(normalised, layout, (rank, layer), context)).sum()
}

/// For each layer what the ranks of a stage hold of one sequence, if all stages are cut alike.
pub(super) fn layer_caches(normalised: &Normalised, layout: &Layout, context: u32) -> Vec<u64> {
    let of_layer = |layer| {
        let ranks = layout.stage_ranks(0);
        ranks.map(|rank| layer_cache(normalised, layout, (rank, layer), context)).sum()
    };
    (0..normalised.spec.layers.len()).map(of_layer).collect()
}

/// Keys and values of one sequence in one layer.
fn layer_cache(
    normalised: &Normalised,
    layout: &Layout,
    (rank, layer): (u32, usize),
    context: u32,
) -> u64 {
    let width = match &normalised.spec.mla {
        None => units(layout, "kv", rank),
        // Every rank holds the latents of all heads.
        Some(mla) => u64::from(mla.kv_rank + mla.rope),
    };
    let tokens = match normalised.spec.layers[layer].mask {
        Mask::Full => u64::from(context),
        Mask::Sliding(window) => u64::from(context.min(window)),
    };
    tokens * 2 * width * CACHE_ELEMENT_BYTES
}

/// The layers that a rank runs.
fn own_layers(normalised: &Normalised, layout: &Layout, rank: u32) -> Range<usize> {
    let stage = layout.stages.of_rank(rank).map(|stage| &layout.stages[stage]);
    stage.map_or(0..normalised.spec.layers.len(), |stage| {
        stage.layers[0] as usize..stage.layers[1] as usize
    })
}

/// Activations of the widest step, in f32.
fn working(normalised: &Normalised, layout: &Layout, rank: u32) -> u64 {
    let spec = &normalised.spec;
    let hidden = 4 * u64::from(spec.hidden_size);
    let attention = 2 * units(layout, "q", rank) + 2 * units(layout, "kv", rank);
    let ffn = 2 * units(layout, "ffn", rank);
    let logits = 4 * u64::from(spec.vocab_size);
    STEP_TOKENS * (hidden + attention.max(ffn)) * 4 + logits * 4 + PROCESS_BYTES
}
