//! What one rank holds of a model, from the architecture and the layout.

use std::{fmt::Display, ops::Range};

use shardpack_formats::{
    Spec,
    rules::EXPERTS_AXIS,
    spec::{self, Activation, Attention, Block, NormKind, QkNorm},
};
use shardpack_manifests::{Layout, layout::Axis};

use super::{LoadError, stage::PipelineStage};

mod block_sparse;
mod compressed_attention;
mod mla;
mod shortcut_moe;
mod states;

pub use states::LinearHeads;

/// Largest width that an architecture may have: four times that of the largest published
/// models; products of two widths then fit 64 bits with room to spare.
const MAX_WIDTH: u64 = 1 << 20;

/// Most Sinkhorn-Knopp rounds of the matrix that mixes residual streams.
const MAX_ROUNDS: u32 = 1000;

/// What one rank holds of a model, in elements; checked against the architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This rank.
    pub rank: usize,
    /// Its pipeline stage; none where every rank runs all layers. All that follows is held of the
    /// stage's own layers.
    pub stage: Option<PipelineStage>,
    /// Whether this rank adds what is added once.
    pub is_leader: bool,
    /// Heads of attention.
    pub heads: Heads,
    /// Heads of the second form of attention, where that has others.
    pub second_heads: Option<Heads>,
    /// Heads of linear attention.
    pub linear: LinearHeads,
    /// Channels of short convolutions held here.
    pub conv: Range<usize>,
    /// Inner columns of the feed-forward part held here.
    pub ffn: Range<usize>,
    /// Experts of which something is held here: all, or those that are held whole.
    pub experts: Range<usize>,
    /// Inner columns of each of those experts held here.
    pub moe_ffn: Range<usize>,
    /// Inner columns of the shared expert held here.
    pub shared_ffn: Range<usize>,
    /// Rows of the LM head held here, if its stage has it.
    pub vocab: Range<usize>,
    /// The tokens of every rank's logits.
    pub logits: Vec<Range<usize>>,
    /// Whether the embedding is sharded as the LM head is.
    pub embedding_sharded: bool,
}

/// Where the caches of one rank hold what a layer keeps: its index among the layers of this stage that
/// keep the same here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheSlots {
    /// Keys and values.
    pub(super) kv: usize,
    /// Keys of an indexer.
    pub(super) index: usize,
    /// Compressed KV entries.
    pub(super) entries: usize,
    /// The state of linear attention or of a short convolution.
    pub(super) state: usize,
}

/// Heads of one form of attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads held here.
    pub q: Range<usize>,
    /// Key-value heads held here.
    pub kv: Range<usize>,
    /// Those of them that no earlier rank holds.
    pub kv_owned: Range<usize>,
    /// For each query head held here, the index among the key-value heads held here.
    pub q_to_kv: Vec<usize>,
}

impl Shard {
    /// The part of `rank`. Ranges of `q`, `ffn` and `vocab` follow one another without gaps within
    /// a stage, and every query head finds its key-value head on its own rank.
    pub fn new(spec: &Spec, layout: &Layout, rank: u32) -> Result<Self, LoadError> {
        let (stage, logits) = (PipelineStage::new(layout, rank), logits(spec, layout)?);
        let of_stage = layout.of_stage(layout.stage_of(rank));
        let number = rank as usize;
        let (layout, rank) = (&of_stage, rank - layout.stage_ranks(layout.stage_of(rank)).start);
        check_widths(spec)?;
        check_layers(spec)?;
        check_block(spec)?;
        mla::check(spec)?;
        mla::check_index(spec, stage.as_ref())?;
        block_sparse::check(spec)?;
        compressed_attention::check(spec)?;
        shortcut_moe::check(spec, stage.as_ref())?;
        check_streams(spec)?;
        let rank = rank as usize;
        let is_dense = spec
            .layers
            .iter()
            .any(|layer| !layer.moe && layer.only != Some(spec::LayerPart::Attention))
            || spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some());
        let ffn = if is_dense {
            partition(layout, "ffn", spec.ffn.size.into(), 1)?[rank].clone()
        } else {
            0..0
        };
        let linear = states::linear(spec, layout, rank)?;
        let conv = states::channels(spec, layout, rank)?;
        let [experts, moe_ffn, shared_ffn] = experts(spec, layout, rank)?;
        let vocab = partition(layout, "vocab", spec.vocab_size.into(), 1)?[rank].clone();
        let heads = heads(spec, layout, rank)?;
        let second_heads = match &spec.second_attention {
            Some(second) => Some(second_heads(second, layout, rank)?),
            None => None,
        };
        let embedding_sharded = layout.embedding_sharded;
        Ok(Self {
            rank: number,
            stage,
            is_leader: rank == 0,
            heads,
            second_heads,
            linear,
            conv,
            ffn,
            experts,
            moe_ffn,
            shared_ffn,
            vocab,
            logits,
            embedding_sharded,
        })
    }

    /// Heads of a layer's attention.
    pub(super) fn heads_of(&self, layer: &spec::Layer) -> &Heads {
        self.second_heads.as_ref().filter(|_| layer.second_attention).unwrap_or(&self.heads)
    }

    /// Whether a layer has attention of which heads are held here.
    pub(super) fn attends(&self, layer: &spec::Layer) -> bool {
        layer.attends() && !self.heads_of(layer).q.is_empty()
    }

    /// Whether a layer keeps the keys of an indexer here.
    pub(super) fn indexes(&self, spec: &Spec, layer: &spec::Layer) -> bool {
        let has_index = match &spec.mla {
            Some(mla) => mla.indexer.is_some() && !layer.reuses_top_k,
            None => layer.block_sparse,
        };
        has_index && self.attends(layer)
    }

    /// Where the caches of this rank hold what a layer keeps.
    pub(super) fn cache_slots(&self, spec: &Spec, layer: usize) -> CacheSlots {
        let before = &spec.layers[self.layers(spec).start..layer];
        let count =
            |keeps: &dyn Fn(&spec::Layer) -> bool| before.iter().filter(|it| keeps(it)).count();
        CacheSlots {
            kv: count(&|it| self.attends(it)),
            index: count(&|it| self.indexes(spec, it)),
            entries: count(&|it| it.compressed_kv.is_some()),
            state: count(&spec::Layer::has_state),
        }
    }

    /// The layers that are run here.
    pub(super) fn layers(&self, spec: &Spec) -> Range<usize> {
        self.stage.as_ref().map_or(0..spec.layers.len(), |stage| stage.layers.clone())
    }
}

/// The tokens of every rank's logits: those of the last stage's rows of the output head, and none
/// elsewhere.
fn logits(spec: &Spec, layout: &Layout) -> Result<Vec<Range<usize>>, LoadError> {
    let last = layout.stage_count() - 1;
    if last > 0 && spec.tied_embeddings && !layout.embedding_sharded {
        let expected = "a sharded embedding, since it is also the output head of the last stage";
        return Err(layout_error("layout.embedding_sharded", &expected, &"a whole one"));
    }
    let mut all = vec![0..0; layout.stage_ranks(last).start as usize];
    all.extend(partition(&layout.of_stage(last), "vocab", spec.vocab_size.into(), 1)?);
    Ok(all)
}

fn check_widths(spec: &Spec) -> Result<(), LoadError> {
    let attention = |attention: &Attention| {
        let [heads, kv_heads, head_dim] =
            [attention.heads, attention.kv_heads, attention.head_dim].map(u64::from);
        [
            ("attention.heads × head_dim", head_dim * heads),
            ("attention.kv_heads × head_dim", head_dim * kv_heads),
        ]
    };
    let widths = [
        ("hidden_size", u64::from(spec.hidden_size)),
        ("vocab_size", u64::from(spec.vocab_size)),
        ("ffn.size", u64::from(spec.ffn.size)),
    ];
    let second = spec.second_attention.iter().flat_map(attention);
    for (what, width) in widths.into_iter().chain(attention(&spec.attention)).chain(second) {
        if width == 0 || width > MAX_WIDTH {
            return Err(layout_error(what, &format!("1 to {MAX_WIDTH}"), &width));
        }
    }
    for attention in [Some(&spec.attention), spec.second_attention.as_ref()].into_iter().flatten() {
        let head_dim = attention.head_dim;
        if attention.value_dim.is_some_and(|width| width == 0 || width >= head_dim) {
            let expected = format!("1 to {}", head_dim - 1);
            return Err(layout_error("attention.value_dim", &expected, &"another"));
        }
    }
    Ok(())
}

/// Heads of attention held here.
fn heads(spec: &Spec, layout: &Layout, rank: usize) -> Result<Heads, LoadError> {
    let attention = &spec.attention;
    if let Some(compressed) = &spec.compressed_attention {
        // Groups of heads stay together; all heads read one vector, which every rank computes.
        let each = attention.heads / compressed.groups;
        let width = u64::from(each) * u64::from(attention.head_dim);
        let groups = &partition(layout, "q", compressed.groups.into(), width)?[rank];
        let q = groups.start * each as usize..groups.end * each as usize;
        let q_to_kv = vec![0; q.len()];
        return Ok(Heads { q, kv: 0..1, kv_owned: 0..1, q_to_kv });
    }
    let q = partition(layout, "q", attention.heads.into(), attention.head_dim.into())?;
    let q = q[rank].clone();
    if spec.mla.is_some() {
        // All heads read one cached vector, which every rank computes.
        let q_to_kv = vec![0; q.len()];
        return Ok(Heads { q, kv: 0..1, kv_owned: 0..1, q_to_kv });
    }
    let KeyValueHeads { held: kv, owned: kv_owned } =
        key_value_heads(attention, "kv", layout, rank)?;
    let heads = attention.heads as usize;
    if layout.q_to_kv.len() != heads {
        return Err(layout_error("layout.q_to_kv", &heads, &layout.q_to_kv.len()));
    }
    let map = |head: usize| layout.q_to_kv[head] as usize;
    let q_to_kv = read_heads(map, rank, &q, &kv)?;
    Ok(Heads { q, kv, kv_owned, q_to_kv })
}

/// Heads of the second form of attention held here: as many query heads read each key-value head.
fn second_heads(second: &Attention, layout: &Layout, rank: usize) -> Result<Heads, LoadError> {
    if !second.heads.is_multiple_of(second.kv_heads.max(1)) {
        let expected = format!("a divisor of {}", second.heads);
        return Err(layout_error("second_attention.kv_heads", &expected, &second.kv_heads));
    }
    let q = partition(layout, "q_second", second.heads.into(), second.head_dim.into())?;
    let q = q[rank].clone();
    let KeyValueHeads { held: kv, owned: kv_owned } =
        key_value_heads(second, "kv_second", layout, rank)?;
    let each = (second.heads / second.kv_heads.max(1)) as usize;
    let q_to_kv = read_heads(|head| head / each, rank, &q, &kv)?;
    Ok(Heads { q, kv, kv_owned, q_to_kv })
}

/// Key-value heads of one rank.
struct KeyValueHeads {
    held: Range<usize>,
    /// Those that no earlier rank holds.
    owned: Range<usize>,
}

fn key_value_heads(
    attention: &Attention,
    axis: &str,
    layout: &Layout,
    rank: usize,
) -> Result<KeyValueHeads, LoadError> {
    let kv = ranges(layout, axis, attention.kv_heads.into(), attention.head_dim.into())?;
    let earlier = kv[..rank].iter().map(|range| range.end).max().unwrap_or(0);
    let held = kv[rank].clone();
    // The map from query heads never decreases, so ranges begin in rank order.
    let owned = held.start.max(earlier).min(held.end)..held.end;
    Ok(KeyValueHeads { held, owned })
}

/// For each query head held here, the index among the key-value heads held here.
fn read_heads(
    map: impl Fn(usize) -> usize,
    rank: usize,
    q: &Range<usize>,
    kv: &Range<usize>,
) -> Result<Vec<usize>, LoadError> {
    q.clone()
        .map(|head| {
            let needed = map(head);
            if kv.contains(&needed) {
                return Ok(needed - kv.start);
            }
            let what = format!("key-value head of query head {head} on rank {rank}");
            Err(layout_error(&what, &format!("one of {kv:?}"), &needed))
        })
        .collect()
}

/// Experts, their inner columns and those of the shared expert that are held here.
fn experts(spec: &Spec, layout: &Layout, rank: usize) -> Result<[Range<usize>; 3], LoadError> {
    let Some(moe) = &spec.moe else {
        return match spec.layers.iter().position(|layer| layer.moe) {
            None => Ok([0..0, 0..0, 0..0]),
            Some(layer) => Err(layout_error(&format!("layer {layer}"), &"no experts", &"experts")),
        };
    };
    let shared = moe.shared.as_ref().map_or(0, |shared| shared.size);
    let latent = ("moe.latent", moe.latent.unwrap_or(spec.hidden_size));
    for (what, size) in [("moe.experts", moe.experts), ("moe.size", moe.size), latent] {
        if size == 0 || u64::from(size) > MAX_WIDTH {
            return Err(layout_error(what, &format!("1 to {MAX_WIDTH}"), &size));
        }
    }
    let choices = moe.choices();
    if moe.top_k == 0 || moe.top_k > choices || u64::from(choices) > MAX_WIDTH {
        return Err(layout_error("moe.top_k", &format!("1 to {choices}"), &moe.top_k));
    }
    if moe.zero_experts > 0 && (moe.latent.is_some() || moe.weighs_inputs) {
        let what = "moe.zero_experts";
        return Err(layout_error(what, &"experts that read the residual stream", &"others"));
    }
    if let Some(groups) = &moe.router.groups {
        let each = choices.checked_div(groups.count).unwrap_or(0);
        let enough = groups.kept.checked_mul(each).is_some_and(|kept| kept >= moe.top_k);
        if each * groups.count != choices || groups.kept > groups.count || !enough {
            let expected = format!("groups that divide {choices} experts");
            return Err(layout_error("moe.router.groups", &expected, &format!("{groups:?}")));
        }
    }
    let (all, inner) = (0..moe.experts as usize, 0..moe.size as usize);
    let [experts, moe_ffn] = if layout.axes.contains_key(EXPERTS_AXIS) {
        [partition(layout, EXPERTS_AXIS, moe.experts.into(), 1)?[rank].clone(), inner]
    } else {
        [all, partition(layout, "moe_ffn", moe.size.into(), 1)?[rank].clone()]
    };
    let shared_ffn = match shared {
        0 => 0..0,
        size => partition(layout, "shared_ffn", size.into(), 1)?[rank].clone(),
    };
    Ok([experts, moe_ffn, shared_ffn])
}

fn check_layers(spec: &Spec) -> Result<(), LoadError> {
    for (index, layer) in spec.layers.iter().enumerate() {
        if layer.rope.is_some_and(|rope| rope as usize >= spec.ropes.len()) {
            let expected = format!("one of {} ropes", spec.ropes.len());
            return Err(layout_error(&format!("rope of layer {index}"), &expected, &"another"));
        }
        if layer.second_attention && spec.second_attention.is_none() {
            let what = format!("layer {index}");
            return Err(layout_error(&what, &"no second form of attention", &"it"));
        }
        let head_dim = spec.attention_of(index).head_dim;
        let pairs = layer.rope.map_or(0, |rope| spec.ropes[rope as usize].inv_freq.len());
        if pairs > head_dim as usize / 2 {
            let expected = format!("at most {} pairs", head_dim / 2);
            return Err(layout_error(&format!("rope of layer {index}"), &expected, &pairs));
        }
    }
    for (index, rope) in spec.ropes.iter().enumerate() {
        let pairs = rope.inv_freq.len();
        if let Some(long) = rope.long.as_ref().filter(|long| long.inv_freq.len() != pairs) {
            let what = format!("long frequencies of rope {index}");
            return Err(layout_error(&what, &pairs, &long.inv_freq.len()));
        }
    }
    Ok(())
}

/// Refuses combinations that no architecture has and that the layers do not compute.
fn check_block(spec: &Spec) -> Result<(), LoadError> {
    let Block { after_attention, after_ffn, parallel, .. } = &spec.block;
    let beside =
        spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some() || moe.after.is_some());
    if spec.moe.as_ref().is_some_and(|moe| moe.activation == Activation::Xielu) {
        return Err(layout_error("experts", &"an activation without parameters", &"xIELU"));
    }
    if *parallel && (after_attention.is_some() || after_ffn.is_some() || beside) {
        return Err(layout_error("a parallel block", &"no norms after its parts", &"some"));
    }
    let both = [Some(&spec.attention), spec.second_attention.as_ref()];
    let full_norm = both.into_iter().flatten().any(|it| it.qk_norm == QkNorm::Full);
    if full_norm && (spec.norm.kind != NormKind::Rms || spec.norm.bias) {
        let found = format!("{:?}", spec.norm);
        return Err(layout_error("norms of whole queries and keys", &"rms without bias", &found));
    }
    Ok(())
}

/// Hyper-connections: their widths, and that the block has no other residual wiring.
fn check_streams(spec: &Spec) -> Result<(), LoadError> {
    let Some(streams) = &spec.hyper_connections else { return Ok(()) };
    let width = u64::from(streams.expansion_rate) * u64::from(spec.hidden_size);
    if streams.expansion_rate == 0 || width > MAX_WIDTH {
        let expected = format!("1 to {}", MAX_WIDTH / u64::from(spec.hidden_size.max(1)));
        return Err(layout_error(
            "hyper_connections.expansion_rate",
            &expected,
            &streams.expansion_rate,
        ));
    }
    if streams.sinkhorn_iterations.is_some_and(|rounds| rounds == 0 || rounds > MAX_ROUNDS) {
        return Err(layout_error(
            "hyper_connections.sinkhorn_iterations",
            &format!("1 to {MAX_ROUNDS}"),
            &"another",
        ));
    }
    let block = &spec.block;
    let scaled = block.layer_scale.is_some() || block.residual_scale.is_some();
    let beside = spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some());
    if block.parallel || scaled || beside {
        let found = "a parallel one, one with factors or experts beside a dense part";
        return Err(layout_error("a block with several residual streams", &"a plain one", &found));
    }
    Ok(())
}

/// Ranges of an axis that holds every element exactly once.
fn partition(
    layout: &Layout,
    name: &str,
    size: u64,
    width: u64,
) -> Result<Vec<Range<usize>>, LoadError> {
    let ranges = ranges(layout, name, size, width)?;
    let mut next = 0;
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        if range.start != next {
            let expected = format!("ranges that follow one another, the next from {next}");
            return Err(layout_error(&format!("axis {name:?}"), &expected, &range.start));
        }
        next = range.end;
    }
    if next as u64 != size {
        return Err(layout_error(&format!("axis {name:?}"), &format!("an end at {size}"), &next));
    }
    Ok(ranges)
}

/// Every rank's elements of an axis, each `width` rows or columns wide. The axis's own unit may
/// be any whole number of elements.
fn ranges(
    layout: &Layout,
    name: &str,
    size: u64,
    width: u64,
) -> Result<Vec<Range<usize>>, LoadError> {
    let what = format!("axis {name:?}");
    let found = |axis: &Axis| format!("{} units of {}", axis.size, axis.unit);
    let Some(axis) = layout.axes.get(name) else {
        return Err(layout_error(&what, &"a range for every rank", &"none"));
    };
    if axis.size.checked_mul(axis.unit) != Some(size * width) {
        return Err(layout_error(&what, &format!("{size} of {width}"), &found(axis)));
    }
    let element = |unit: u64| {
        // The manifest has ranges within the axis, so this is at most size · width.
        let at = unit * axis.unit;
        at.is_multiple_of(width).then_some((at / width) as usize)
    };
    let range = |[start, end]: &[u64; 2]| Some(element(*start)?..element(*end)?);
    let all: Option<Vec<_>> = axis.ranges.iter().map(range).collect();
    all.ok_or_else(|| {
        layout_error(&what, &format!("shard boundaries at multiples of {width}"), &found(axis))
    })
}

fn layout_error(what: &str, expected: &dyn Display, found: &dyn Display) -> LoadError {
    let (expected, found) = (expected.to_string(), found.to_string());
    LoadError::Layout { what: what.to_owned(), expected, found }
}
