//! A model of which one layer at a time is in memory: all sequences pass through a layer before the
//! next one is loaded.
//!
//! Sequences are run whole and from their beginning, so no KV cache outlives a layer.

use super::{
    Batch, LoadError, Model, Shard,
    embedding_and_head::EmbeddingAndHead,
    embedding_dense::EmbeddingDense,
    layer::Layer,
    load::Loader,
    step::{CrossLayer, ForwardPass},
};
use crate::{
    backend::{Backend, Ranks, StepError},
    loading::Package,
};

/// What is loaded of a model: the embedding and the head, or one layer.
pub struct LayerwiseModel<B: Backend> {
    /// Without layers.
    outside: Model<B>,
}

/// One layer in memory.
pub struct LoadedLayer<B: Backend>(Layer<B>);

/// What a layer hands to later ones of the same sequence.
pub struct CrossLayerState<B: Backend>(CrossLayer<B>);

impl<B: Backend> Default for CrossLayerState<B> {
    fn default() -> Self {
        Self(CrossLayer::new())
    }
}

impl<B: Backend> LayerwiseModel<B> {
    /// Takes what belongs to no layer from a package that holds it.
    pub fn load(package: &Package, backend: &B) -> Result<Self, LoadError> {
        let manifest = package.manifest();
        let spec = &manifest.architecture;
        let shard = Shard::new(spec, &manifest.layout, manifest.rank)?;
        let loader = Loader::new(package, backend, spec, shard);
        Ok(Self {
            outside: Model {
                embedding_and_head: EmbeddingAndHead::load(&loader)?,
                embedding_dense: EmbeddingDense::load(&loader)?,
                layers: Vec::new(),
                spec: spec.clone(),
                shard: loader.shard.clone(),
            },
        })
    }

    /// The model, without its layers.
    #[must_use]
    pub const fn model(&self) -> &Model<B> {
        &self.outside
    }

    /// Takes a layer from a package that holds it.
    pub fn layer(
        &self,
        package: &Package,
        backend: &B,
        index: usize,
    ) -> Result<LoadedLayer<B>, LoadError> {
        let spec = &package.manifest().architecture;
        let loader = Loader::new(package, backend, spec, self.outside.shard.clone());
        Layer::load(&loader, index).map(LoadedLayer)
    }

    /// The residual stream of a whole sequence before the first layer.
    pub fn embed(
        &self,
        backend: &B,
        batch: &Batch,
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let Model { spec, shard, embedding_and_head, .. } = &self.outside;
        embedding_and_head.embed(&ForwardPass::new(backend, spec, shard, batch, ranks))
    }

    /// The residual stream of a whole sequence after a layer.
    pub fn forward(
        &self,
        backend: &B,
        (layer, state): (&LoadedLayer<B>, &mut CrossLayerState<B>),
        batch: &Batch,
        x: B::Tensor,
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let Model { spec, shard, .. } = &self.outside;
        let pass = ForwardPass::new(backend, spec, shard, batch, ranks);
        let mut cache = backend.cache(&self.outside.cache_shape(), &[]);
        layer.0.forward(&pass, &mut state.0, x, &mut [&mut cache])
    }

    /// What the head reads of every row of a whole sequence after the last layer.
    pub fn head_inputs(
        &self,
        backend: &B,
        batch: &Batch,
        x: &B::Tensor,
        ranks: &Ranks<'_>,
    ) -> B::Tensor {
        let Model { spec, shard, embedding_and_head, .. } = &self.outside;
        let pass = ForwardPass::new(backend, spec, shard, batch, ranks);
        let rows: Vec<usize> = (0..batch.tokens.len()).collect();
        embedding_and_head.hidden(&pass, x, &rows)
    }

    /// Logits of some rows of a whole sequence after the last layer.
    pub fn logits(
        &self,
        backend: &B,
        batch: &Batch,
        x: &B::Tensor,
        rows: &[usize],
        ranks: &Ranks<'_>,
    ) -> B::Tensor {
        let Model { spec, shard, embedding_and_head, .. } = &self.outside;
        let pass = ForwardPass::new(backend, spec, shard, batch, ranks);
        let hidden = embedding_and_head.hidden(&pass, x, rows);
        embedding_and_head.logits_of(backend, spec, &hidden, rows.len())
    }
}
