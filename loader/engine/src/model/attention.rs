//! Grouped-query attention (Ainslie et al. 2023), with multi-head and multi-query attention as its
//! extremes.
//!
//! ```text
//! q = norm(x · Wq)                                 [tokens, heads, head_dim]
//! k = norm(x · Wk)                                 [tokens, kv_heads, head_dim]
//! v = x · Wv                                       [tokens, kv_heads, value_dim]
//! out = softmax(scale · rope(q) · rope(k)ᵀ) · v    [tokens, heads, value_dim]
//! y = gate(out) · Wo                               [tokens, hidden_size]
//! ```
//!
//! Heads are sharded over ranks; a key-value head is held by every rank whose query heads read it.
//! Where a layer has a block indexer, heads attend to the blocks that it selects.

use shardpack_formats::spec::{self, Mask, QkNorm};

use super::{
    LoadError, Projection,
    block_indexer::BlockIndexer,
    load::{LayerInfo, Loader, TensorSlice},
    norm,
    output_gate::OutputGate,
    qk_norm::{QueriesAndKeys, QueryKeyNorm},
    shard::Heads,
    step::ForwardPass,
};
use crate::backend::{AttentionParams, Backend, Columns, Qkv, RotatedPart, StepError};

/// One rank's part of grouped-query attention.
pub(super) struct Attention<B: Backend> {
    form: spec::Attention,
    heads: Heads,
    mask: Mask,
    rope: Option<u32>,
    /// The layer in the caches.
    kv_slot: usize,
    /// Absent on a rank without query heads.
    weights: Option<Weights<B>>,
    o_bias: Option<B::Vector>,
}

struct Weights<B: Backend> {
    q: Projection<B>,
    k: Projection<B>,
    v: Values<B>,
    qk_norm: QueryKeyNorm<B>,
    /// Ones, where each head's values are normalised.
    value_norm: Option<B::Vector>,
    sinks: Option<B::Vector>,
    gate: Option<OutputGate<B>>,
    keys: Keys<B>,
    o: B::Matrix,
}

/// Where values come from.
enum Values<B: Backend> {
    Projected(Projection<B>),
    /// Values are the keys before their norm.
    Keys,
}

/// Which keys heads attend to, of those that the mask shows.
enum Keys<B: Backend> {
    All,
    TopKBlocks(BlockIndexer<B>),
}

/// Projections of the rows, values as wide as keys.
struct Projected<T> {
    qk: QueriesAndKeys<T>,
    v: T,
    /// The gate within the queries' projection.
    gate: Option<T>,
}

impl<B: Backend> Attention<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &LayerInfo<'_>) -> Result<Self, LoadError> {
        let form = loader.spec.attention_of(layer.index);
        let heads = loader.shard.heads_of(layer.form);
        let module = layer.name("self_attn");
        let o_bias = loader.bias_once(&format!("{module}.o_proj"), form.o_bias)?;
        Ok(Self {
            weights: Weights::load(loader, layer, form, heads)?,
            o_bias,
            form: form.clone(),
            heads: heads.clone(),
            mask: layer.form.mask,
            rope: layer.form.rope,
            kv_slot: layer.slots.kv,
        })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<Option<B::Tensor>, StepError> {
        let (backend, form) = (pass.backend, &self.form);
        let Some(weights) = &self.weights else {
            if form.qk_norm == QkNorm::Full {
                // Every rank takes part in the norm's all-reduce.
                let nothing = backend.zeros(pass.tokens(), 1);
                let none = || Columns { x: &nothing, columns: 0..0 };
                backend.all_reduce(backend.square_sums(&[none(), none()]), pass.ranks)?;
            }
            return Ok(pass.with_bias(None, self.o_bias.as_ref()));
        };
        let Projected { qk, v, gate } = self.project(pass, weights, x);
        let qk = weights.qk_norm.before_rope(pass, form, &self.heads, qk)?;
        let (qk, v) = match form.limit {
            Some(limit) => (qk.map(|x| backend.limit(x, limit.0)), backend.limit(v, limit.0)),
            None => (qk, v),
        };
        let qk = self.positioned(pass, weights, qk);
        let params = AttentionParams {
            layer: self.kv_slot,
            lengths: &pass.batch.lengths,
            q_to_kv: &self.heads.q_to_kv,
            head_dim: form.head_dim as usize,
            scale: form.scale.0,
            softcap: form.softcap.map(|cap| cap.0),
            sinks: weights.sinks.as_ref(),
            mask: self.mask,
        };
        let qkv = Qkv { q: &qk.q, k: &qk.k, v: &v };
        let heads = match &weights.keys {
            Keys::All => backend.attention(qkv, caches, &params),
            Keys::TopKBlocks(indexer) => {
                let top_k = indexer.top_k_blocks(pass, x, caches);
                backend.block_sparse_attention(&top_k, qkv, caches, &params)
            }
        };
        let heads = match form.value_dim {
            None => heads,
            Some(width) => backend.slice_heads(&heads, form.head_dim as usize, 0..width as usize),
        };
        let heads = match &gate {
            Some(gate) => backend.sigmoid_gate(heads, gate),
            None => heads,
        };
        let heads = match &weights.gate {
            Some(gate) => gate.apply(backend, x, heads),
            None => heads,
        };
        let part = backend.linear(&heads, &weights.o);
        Ok(pass.with_bias(Some(part), self.o_bias.as_ref()))
    }

    fn project(
        &self,
        pass: &ForwardPass<'_, B>,
        weights: &Weights<B>,
        x: &B::Tensor,
    ) -> Projected<B::Tensor> {
        let (backend, form) = (pass.backend, &self.form);
        let head_dim = form.head_dim as usize;
        let (mut q, k, mut v);
        match &weights.v {
            Values::Projected(own) => {
                [q, k, v] = Projection::apply_all(backend, x, [&weights.q, &weights.k, own]);
            }
            Values::Keys => {
                [q, k] = Projection::apply_all(backend, x, [&weights.q, &weights.k]);
                v = backend.slice_heads(&k, head_dim, 0..head_dim);
            }
        }
        let mut gate = None;
        if form.gated {
            let both = q;
            q = backend.slice_heads(&both, 2 * head_dim, 0..head_dim);
            gate = Some(backend.slice_heads(&both, 2 * head_dim, head_dim..2 * head_dim));
        }
        if let Some(ones) = &weights.value_norm {
            v = backend.norm(&v, &norm::without_gain(pass.spec, ones));
        }
        if let Some(scale) = form.value_scale {
            v = backend.scale(v, scale.0);
        }
        if let Some(width) = form.value_dim {
            // The cache has one width for both.
            let heads = self.heads.kv.len();
            let zeros = backend.zeros(pass.tokens(), heads * (head_dim - width as usize));
            v = backend.join_heads(&v, &zeros, heads);
        }
        Projected { qk: QueriesAndKeys { q, k }, v, gate }
    }

    /// Queries and keys with their positions.
    fn positioned(
        &self,
        pass: &ForwardPass<'_, B>,
        weights: &Weights<B>,
        qk: QueriesAndKeys<B::Tensor>,
    ) -> QueriesAndKeys<B::Tensor> {
        let (backend, form) = (pass.backend, &self.form);
        let part = RotatedPart { head_dim: form.head_dim as usize, offset: 0 };
        let qk = match pass.rotation(self.rope) {
            Some(rotation) => qk.map(|x| backend.rotate(x, rotation, part)),
            None => qk,
        };
        let mut qk = weights.qk_norm.after_rope(pass, self.rope.is_some(), qk);
        let unrotated = form.position_scale.as_ref().is_some_and(|scale| scale.unrotated);
        match &pass.query_scales {
            Some(scales) if !unrotated || self.rope.is_none() => {
                qk.q = backend.scale_rows(qk.q, scales);
            }
            _ => {}
        }
        qk
    }
}

impl<B: Backend> Weights<B> {
    /// None on a rank without query heads.
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::Attention,
        held: &Heads,
    ) -> Result<Option<Self>, LoadError> {
        let module = layer.name("self_attn");
        let name = |name: &str| format!("{module}.{name}");
        let q = TensorSlice::heads(&held.q, form.heads, form.head_dim);
        // Each head's query, followed by its gate.
        let q_rows = if form.gated { q.doubled() } else { q.clone() };
        let k = TensorSlice::heads(&held.kv, form.kv_heads, form.head_dim);
        let v = TensorSlice::heads(&held.kv, form.kv_heads, form.value_width());
        let out = TensorSlice::heads(&held.q, form.heads, form.value_width());
        let per_head = TensorSlice::heads(&held.q, form.heads, 1);
        let column =
            |module: &str, rows: &TensorSlice| loader.column(&name(module), rows, form.qkv_bias);
        let o = loader.matrix(&name("o_proj"), &loader.hidden(), &out)?;
        let gate = match &form.head_gate {
            None => None,
            Some(gate) => OutputGate::load(loader, gate, &module, [&per_head, &out])?,
        };
        let keys = match BlockIndexer::of_layer(loader, layer, form, held)? {
            Some(indexer) => Keys::TopKBlocks(indexer),
            None => Keys::All,
        };
        let v = if form.values_are_keys {
            Some(Values::Keys)
        } else {
            column("v_proj", &v)?.map(Values::Projected)
        };
        let (q_proj, k_proj) = (column("q_proj", &q_rows)?, column("k_proj", &k)?);
        let qk_norm = QueryKeyNorm::load(loader, form, &module, QueriesAndKeys { q: &q, k: &k })?;
        let (Some(q), Some(k), Some(v), Some(o)) = (q_proj, k_proj, v, o) else {
            return Ok(None);
        };
        let sinks = form
            .sinks
            .then(|| loader.vector(&name(form.sinks_in.as_deref().unwrap_or("sinks")), &per_head));
        let sinks = sinks.transpose()?;
        let value_norm = form.value_norm.then(|| loader.backend.ones(form.head_dim as usize));
        Ok(Some(Self { q, k, v, qk_norm, value_norm, sinks, gate, keys, o }))
    }
}
