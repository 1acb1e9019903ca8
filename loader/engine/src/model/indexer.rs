//! The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2).
//!
//! ```text
//! q = latent · Wq_b        [tokens, index_heads, width]
//! k = norm(x · Wk)         [tokens, width]
//! w = x · Ww               [tokens, index_heads]
//! score(t, s) = Σ_h w[t, h] · max(q[t, h] · k[s], 0)
//! ```
//!
//! Every rank with heads holds the whole indexer and comes to the same top-k indices, so nothing is
//! exchanged.

use shardpack_formats::spec::{self, NormKind};

use super::{
    LoadError,
    load::{LayerInfo, Loader, TensorSlice},
    step::ForwardPass,
};
use crate::backend::{Backend, IndexerInputs, IndexerParams, NormParams, RotatedPart};

/// The indexer of one layer.
pub(super) struct Indexer<B: Backend> {
    form: spec::Indexer,
    rope: Option<u32>,
    /// First rotated element of queries and keys.
    rope_offset: usize,
    /// The layer in the caches.
    index_slot: usize,
    /// Index queries, from the queries' latent.
    q: B::Matrix,
    /// The index key, from the hidden vector.
    k: B::Matrix,
    k_gain: B::Vector,
    k_bias: B::Vector,
    /// The weight of each index query, from the hidden vector.
    weights: B::Matrix,
}

impl<B: Backend> Indexer<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        mla: &spec::Mla,
        form: &spec::Indexer,
    ) -> Result<Self, LoadError> {
        let whole = |size: u32| TensorSlice::whole(size as usize);
        let name = |name: &str| layer.name(&format!("self_attn.indexer.{name}"));
        let latent = whole(mla.q_rank.unwrap_or(0));
        let (hidden, width) = (loader.hidden(), whole(form.width));
        Ok(Self {
            q: loader.held_matrix(&name("wq_b"), &whole(form.heads * form.width), &latent)?,
            k: loader.held_matrix(&name("wk"), &width, &hidden)?,
            k_gain: loader.vector(&name("k_norm.weight"), &width)?,
            k_bias: loader.vector(&name("k_norm.bias"), &width)?,
            weights: loader.plain_matrix(&name("weights_proj"), &whole(form.heads), &hidden)?,
            rope: layer.form.rope,
            rope_offset: if form.rotated_last { (form.width - mla.rope) as usize } else { 0 },
            index_slot: layer.slots.index,
            form: form.clone(),
        })
    }

    /// The keys that each row attends to, by its latent and its hidden vector.
    pub(super) fn top_k_keys(
        &self,
        pass: &ForwardPass<'_, B>,
        latent: &B::Tensor,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::TopK {
        let (backend, width) = (pass.backend, self.form.width as usize);
        let norm = NormParams {
            kind: NormKind::Layer,
            eps: self.form.eps.0,
            gain: &self.k_gain,
            bias: Some(&self.k_bias),
        };
        let k = backend.norm(&backend.linear(x, &self.k), &norm);
        let q = backend.linear(latent, &self.q);
        let part = RotatedPart { head_dim: width, offset: self.rope_offset };
        let [q, k] = match pass.index_rotation(self.rope) {
            Some(rotation) => [q, k].map(|x| backend.rotate(x, rotation, part)),
            None => [q, k],
        };
        let weights = backend.linear(x, &self.weights);
        let params = IndexerParams {
            layer: self.index_slot,
            lengths: &pass.batch.lengths,
            heads: self.form.heads as usize,
            width,
            top_k: self.form.top_k as usize,
        };
        backend.top_k_keys(IndexerInputs { q: &q, k: &k, weights: &weights }, caches, &params)
    }
}
