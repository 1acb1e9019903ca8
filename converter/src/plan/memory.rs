//! The memory that a rank needs to run its package, compared with what its node has.
//!
//! Counted as the engine allocates: pages of keys and values in every layer that attends, states
//! of linear attention, and the activations that a step holds at the same time, layer kind by
//! layer kind. `shardpack bench` prints the same figure beside what the system says.

mod blocks;
mod compressed;

use std::ops::Range;

use serde::Serialize;
use shardpack_formats::{
    Spec,
    memory::{KvType, MIN_KV_BYTES, PREFILL_TOKENS, TOKENS_PER_PAGE},
    spec::{LinearAttention, LinearAttentionKind, Mla, Moe},
};
use shardpack_manifests::Layout;

use super::{NodeLimit, Nodes};

/// Tokens of a page of the KV cache.
const PAGE_TOKENS: u64 = TOKENS_PER_PAGE as u64;

/// Longest piece of a vector that ranks exchange at once.
const PIECE_BYTES: u64 = 4 << 20;

/// Code, threads, allocator, and what a small tokenizer's grammars take on rank 0: 20 to 23 MiB
/// in measurements.
pub const PROCESS_BYTES: u64 = 24 << 20;

/// Bytes of a number as the engine computes with it.
const F32_BYTES: u64 = 4;

/// What one rank needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// Name of the node, if it has one.
    pub node: Option<String>,
    /// Weights.
    pub weight_bytes: u64,
    /// Keys and values, and states of linear attention.
    pub cache_bytes: u64,
    /// Activations of one step, and the process itself.
    pub working_bytes: u64,
    /// What the node allows.
    pub limit_bytes: Option<u64>,
}

/// What an engine is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLoad {
    /// Tokens whose keys and values are held, those of all sequences together.
    pub tokens: u64,
    /// Sequences at the same time.
    pub sequences: u64,
    /// Rows of the largest step.
    pub step_tokens: u64,
    /// How keys and values are stored.
    pub kv: KvType,
}

impl RankMemory {
    /// What a rank needs for a load, its process included.
    #[must_use]
    pub fn of(
        spec: &Spec,
        layout: &Layout,
        (rank, weight_bytes): (u32, u64),
        load: &EngineLoad,
    ) -> Self {
        let part = RankExtents::of(layout, rank);
        let layers = own_layers(spec, layout, rank);
        let cache = |layer| layer_cache(spec, &part, layer, load);
        Self {
            node: None,
            weight_bytes,
            cache_bytes: layers.clone().map(cache).sum(),
            working_bytes: working(spec, &part, layers, load) + PROCESS_BYTES,
            limit_bytes: None,
        }
    }

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

/// Memory of every rank, in rank order, for one sequence of `context` tokens. Where nobody says
/// how long it is, the engine takes memory for the longest sequence, and for some short ones at
/// least.
pub(super) fn of_ranks(
    spec: &Spec,
    layout: &Layout,
    weights: &[u64],
    nodes: &Nodes,
    (context, kv): (Option<u32>, KvType),
) -> Vec<RankMemory> {
    let limit = |rank: usize| match nodes {
        Nodes::Equal(_) => None,
        Nodes::Limited(limits) => limits.get(rank),
    };
    let load = load_of(spec, layout, context, kv);
    let rank = |(rank, weight_bytes): (usize, &u64)| RankMemory {
        node: limit(rank).map(|limit| limit.name.clone()),
        limit_bytes: limit(rank).map(|limit: &NodeLimit| limit.usable_bytes),
        ..RankMemory::of(spec, layout, (rank as u32, *weight_bytes), &load)
    };
    weights.iter().enumerate().map(rank).collect()
}

/// Memory of every rank of a package set that is served, in rank order, from the bytes of each
/// rank's weights. `kv_bytes` is what each may take for keys and values; where nobody says, the
/// engine takes as much as [`Plan`](super::Plan) counts.
#[must_use]
pub fn served_memory(
    spec: &Spec,
    layout: &Layout,
    weights: &[u64],
    (kv, kv_bytes): (KvType, Option<u64>),
) -> Vec<RankMemory> {
    let mut ranks = of_ranks(spec, layout, weights, &Nodes::Equal(layout.ranks), (None, kv));
    for rank in &mut ranks {
        rank.cache_bytes = kv_bytes.unwrap_or(rank.cache_bytes);
    }
    ranks
}

/// For each layer what the ranks of a stage hold of its keys and values, if all stages are sharded
/// alike.
pub(super) fn layer_caches(
    spec: &Spec,
    layout: &Layout,
    (context, kv): (Option<u32>, KvType),
) -> Vec<u64> {
    let load = load_of(spec, layout, context, kv);
    let of_layer = |layer| {
        let ranks = layout.stage_ranks(0).map(|rank| RankExtents::of(layout, rank));
        ranks.map(|part| layer_cache(spec, &part, layer, &load)).sum()
    };
    (0..spec.layers.len()).map(of_layer).collect()
}

/// The load that is planned for.
fn load_of(spec: &Spec, layout: &Layout, context: Option<u32>, kv: KvType) -> EngineLoad {
    let tokens = u64::from(context.unwrap_or(spec.max_positions)).next_multiple_of(PAGE_TOKENS);
    let mut load = EngineLoad { tokens, sequences: 1, step_tokens: PREFILL_TOKENS as u64, kv };
    load.step_tokens = load.step_tokens.min(tokens);
    if context.is_none() {
        // All ranks have as many pages as the one whose pages are largest.
        let page = EngineLoad { tokens: PAGE_TOKENS, ..load };
        let pages = (0..layout.ranks).map(|rank| {
            let part = RankExtents::of(layout, rank);
            let layers = own_layers(spec, layout, rank);
            layers.map(|layer| keys_and_values(spec, &part, layer, &page)).sum::<u64>()
        });
        let largest = pages.max().unwrap_or(0);
        let least = MIN_KV_BYTES.checked_div(largest).unwrap_or(0) * PAGE_TOKENS;
        load.tokens = tokens.max(least);
    }
    load
}

/// Rows or columns of each axis that a rank holds.
struct RankExtents {
    query: u64,
    key: u64,
    /// The same of the second form of attention.
    second: [u64; 2],
    /// Key heads and value heads of linear attention, the latter where they are what is sharded.
    linear: [Option<u64>; 2],
    channels: u64,
    ffn: u64,
    expert: u64,
    shared: u64,
    vocab: u64,
    ranks: u64,
    staged: bool,
}

impl RankExtents {
    fn of(layout: &Layout, rank: u32) -> Self {
        let held = |axis: &str, width: bool| {
            layout.axes.get(axis).map_or(0, |axis| {
                let units = axis.units(rank);
                (units.end - units.start) * if width { axis.unit } else { 1 }
            })
        };
        Self {
            query: held("q", true),
            key: held("kv", true),
            second: [held("q_second", true), held("kv_second", true)],
            linear: ["lin_k", "lin_v"]
                .map(|axis| layout.axes.contains_key(axis).then(|| held(axis, false))),
            channels: held("conv", true),
            ffn: held("ffn", true),
            expert: held("moe_ffn", true),
            shared: held("shared_ffn", true),
            vocab: held("vocab", true),
            ranks: layout.stage_ranks(layout.stage_of(rank)).len() as u64,
            staged: layout.stage_count() > 1,
        }
    }
}

impl RankExtents {
    /// Columns of a layer's queries and of its keys.
    fn heads(&self, spec: &Spec, layer: usize) -> [u64; 2] {
        if spec.layers[layer].second_attention { self.second } else { [self.query, self.key] }
    }
}

/// The layers that a rank runs.
fn own_layers(spec: &Spec, layout: &Layout, rank: u32) -> Range<usize> {
    let stage = layout.stages.get(layout.stage_of(rank));
    stage.map_or(0..spec.layers.len(), |stage| stage.layers[0] as usize..stage.layers[1] as usize)
}

/// What one layer keeps of the sequences.
fn layer_cache(spec: &Spec, part: &RankExtents, layer: usize, load: &EngineLoad) -> u64 {
    let state = match (&spec.linear_attention, &spec.short_convolution) {
        (Some(delta), _) if spec.layers[layer].linear_attention => state(delta, part.linear),
        (_, Some(convolution)) if spec.layers[layer].short_convolution => {
            part.channels * u64::from(convolution.kernel.saturating_sub(1)) * F32_BYTES
        }
        _ => spec.compressed_attention.as_ref().map_or(0, |it| compressed::state(spec, it, layer)),
    };
    keys_and_values(spec, part, layer, load) + state * load.sequences
}

/// Keys and values of one layer. A window does not shorten them: the engine keeps the pages of
/// all layers together, and what is out of sight with them.
fn keys_and_values(spec: &Spec, part: &RankExtents, layer: usize, load: &EngineLoad) -> u64 {
    let this = &spec.layers[layer];
    if !this.attends() {
        return 0;
    }
    match (&spec.mla, &spec.compressed_attention) {
        (None, Some(it)) => compressed::pages(spec, it, layer, load),
        (None, None) => {
            let width = u64::from(spec.attention_of(layer).head_dim);
            let [_, key] = part.heads(spec, layer);
            let keys = load.tokens * (key / width.max(1)) * load.kv.head_bytes(width);
            2 * keys + blocks::keys(spec, part, layer, load)
        }
        // Every rank holds the latents of all heads, which are keys and values.
        (Some(mla), _) => {
            let width = u64::from(mla.kv_rank + mla.rope);
            let index = mla.indexer.as_ref().filter(|_| !spec.layers[layer].reuses_top_k);
            let index = index.map_or(0, |index| load.kv.indexer_bytes(index.width.into()));
            load.tokens * (load.kv.head_bytes(width) + index)
        }
    }
}

/// What a sequence carries from token to token in a layer of linear attention: the memory of each
/// value head, and the convolutions' last inputs.
fn state(delta: &LinearAttention, held: [Option<u64>; 2]) -> u64 {
    let [keys, values] = widths(delta, held);
    let window = (2 * keys + values) * u64::from(delta.kernel.saturating_sub(1));
    (values * u64::from(delta.key_dim) + window) * F32_BYTES
}

/// Widths of keys and of values of linear attention.
fn widths(delta: &LinearAttention, [key_heads, value_heads]: [Option<u64>; 2]) -> [u64; 2] {
    let per_key = u64::from(delta.value_heads / delta.key_heads.max(1));
    let key_heads = key_heads.unwrap_or(0);
    let value_heads = value_heads.unwrap_or(key_heads * per_key);
    [key_heads * u64::from(delta.key_dim), value_heads * u64::from(delta.value_dim)]
}

/// Peak activation memory of a step, without weights and caches.
fn working(spec: &Spec, part: &RankExtents, layers: Range<usize>, load: &EngineLoad) -> u64 {
    let layer = |layer: usize| {
        let attention = match (&spec.linear_attention, &spec.mla) {
            (Some(delta), _) if spec.layers[layer].parallel_attention => {
                linear(spec, delta, part) + heads(spec, part, layer)
            }
            (Some(delta), _) if spec.layers[layer].linear_attention => linear(spec, delta, part),
            _ if spec.layers[layer].short_convolution => {
                u64::from(spec.hidden_size) + 4 * part.channels
            }
            (_, Some(mla)) => latent(spec, mla, part),
            _ => match &spec.compressed_attention {
                Some(it) => compressed::working(spec, it, part, layer),
                None => heads(spec, part, layer),
            },
        };
        attention.max(match &spec.moe {
            Some(moe) if spec.layers[layer].moe => {
                let experts = experts(spec, moe, part, load.step_tokens);
                let both = moe.parallel_dense.is_some() || moe.shortcut;
                if both { experts.max(dense(spec, part)) } else { experts }
            }
            _ => dense(spec, part),
        })
    };
    let widest = layers.clone().map(layer).max().unwrap_or(0);
    let scores = layers.map(|layer| blocks::scores(spec, part, layer, load)).max().unwrap_or(0);
    let hidden = load.step_tokens * u64::from(spec.hidden_size) * F32_BYTES;
    // Hyper-connections: several residual streams, and a normalised copy of all of them.
    let residual = spec.residual_width() as u64;
    let widest = (widest + residual - u64::from(spec.hidden_size)).max(2 * residual);
    // Shortcut-connected MoE: the experts' output stays until the next layer's end.
    let is_shortcut = spec.moe.as_ref().is_some_and(|moe| moe.shortcut);
    let widest = if is_shortcut { widest + u64::from(spec.hidden_size) } else { widest };
    // What is being sent and what has arrived.
    let frames = if part.ranks > 1 { 2 * hidden.min(PIECE_BYTES) } else { 0 };
    let passed = if part.staged { 2 * load.step_tokens * residual * F32_BYTES } else { 0 };
    // As computed, and as sampling adjusts them.
    let logits = 2 * load.sequences * part.vocab * F32_BYTES;
    (load.step_tokens * widest + scores) * F32_BYTES + frames + passed + logits
}

/// Floats for each row of a step: grouped-query attention, with the residual stream.
fn heads(spec: &Spec, part: &RankExtents, layer: usize) -> u64 {
    let hidden = u64::from(spec.hidden_size);
    let [query, key] = part.heads(spec, layer);
    let attention = spec.attention_of(layer);
    let is_gated = attention.gated || attention.head_gate.is_some();
    let gate = if is_gated { 2 * query } else { 0 };
    3 * hidden + 2 * query + gate + 2 * key + quantized(hidden) + blocks::working(spec, part, layer)
}

/// MLA: queries in the latent space, and the projections before them.
fn latent(spec: &Spec, mla: &Mla, part: &RankExtents) -> u64 {
    let hidden = u64::from(spec.hidden_size);
    let [rank, nope, rope, value] = [mla.kv_rank, mla.nope, mla.rope, mla.value].map(u64::from);
    let heads = part.query / (nope + rope).max(1);
    let index = mla.indexer.as_ref().map_or(0, |index| {
        let [heads, width] = [index.heads, index.width].map(u64::from);
        // Short queries as projected and as rotated.
        2 * heads * width + width + heads + u64::from(index.top_k)
    });
    let attention = &spec.attention;
    let gate = match &attention.head_gate {
        Some(gate) if gate.per_head => heads,
        Some(_) => heads * value,
        None => 0,
    };
    index
        + gate
        + 3 * hidden
        + heads * (2 * (nope + rope) + 4 * rank + 2 * rope + value)
        + 4 * (rank + rope)
}

fn linear(spec: &Spec, delta: &LinearAttention, part: &RankExtents) -> u64 {
    let [keys, values] = widths(delta, part.linear);
    // By Kimi's rule each channel of a key fades for itself.
    let fading = if delta.kind == LinearAttentionKind::KimiDeltaAttention { keys } else { 0 };
    3 * u64::from(spec.hidden_size) + 2 * keys + 3 * values + fading
}

fn dense(spec: &Spec, part: &RankExtents) -> u64 {
    let hidden = u64::from(spec.hidden_size);
    let inner = if spec.ffn.activation.is_gated() { 2 } else { 1 };
    // The inputs of 16-bit matrices are put in another order, and what that takes is kept.
    let ordered = hidden + part.ffn;
    3 * hidden + inner * part.ffn + ordered
}

/// A mixture of experts: each expert's rows are gathered for themselves; twice as many as fall to
/// an expert in the mean, since they are not shared out evenly.
fn experts(spec: &Spec, moe: &Moe, part: &RankExtents, rows: u64) -> u64 {
    let hidden = u64::from(spec.hidden_size);
    // Whole experts are not sharded inside.
    let size = if part.expert > 0 { part.expert } else { u64::from(moe.size) };
    let guests = (2 * rows * u64::from(moe.top_k)).div_ceil(u64::from(moe.choices()).max(1));
    let one = guests.min(rows) * (2 * hidden + 2 * size) / rows.max(1);
    4 * hidden + u64::from(moe.choices()) + one.max(2 * part.shared)
}

/// Activations rounded to 8 bits, counted in floats.
const fn quantized(width: u64) -> u64 {
    width / 4 + width / 32
}
