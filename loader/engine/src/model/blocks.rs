//! What chooses the blocks of keys that heads attend to.
//!
//! The key of a token is computed whole on every rank with heads, and short queries are cut as
//! key-value heads are: each has a choice of its own.

use shardpack_formats::spec::{Attention, BlockIndex};

use super::{
    LoadError,
    load::{Loader, Part},
    norm::Norm,
    shard::Heads,
    step::Step,
};
use crate::backend::{Backend, BlockStep};

/// One rank's part of a layer's index of blocks.
pub(super) struct Blocks<B: Backend> {
    q: B::Matrix,
    k: B::Matrix,
    /// Of short queries and of keys.
    norms: [Norm<B>; 2],
}

impl<B: Backend> Blocks<B> {
    /// The index of this layer, if it has one and heads are held here.
    pub(super) fn of_layer(
        loader: &Loader<'_, B>,
        (layer, attention): (usize, &Attention),
        prefix: &str,
        held: &Heads,
    ) -> Result<Option<Self>, LoadError> {
        let chooses = loader.spec.layers[layer].chooses_blocks;
        let Some(index) = attention.blocks.as_ref().filter(|_| chooses) else { return Ok(None) };
        let name = |name: &str| format!("{prefix}.indexer.{name}");
        let width = Part::whole(index.width as usize);
        let queries = Part::heads(&held.kv, attention.kv_heads, index.width);
        // What every rank has whole, one without heads too.
        let k = loader.held_matrix(&name("k_proj"), &width, &loader.hidden())?;
        let norm = |norm: &str| Norm::load(loader, &name(norm), &width);
        let norms = [norm("q_norm")?, norm("k_norm")?];
        let q = loader.matrix(&name("q_proj"), &queries, &loader.hidden())?;
        Ok(q.map(|q| Self { q, k, norms }))
    }

    /// The blocks that each row attends to, by its hidden vector.
    pub(super) fn choose(
        &self,
        step: &Step<'_, B>,
        (layer, index, held): (usize, &BlockIndex, &Heads),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Chosen {
        let (backend, width) = (step.backend, index.width as usize);
        let [q, k] = backend.linears(x, [&self.q, &self.k]);
        let [q, k] = {
            let [q_norm, k_norm] = &self.norms;
            let norm = &step.spec.norm;
            [q_norm.apply(backend, norm, &q), k_norm.apply(backend, norm, &k)]
        };
        let [q, k] = match step.rotation(&step.spec.layers[layer]) {
            Some(rotation) => [q, k].map(|x| backend.rotate(x, rotation, (width, 0))),
            None => [q, k],
        };
        let at = BlockStep {
            layer: step.indexed(layer),
            lengths: &step.batch.lengths,
            heads: held.kv.len(),
            width,
            tokens: index.tokens as usize,
            top_k: index.top_k as usize,
            local: index.local as usize,
        };
        backend.choose_blocks([&q, &k], caches, &at)
    }
}
