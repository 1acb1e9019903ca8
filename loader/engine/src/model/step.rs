//! What all layers of one step share.

use std::cell::RefCell;

use shardpack_formats::{Spec, hex::HexF32, spec};

use super::{Batch, Shard};
use crate::backend::{Backend, Ranks, StepError};

/// One step of one rank.
pub(super) struct Step<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) spec: &'a Spec,
    pub(super) shard: &'a Shard,
    pub(super) batch: &'a Batch,
    pub(super) ranks: &'a Ranks<'a>,
    /// Angles of every rotary embedding of the model.
    rotations: Vec<B::Rotation>,
    /// Factors on each row's queries, if the model has them.
    pub(super) query_scales: Option<Vec<f32>>,
    /// The same angles laid out as an index has them, if the model has one.
    index_rotations: Vec<B::Rotation>,
    /// The same angles backwards, if results of attention are rotated back.
    back_rotations: Vec<B::Rotation>,
    /// Angles of the entries that are complete with this step, for each kind of entries.
    entry_rotations: Vec<(EntryKind, B::Rotation)>,
    /// The keys that were chosen last, which layers without an index of their own go by.
    chosen: RefCell<Option<B::Chosen>>,
    /// This rank's summand of experts that the next layer adds.
    deferred: RefCell<Option<B::Tensor>>,
}

impl<'a, B: Backend> Step<'a, B> {
    pub(super) fn new(
        backend: &'a B,
        (spec, shard): (&'a Spec, &'a Shard),
        batch: &'a Batch,
        ranks: &'a Ranks<'a>,
    ) -> Self {
        let totals = batch.row_totals();
        let rotations = |ropes: &[spec::Rope]| {
            let rotation = |rope| backend.rotation(rope, &batch.positions, &totals);
            ropes.iter().map(rotation).collect::<Vec<_>>()
        };
        let index = spec.mla.as_ref().and_then(|mla| mla.index.as_ref());
        let index_rotations = index.map_or_else(Vec::new, |index| {
            let styled = |rope: &spec::Rope| spec::Rope { style: index.style, ..rope.clone() };
            rotations(&spec.ropes.iter().map(styled).collect::<Vec<_>>())
        });
        let backwards = spec.compressed.as_ref().map_or_else(Vec::new, |_| {
            rotations(&spec.ropes.iter().map(backwards).collect::<Vec<_>>())
        });
        let entry_rotations = entry_kinds(spec)
            .filter_map(|kind| {
                let (positions, totals): (Vec<u32>, Vec<u32>) = (batch.positions.iter())
                    .zip(&totals)
                    .filter(|(position, _)| (*position + 1).is_multiple_of(kind.every))
                    .map(|(position, total)| (position + 1 - kind.every, *total))
                    .unzip();
                if positions.is_empty() {
                    return None;
                }
                let rope = &spec.ropes[kind.rope as usize];
                Some((kind, backend.rotation(rope, &positions, &totals)))
            })
            .collect();
        let rotations = rotations(&spec.ropes);
        let query_scales = spec
            .attention
            .position_scale
            .as_ref()
            .map(|scale| batch.positions.iter().map(|position| scale.at(*position)).collect());
        let (chosen, deferred) = (RefCell::default(), RefCell::default());
        Self {
            backend,
            spec,
            shard,
            batch,
            ranks,
            rotations,
            query_scales,
            index_rotations,
            back_rotations: backwards,
            entry_rotations,
            chosen,
            deferred,
        }
    }

    /// Leaves this rank's summand of experts to the next layer.
    pub(super) fn defer(&self, part: Option<B::Tensor>) {
        self.deferred.replace(part);
    }

    /// A dense part's summand with that of the experts of the layer before, if they left one: both
    /// are summed over the ranks at once.
    pub(super) fn with_deferred(&self, part: Option<B::Tensor>) -> Option<B::Tensor> {
        match (part, self.deferred.take()) {
            (Some(part), Some(deferred)) => Some(self.backend.add(part, &deferred)),
            (part, deferred) => part.or(deferred),
        }
    }

    /// From now on layers attend to these keys.
    pub(super) fn set_chosen(&self, chosen: B::Chosen) {
        self.chosen.replace(Some(chosen));
    }

    /// Gives the keys that layers attend to.
    pub(super) fn with_chosen<R>(&self, work: impl FnOnce(&B::Chosen) -> R) -> R {
        let chosen = self.chosen.borrow();
        work(chosen.as_ref().expect("a stage's first layer chooses, which is checked"))
    }

    /// Where the caches have a layer's index: among those that are run here.
    pub(super) fn indexed(&self, layer: usize) -> usize {
        self.before(layer).iter().filter(|it| self.shard.indexes(self.spec, it)).count()
    }

    /// Angles for the index of a layer; none where it has no position embedding.
    pub(super) fn index_rotation(&self, layer: usize) -> Option<&B::Rotation> {
        let rope = self.spec.layers[layer].rope;
        rope.map(|rope| &self.index_rotations[rope as usize])
    }

    /// Angles that undo those of a layer.
    pub(super) fn back_rotation(&self, layer: &spec::Layer) -> Option<&B::Rotation> {
        layer.rope.map(|rope| &self.back_rotations[rope as usize])
    }

    /// Angles of the entries of a layer that are complete with this step, in the order of their
    /// sequences: those of their first tokens. None where no entry is.
    pub(super) fn entry_rotation(&self, layer: &spec::Layer) -> Option<&B::Rotation> {
        let kind = EntryKind::of(layer)?;
        self.entry_rotations.iter().find(|(other, _)| *other == kind).map(|(_, found)| found)
    }

    /// Where the caches have entries of a layer: among those that are run here.
    pub(super) fn entries(&self, layer: usize) -> usize {
        self.before(layer).iter().filter(|it| it.entries.is_some()).count()
    }

    /// Where the caches have keys and values of a layer: among those that are run here, and of which
    /// heads are held here.
    pub(super) fn cached(&self, layer: usize) -> usize {
        self.before(layer).iter().filter(|it| self.shard.attends(it)).count()
    }

    /// Where the caches have the state of a layer: among those that are run here.
    pub(super) fn state(&self, layer: usize) -> usize {
        self.before(layer).iter().filter(|it| it.has_state()).count()
    }

    /// The layers that are run here before one.
    fn before(&self, layer: usize) -> &[spec::Layer] {
        let first = self.shard.stage.as_ref().map_or(0, |stage| stage.layers.start);
        &self.spec.layers[first..layer]
    }

    /// Angles for a layer; none where it has no position embedding.
    pub(super) fn rotation(&self, layer: &spec::Layer) -> Option<&B::Rotation> {
        layer.rope.map(|rope| &self.rotations[rope as usize])
    }

    /// Adds the bias of a row-cut projection, which one rank holds, to its summand.
    pub(super) fn with_bias(
        &self,
        part: Option<B::Tensor>,
        bias: Option<&B::Vector>,
    ) -> Option<B::Tensor> {
        let Some(bias) = bias else { return part };
        Some(self.backend.add_bias(part.unwrap_or_else(|| self.zeros()), bias))
    }

    /// The sum over ranks; a rank without a summand takes part with zeros.
    pub(super) fn sum(&self, part: Option<B::Tensor>) -> Result<B::Tensor, StepError> {
        self.backend.all_reduce(part.unwrap_or_else(|| self.zeros()), self.ranks)
    }

    fn zeros(&self) -> B::Tensor {
        self.backend.zeros(self.batch.tokens.len(), self.spec.hidden_size as usize)
    }
}

/// What the angles of entries depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct EntryKind {
    every: u32,
    rope: u32,
}

impl EntryKind {
    fn of(layer: &spec::Layer) -> Option<Self> {
        Some(Self { every: layer.entries?.every, rope: layer.rope? })
    }
}

/// Each kind of entries once.
fn entry_kinds(spec: &Spec) -> impl Iterator<Item = EntryKind> {
    let mut kinds = Vec::new();
    for kind in spec.layers.iter().filter_map(EntryKind::of) {
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds.into_iter()
}

/// A rotary embedding by the opposite angles.
fn backwards(rope: &spec::Rope) -> spec::Rope {
    let negative = |all: &[HexF32]| all.iter().map(|freq| HexF32(-freq.0)).collect();
    let long = rope
        .long
        .as_ref()
        .map(|long| spec::LongRope { beyond: long.beyond, inv_freq: negative(&long.inv_freq) });
    spec::Rope { inv_freq: negative(&rope.inv_freq), long, ..rope.clone() }
}
