//! Multi-head latent attention (DeepSeek-V2): one latent vector per token serves as key and value of
//! all heads.
//!
//! ```text
//! q = norm(x · Wq_a) · Wq_b                         [tokens, heads, nope + rope]
//! c, k_rope = x · Wkv_a                             [tokens, kv_rank], [tokens, rope]
//! q' = [q_nope · W_embed_q, rope(q_rope)]           [tokens, heads, kv_rank + rope]
//! cached = [norm(c), rope(k_rope)]                  [tokens, kv_rank + rope]
//! out = (softmax(scale · q' · cachedᵀ) · cached)[..kv_rank] · W_unembed_out   [tokens, heads, value]
//! y = gate(out) · Wo                                [tokens, hidden_size]
//! ```
//!
//! Queries are brought into the latent space ("absorbed"), so that keys and values of single heads
//! are never computed. Every rank holds the projections to the latents whole; heads are sharded.
//! With an indexer it is DeepSeek Sparse Attention (DeepSeek-V3.2): heads attend to the top-k keys,
//! and a layer without an indexer of its own reuses the indices of the layer before.

use shardpack_formats::{
    hex::HexF32,
    spec::{self, Mask, NormKind},
};

use super::{
    LoadError, Projection,
    indexer::Indexer,
    load::{LayerInfo, Loader, TensorSlice},
    output_gate::OutputGate,
    step::{CrossLayer, ForwardPass},
};
use crate::backend::{
    AttentionParams, Backend, LatentInputs, LatentParams, LatentParamsOf, NormParams, Qkv,
};

/// One rank's part of multi-head latent attention.
pub(super) struct Mla<B: Backend> {
    form: spec::Mla,
    /// Factor on `q · k`.
    scale: HexF32,
    mask: Mask,
    rope: Option<u32>,
    /// The layer in the caches.
    kv_slot: usize,
    /// Every head reads the one cached vector.
    q_to_kv: Vec<usize>,
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
    o_bias: Option<B::Vector>,
}

struct Weights<B: Backend> {
    /// Absent where queries are projected from the hidden vector.
    q_latent: Option<Latent<B>>,
    /// Heads of `nope + rope`, from the latent or from the hidden vector.
    q: B::Matrix,
    /// `kv_rank + rope`; the gain is of the first part.
    kv: Latent<B>,
    keys: Keys<B>,
    /// For each head `[kv_rank, nope]`.
    embed_q: B::Matrix,
    /// For each head `[value, kv_rank]`.
    unembed_out: B::Matrix,
    /// One score more for each head held here.
    sinks: Option<B::Vector>,
    gate: Option<OutputGate<B>>,
    o: B::Matrix,
}

/// A projection to a latent vector, and the gain of its norm.
struct Latent<B: Backend> {
    down: Projection<B>,
    gain: B::Vector,
}

/// Which keys heads attend to.
enum Keys<B: Backend> {
    All,
    /// Those that this layer's indexer selects.
    TopK(Indexer<B>),
    /// Those that the last indexer before this layer has selected.
    SharedTopK,
}

impl<B: Backend> Mla<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::Mla,
    ) -> Result<Self, LoadError> {
        let attention = &loader.spec.attention;
        let o_bias = loader.bias_once(&layer.name("self_attn.o_proj"), attention.o_bias)?;
        Ok(Self {
            form: form.clone(),
            scale: attention.scale,
            mask: layer.form.mask,
            rope: layer.form.rope,
            kv_slot: layer.slots.kv,
            q_to_kv: vec![0; loader.shard.heads.q.len()],
            weights: Weights::load(loader, layer, form)?,
            o_bias,
        })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        cross: &mut CrossLayer<B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref();
        let part = weights.map(|weights| self.attend(pass, cross, weights, x, caches));
        pass.with_bias(part, self.o_bias.as_ref())
    }

    fn attend(
        &self,
        pass: &ForwardPass<'_, B>,
        cross: &mut CrossLayer<B>,
        weights: &Weights<B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Tensor {
        let backend = pass.backend;
        let latent = weights.q_latent.as_ref();
        let latent = latent.map(|it| self.normed(pass, &it.down.apply(backend, x), &it.gain));
        let from = latent.as_ref().unwrap_or(x);
        if let Keys::TopK(indexer) = &weights.keys {
            cross.top_k = Some(indexer.top_k_keys(pass, from, x, caches));
        }
        let backend = pass.backend;
        let q = backend.linear(from, &weights.q);
        let kv = weights.kv.down.apply(backend, x);
        let params = self.params(pass, weights);
        let out = match weights.keys {
            Keys::All => backend.latent_attention(LatentInputs { q: &q, kv: &kv }, caches, &params),
            Keys::TopK(_) | Keys::SharedTopK => {
                // Invariant: a stage's first layer has an indexer (`shard::mla::check_index`).
                let top_k = cross.top_k.as_ref().expect("an indexer ran in this pass");
                let q = backend.absorbed_queries(&q, &params);
                let cached = backend.latents(&kv, &params);
                let qkv = Qkv { q: &q, k: &cached, v: &cached };
                let out = backend.sparse_attention(top_k, qkv, caches, &params.attention);
                backend.unabsorbed(&out, &params)
            }
        };
        let out = match &weights.gate {
            Some(gate) => gate.apply(backend, x, out),
            None => out,
        };
        backend.linear(&out, &weights.o)
    }

    /// The cached vector is key and value; of the weighted sum the latent's part counts.
    fn params<'a>(
        &'a self,
        pass: &'a ForwardPass<'_, B>,
        weights: &'a Weights<B>,
    ) -> LatentParamsOf<'a, B> {
        let spec::Mla { kv_rank, rope, nope, eps, kv_scale, .. } = &self.form;
        let [kv_rank, rope, nope] = [*kv_rank, *rope, *nope].map(|width| width as usize);
        let attention = AttentionParams {
            layer: self.kv_slot,
            lengths: &pass.batch.lengths,
            q_to_kv: &self.q_to_kv,
            head_dim: kv_rank + rope,
            scale: self.scale.0,
            softcap: None,
            sinks: weights.sinks.as_ref(),
            mask: self.mask,
        };
        LatentParams {
            attention,
            kv_rank,
            rope,
            nope,
            gain: &weights.kv.gain,
            eps: eps.0,
            kv_scale: kv_scale.map(|scale| scale.0),
            rotation: pass.rotation(self.rope),
            query_scales: pass.query_scales.as_deref(),
            embed_q: &weights.embed_q,
            unembed_out: &weights.unembed_out,
        }
    }

    fn normed(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor, gain: &B::Vector) -> B::Tensor {
        let params = NormParams { kind: NormKind::Rms, eps: self.form.eps.0, gain, bias: None };
        pass.backend.norm(x, &params)
    }
}

impl<B: Backend> Latent<B> {
    /// A projection to `width` elements, the first `normed_width` of which are normalised. None where
    /// nothing of it is held here.
    fn load(
        loader: &Loader<'_, B>,
        module: &str,
        norm: &str,
        [width, normed_width]: [u32; 2],
        has_bias: bool,
    ) -> Result<Option<Self>, LoadError> {
        let gain = TensorSlice::whole(normed_width as usize);
        let gain = loader.vector(&format!("{norm}.weight"), &gain)?;
        let down = loader.column(module, &TensorSlice::whole(width as usize), has_bias)?;
        Ok(down.map(|down| Self { down, gain }))
    }
}

impl<B: Backend> Weights<B> {
    /// None on a rank without heads.
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::Mla,
    ) -> Result<Option<Self>, LoadError> {
        let module = layer.name("self_attn");
        let name = |name: &str| format!("{module}.{name}");
        let (held, attention) = (&loader.shard.heads.q, &loader.spec.attention);
        let heads = |width: u32| TensorSlice::heads(held, attention.heads, width);
        let hidden = loader.hidden();
        let (down, norm) = (name("kv_a_proj_with_mqa"), name("kv_a_layernorm"));
        let width = form.kv_rank + form.rope;
        let kv = Latent::load(loader, &down, &norm, [width, form.kv_rank], form.bias)?;
        let q_heads = heads(form.nope + form.rope);
        let (q_latent, q) = match form.q_rank {
            None => (None, loader.matrix(&name("q_proj"), &q_heads, &hidden)?),
            Some(rank) => {
                let (down, norm) = (name("q_a_proj"), name("q_a_layernorm"));
                let latent = Latent::load(loader, &down, &norm, [rank, rank], form.bias)?;
                let inputs = TensorSlice::whole(rank as usize);
                (latent, loader.matrix(&name("q_b_proj"), &q_heads, &inputs)?)
            }
        };
        let keys = match &form.indexer {
            None => Keys::All,
            Some(_) if layer.form.reuses_top_k => Keys::SharedTopK,
            Some(index) => Keys::TopK(Indexer::load(loader, layer, form, index)?),
        };
        let values = heads(form.value);
        let o = loader.matrix(&name("o_proj"), &hidden, &values)?;
        let (Some(kv), Some(q), Some(o)) = (kv, q, o) else { return Ok(None) };
        let gate = match &attention.head_gate {
            Some(gate) => OutputGate::load(loader, gate, &module, [&heads(1), &values])?,
            None => None,
        };
        let sinks = attention.sinks.then(|| {
            loader.vector(&name(attention.sinks_in.as_deref().unwrap_or("sinks")), &heads(1))
        });
        let stack = heads(1);
        let per_head = |module: &str, outputs: u32, inputs: u32| {
            let [outputs, inputs] = [outputs, inputs].map(|size| TensorSlice::whole(size as usize));
            loader.stack(&name(module), &stack, &outputs, &inputs)
        };
        Ok(Some(Self {
            q_latent,
            q,
            kv,
            keys,
            embed_q: per_head("embed_q", form.kv_rank, form.nope)?,
            unembed_out: per_head("unembed_out", form.value, form.kv_rank)?,
            sinks: sinks.transpose()?,
            gate,
            o,
        }))
    }
}
