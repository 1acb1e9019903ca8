//! What all layers of one step share.

use std::cell::RefCell;

use shardpack_formats::{Spec, spec};

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
    /// The keys that were chosen last, which layers without an index of their own go by.
    chosen: RefCell<Option<B::Chosen>>,
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
        let rotations = rotations(&spec.ropes);
        let query_scales = spec
            .attention
            .position_scale
            .as_ref()
            .map(|scale| batch.positions.iter().map(|position| scale.at(*position)).collect());
        let chosen = RefCell::default();
        Self {
            backend,
            spec,
            shard,
            batch,
            ranks,
            rotations,
            query_scales,
            index_rotations,
            chosen,
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
        let first = self.shard.stage.as_ref().map_or(0, |stage| stage.layers.start);
        self.spec.layers[first..layer].iter().filter(|it| !it.shares_keys).count()
    }

    /// Angles for the index of a layer; none where it has no position embedding.
    pub(super) fn index_rotation(&self, layer: usize) -> Option<&B::Rotation> {
        let rope = self.spec.layers[layer].rope;
        rope.map(|rope| &self.index_rotations[rope as usize])
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
