//! One forward pass of one rank: what all its layers read, and what a layer hands to a later one.

use shardpack_formats::{Spec, hex::HexF32, spec};

use super::{Batch, Shard};
use crate::backend::{Backend, Ranks, StepError};

/// What all layers of one forward pass read.
pub(super) struct ForwardPass<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) spec: &'a Spec,
    pub(super) shard: &'a Shard,
    pub(super) batch: &'a Batch,
    pub(super) ranks: &'a Ranks<'a>,
    /// In place of the batch's tokens, where these are not known yet.
    pub(super) late: Option<&'a B::LateTokens>,
    /// Angles of every rotary embedding of the model.
    rotations: Vec<B::Rotation>,
    /// Factors on each row's queries, if the model has them.
    pub(super) query_scales: Option<Vec<f32>>,
    /// The same angles in the layout of the indexer, if the model has one.
    index_rotations: Vec<B::Rotation>,
    /// The opposite angles, if results of attention are rotated back.
    back_rotations: Vec<B::Rotation>,
    /// Angles of the compressed KV entries that are complete with this step, for each kind.
    entry_rotations: Vec<EntryRotation<B::Rotation>>,
}

/// What a layer hands to a later layer of the same forward pass, apart from the residual stream.
pub(super) struct CrossLayer<B: Backend> {
    /// The top-k indices of the last indexer; layers without an indexer of their own reuse them.
    pub(super) top_k: Option<B::TopK>,
    /// This rank's partial sum of a shortcut-connected mixture of experts, which the next layer adds.
    pub(super) shortcut: Option<B::Tensor>,
}

impl<B: Backend> CrossLayer<B> {
    pub(super) const fn new() -> Self {
        Self { top_k: None, shortcut: None }
    }
}

struct EntryRotation<R> {
    kind: EntryKind,
    rotation: R,
}

impl<'a, B: Backend> ForwardPass<'a, B> {
    pub(super) fn new(
        backend: &'a B,
        spec: &'a Spec,
        shard: &'a Shard,
        batch: &'a Batch,
        ranks: &'a Ranks<'a>,
    ) -> Self {
        let totals = batch.row_totals();
        let rotations = |ropes: &[spec::Rope]| {
            let rotation = |rope| backend.rotation(rope, &batch.positions, &totals);
            ropes.iter().map(rotation).collect::<Vec<_>>()
        };
        let index = spec.mla.as_ref().and_then(|mla| mla.indexer.as_ref());
        let index_rotations = index.map_or_else(Vec::new, |index| {
            let styled = |rope: &spec::Rope| spec::Rope { style: index.style, ..rope.clone() };
            rotations(&spec.ropes.iter().map(styled).collect::<Vec<_>>())
        });
        let back_rotations = spec.compressed_attention.as_ref().map_or_else(Vec::new, |_| {
            rotations(&spec.ropes.iter().map(opposite).collect::<Vec<_>>())
        });
        let query_scales = spec
            .attention
            .position_scale
            .as_ref()
            .map(|scale| batch.positions.iter().map(|position| scale.at(*position)).collect());
        Self {
            backend,
            spec,
            shard,
            batch,
            ranks,
            late: None,
            rotations: rotations(&spec.ropes),
            query_scales,
            index_rotations,
            back_rotations,
            entry_rotations: entry_rotations(backend, spec, batch, &totals),
        }
    }

    /// Tokens of the step.
    pub(super) const fn tokens(&self) -> usize {
        self.batch.tokens.len()
    }

    /// Angles of a layer's rope; none where it has no position embedding.
    pub(super) fn rotation(&self, rope: Option<u32>) -> Option<&B::Rotation> {
        rope.map(|rope| &self.rotations[rope as usize])
    }

    /// The same for the layer's indexer.
    pub(super) fn index_rotation(&self, rope: Option<u32>) -> Option<&B::Rotation> {
        rope.map(|rope| &self.index_rotations[rope as usize])
    }

    /// Angles that undo those of a layer's rope.
    pub(super) fn back_rotation(&self, rope: Option<u32>) -> Option<&B::Rotation> {
        rope.map(|rope| &self.back_rotations[rope as usize])
    }

    /// Angles of the entries of a kind that are complete with this step, at the positions of their
    /// first tokens, in the order of their sequences. None where no entry is complete.
    pub(super) fn entry_rotation(&self, kind: EntryKind) -> Option<&B::Rotation> {
        self.entry_rotations.iter().find(|it| it.kind == kind).map(|it| &it.rotation)
    }

    /// The sum of two partial sums, of which a rank may have none.
    pub(super) fn join(&self, a: Option<B::Tensor>, b: Option<B::Tensor>) -> Option<B::Tensor> {
        match (a, b) {
            (Some(a), Some(b)) => Some(self.backend.add(a, &b)),
            (a, b) => a.or(b),
        }
    }

    /// Adds the bias of a row-parallel projection, which one rank holds, to its partial sum.
    pub(super) fn with_bias(
        &self,
        part: Option<B::Tensor>,
        bias: Option<&B::Vector>,
    ) -> Option<B::Tensor> {
        let Some(bias) = bias else { return part };
        Some(self.backend.add_bias(part.unwrap_or_else(|| self.zeros()), bias))
    }

    /// The all-reduce of partial sums; a rank without one takes part with zeros.
    pub(super) fn all_reduce(&self, part: Option<B::Tensor>) -> Result<B::Tensor, StepError> {
        self.backend.all_reduce(part.unwrap_or_else(|| self.zeros()), self.ranks)
    }

    fn zeros(&self) -> B::Tensor {
        self.backend.zeros(self.tokens(), self.spec.hidden_size as usize)
    }
}

/// What the angles of compressed KV entries depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryKind {
    ratio: u32,
    rope: u32,
}

impl EntryKind {
    /// The kind of a layer's entries, if it has some with a position embedding.
    pub(super) fn of(layer: &spec::Layer) -> Option<Self> {
        Some(Self { ratio: layer.compressed_kv?.compression_ratio, rope: layer.rope? })
    }
}

fn entry_rotations<B: Backend>(
    backend: &B,
    spec: &Spec,
    batch: &Batch,
    totals: &[u32],
) -> Vec<EntryRotation<B::Rotation>> {
    let mut kinds = Vec::new();
    for kind in spec.layers.iter().filter_map(EntryKind::of) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let rotation = |kind: EntryKind| {
        let (positions, totals): (Vec<u32>, Vec<u32>) = (batch.positions.iter())
            .zip(totals)
            .filter(|(position, _)| (*position + 1).is_multiple_of(kind.ratio))
            .map(|(position, total)| (position + 1 - kind.ratio, *total))
            .unzip();
        let rope = &spec.ropes[kind.rope as usize];
        (!positions.is_empty())
            .then(|| EntryRotation { kind, rotation: backend.rotation(rope, &positions, &totals) })
    };
    kinds.into_iter().filter_map(rotation).collect()
}

/// A rotary embedding by the opposite angles.
fn opposite(rope: &spec::Rope) -> spec::Rope {
    let negative = |all: &[HexF32]| all.iter().map(|freq| HexF32(-freq.0)).collect();
    let long = rope
        .long
        .as_ref()
        .map(|long| spec::LongRope { beyond: long.beyond, inv_freq: negative(&long.inv_freq) });
    spec::Rope { inv_freq: negative(&rope.inv_freq), long, ..rope.clone() }
}
