//! The block indexer of block-sparse attention (`MiniMax` Sparse Attention).
//!
//! A block's score is the highest `q · k` of its index keys; every key-value head attends to the
//! `top_k` blocks with the highest scores. The index key of a token is computed whole on every rank
//! with heads; index queries are sharded as key-value heads are.

use shardpack_formats::spec::{self, Attention};

use super::{
    LoadError,
    load::{LayerInfo, Loader, TensorSlice},
    norm::Norm,
    qk_norm::QueriesAndKeys,
    shard::Heads,
    step::ForwardPass,
};
use crate::backend::{Backend, BlockIndexerInputs, BlockIndexerParams, RotatedPart};

/// One rank's part of a layer's block indexer.
pub(super) struct BlockIndexer<B: Backend> {
    form: spec::BlockIndexer,
    /// Key-value heads held here.
    kv_heads: usize,
    rope: Option<u32>,
    /// The layer in the caches.
    index_slot: usize,
    projections: QueriesAndKeys<B::Matrix>,
    norms: QueriesAndKeys<Norm<B>>,
}

impl<B: Backend> BlockIndexer<B> {
    /// The indexer of this layer, if it has one and heads are held here.
    pub(super) fn of_layer(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        attention: &Attention,
        held: &Heads,
    ) -> Result<Option<Self>, LoadError> {
        let form = attention.block_sparse.as_ref().filter(|_| layer.form.block_sparse);
        let Some(form) = form else { return Ok(None) };
        let name = |name: &str| layer.name(&format!("self_attn.indexer.{name}"));
        let width = TensorSlice::whole(form.width as usize);
        let queries = TensorSlice::heads(&held.kv, attention.kv_heads, form.width);
        // Every rank holds these whole, one without heads too.
        let k = loader.held_matrix(&name("k_proj"), &width, &loader.hidden())?;
        let norm = |norm: &str| Norm::load(loader, &name(norm), &width);
        let norms = QueriesAndKeys { q: norm("q_norm")?, k: norm("k_norm")? };
        let q = loader.matrix(&name("q_proj"), &queries, &loader.hidden())?;
        Ok(q.map(|q| Self {
            form: form.clone(),
            kv_heads: held.kv.len(),
            rope: layer.form.rope,
            index_slot: layer.slots.index,
            projections: QueriesAndKeys { q, k },
            norms,
        }))
    }

    /// The blocks that each row attends to, by its hidden vector.
    pub(super) fn top_k_blocks(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::TopKBlocks {
        let (backend, width) = (pass.backend, self.form.width as usize);
        let [q, k] = backend.linears(x, [&self.projections.q, &self.projections.k]);
        let qk = QueriesAndKeys {
            q: self.norms.q.apply(backend, &q),
            k: self.norms.k.apply(backend, &k),
        };
        let part = RotatedPart { head_dim: width, offset: 0 };
        let qk = match pass.rotation(self.rope) {
            Some(rotation) => qk.map(|x| backend.rotate(x, rotation, part)),
            None => qk,
        };
        let params = BlockIndexerParams {
            layer: self.index_slot,
            lengths: &pass.batch.lengths,
            heads: self.kv_heads,
            width,
            block_tokens: self.form.tokens as usize,
            top_k: self.form.top_k as usize,
            local: self.form.local as usize,
        };
        backend.top_k_blocks(BlockIndexerInputs { q: &qk.q, k: &qk.k }, caches, &params)
    }
}
