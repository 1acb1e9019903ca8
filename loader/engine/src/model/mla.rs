//! Attention over a latent: what is cached for a token is one vector for all heads, from which
//! each head's keys and values follow linearly. Queries are brought into the latent's space, so
//! that keys and values never are computed ("absorbed").
//!
//! The projections to the latents are held whole by every rank, the heads are cut.

use shardpack_formats::spec::{GateFunction, Mla as MlaSpec, NormKind};

use super::{
    LoadError, Projection,
    index::Index,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{AttentionStep, Backend, NormStep, Qkv};

/// One rank's part of attention over a latent.
pub(super) struct Latent<B: Backend> {
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
    o_bias: Option<B::Vector>,
    /// Every head reads the one cached vector.
    q_to_kv: Vec<usize>,
}

struct Weights<B: Backend> {
    /// The queries' latent and its gain; absent where queries are projected at once.
    q_latent: Option<(Projection<B>, B::Vector)>,
    /// Heads of `nope + rope`, from the latent or from the hidden vector.
    q: B::Matrix,
    /// `kv_rank + rope`.
    kv: Projection<B>,
    kv_gain: B::Vector,
    /// What chooses keys; absent where all are read, and where those of the layer before are.
    index: Option<Index<B>>,
    /// For each head `[kv_rank, nope]`.
    embed_q: B::Matrix,
    /// For each head `[value, kv_rank]`.
    unembed_out: B::Matrix,
    /// One score more for each head held here.
    sinks: Option<B::Vector>,
    /// Gates of the heads' results, from the hidden vector, and what of them counts.
    gate: Option<(B::Matrix, GateFunction)>,
    o: B::Matrix,
}

impl<B: Backend> Latent<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        (layer, mla): (usize, &MlaSpec),
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let (held, full) = (&loader.shard.heads.q, loader.spec.attention.heads as usize);
        let heads = |width: u32| {
            let width = width as usize;
            Part { held: held.start * width..held.end * width, full: full * width }
        };
        let o_module = format!("{prefix}.o_proj");
        let o_bias = loader.bias_once(&o_module, loader.spec.attention.o_bias)?;
        let q_to_kv = vec![0; held.len()];
        let hidden = loader.hidden();
        let latent = |name: &str, norm: &str, width: u32, normed: u32| {
            let (module, width) = (format!("{prefix}.{name}"), Part::whole(width as usize));
            let gain = format!("{prefix}.{norm}.weight");
            let gain = loader.vector(&gain, &Part::whole(normed as usize))?;
            let projection = loader.column(&module, &width, mla.bias)?;
            Ok::<_, LoadError>((projection, gain))
        };
        let (kv, kv_gain) =
            latent("kv_a_proj_with_mqa", "kv_a_layernorm", mla.kv_rank + mla.rope, mla.kv_rank)?;
        let q_heads = heads(mla.nope + mla.rope);
        let (q_latent, q) = match mla.q_rank {
            None => (None, loader.matrix(&format!("{prefix}.q_proj"), &q_heads, &hidden)?),
            Some(rank) => {
                let (projection, gain) = latent("q_a_proj", "q_a_layernorm", rank, rank)?;
                let inputs = Part::whole(rank as usize);
                let q = loader.matrix(&format!("{prefix}.q_b_proj"), &q_heads, &inputs)?;
                (projection.map(|projection| (projection, gain)), q)
            }
        };
        let chooses = |_: &&_| !loader.spec.layers[layer].shares_keys;
        let index = mla.index.as_ref().filter(chooses);
        let index = index.map(|index| Index::load(loader, (mla, index), prefix)).transpose()?;
        let values = heads(mla.value);
        let o = loader.matrix(&o_module, &hidden, &values)?;
        let (Some(kv), Some(q), Some(o)) = (kv, q, o) else {
            return Ok(Self { weights: None, o_bias, q_to_kv });
        };
        let attention = &loader.spec.attention;
        let gate = attention.head_gate.as_ref().map(|gate| {
            let rows = if gate.per_head { heads(1) } else { values };
            let matrix = loader.matrix(&format!("{prefix}.{}", gate.module), &rows, &hidden)?;
            Ok::<_, LoadError>(matrix.map(|matrix| (matrix, gate.function)))
        });
        let sinks = attention.sinks.then(|| {
            let name = attention.sinks_in.as_deref().unwrap_or("sinks");
            loader.vector(&format!("{prefix}.{name}"), &heads(1))
        });
        let stack = Part { held: held.clone(), full };
        let per_head = |name: &str, outputs: u32, inputs: u32| {
            let [outputs, inputs] = [outputs, inputs].map(|size| Part::whole(size as usize));
            loader.stack(&format!("{prefix}.{name}"), &stack, &outputs, &inputs)
        };
        let weights = Weights {
            q_latent,
            q,
            kv,
            kv_gain,
            index,
            embed_q: per_head("embed_q", mla.kv_rank, mla.nope)?,
            unembed_out: per_head("unembed_out", mla.value, mla.kv_rank)?,
            sinks: sinks.transpose()?,
            gate: gate.transpose()?.flatten(),
            o,
        };
        Ok(Self { weights: Some(weights), o_bias, q_to_kv })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (index, mla): (usize, &MlaSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let part = self.weights.as_ref().map(|weights| {
            let at = AttentionStep {
                layer: step.cached(index),
                lengths: &step.batch.lengths,
                q_to_kv: &self.q_to_kv,
                head_dim: (mla.kv_rank + mla.rope) as usize,
                scale: step.spec.attention.scale.0,
                softcap: None,
                sinks: weights.sinks.as_ref(),
                mask: step.spec.layers[index].mask,
            };
            weights.forward(step, (index, mla), x, caches, &at)
        });
        step.with_bias(part, self.o_bias.as_ref())
    }
}

impl<B: Backend> Weights<B> {
    fn forward(
        &self,
        step: &Step<'_, B>,
        (at_layer, mla): (usize, &MlaSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
        at: &AttentionStep<'_, B::Vector>,
    ) -> B::Tensor {
        let backend = step.backend;
        let [rank, nope, rope] = [mla.kv_rank, mla.nope, mla.rope].map(|size| size as usize);
        let normed = |x: &B::Tensor, gain| {
            let norm = NormStep { kind: NormKind::Rms, eps: mla.eps.0, gain, bias: None };
            backend.norm(x, &norm)
        };
        let rotated = |x: B::Tensor| match step.rotation(&step.spec.layers[at_layer]) {
            Some(rotation) => backend.rotate(x, rotation, (rope, 0)),
            None => x,
        };
        let latent = self.q_latent.as_ref();
        let latent = latent.map(|(down, gain)| normed(&down.apply(backend, x), gain));
        let from = latent.as_ref().unwrap_or(x);
        if let (Some(index), Some(spec)) = (&self.index, &mla.index) {
            step.set_chosen(index.choose(step, (at_layer, mla, spec), [from, x], caches));
        }
        let q = backend.linear(from, &self.q);
        let heads = at.q_to_kv.len();
        let head = nope + rope;
        let plain = backend.slice_heads(&q, head, 0..nope);
        let turned = rotated(backend.slice_heads(&q, head, nope..head));
        let plain = backend.head_linear(&plain, &self.embed_q, heads);
        let mut q = backend.join_heads(&plain, &turned, heads);
        if let Some(scales) = &step.query_scales {
            q = backend.scale_rows(q, scales);
        }
        let kv = self.kv.apply(backend, x);
        let latent = normed(&backend.slice_heads(&kv, rank + rope, 0..rank), &self.kv_gain);
        let latent = match mla.kv_scale {
            Some(scale) => backend.scale(latent, scale.0),
            None => latent,
        };
        let turned = rotated(backend.slice_heads(&kv, rank + rope, rank..rank + rope));
        // What is cached serves as key and as value; of the values' sum the latent's part counts.
        let cached = backend.join_heads(&latent, &turned, 1);
        let qkv = Qkv { q: &q, k: &cached, v: &cached };
        let out = match mla.index {
            None => backend.attention(qkv, caches, at),
            Some(_) => step.with_chosen(|chosen| backend.attention_to(chosen, qkv, caches, at)),
        };
        let out = backend.slice_heads(&out, rank + rope, 0..rank);
        let out = backend.head_linear(&out, &self.unembed_out, heads);
        let out = match &self.gate {
            None => out,
            Some((matrix, function)) => {
                let gate = backend.linear(x, matrix);
                match function {
                    GateFunction::Sigmoid => backend.sigmoid_gate(out, &gate),
                    GateFunction::Softplus => backend.softplus_gate(out, &gate),
                }
            }
        };
        backend.linear(&out, &self.o)
    }
}
