//! Grouped-query attention.

use shardpack_formats::spec::{self, QkNorm};

use super::{
    LoadError, Projection,
    load::{Loader, Part},
    norm::Norm,
    step::Step,
};
use crate::backend::{AttentionStep, Backend, Qkv, StepError};

/// One rank's part of grouped-query attention.
pub(super) struct Attention<B: Backend> {
    /// Absent on a rank without query heads.
    weights: Option<Weights<B>>,
    o_bias: Option<B::Vector>,
}

struct Weights<B: Backend> {
    q: Projection<B>,
    k: Projection<B>,
    v: Projection<B>,
    /// For queries and keys.
    qk_norms: Option<[Norm<B>; 2]>,
    sinks: Option<B::Vector>,
    o: B::Matrix,
}

impl<B: Backend> Attention<B> {
    pub(super) fn load(loader: &Loader<'_, B>, prefix: &str) -> Result<Self, LoadError> {
        let attention = &loader.spec.attention;
        let o_module = format!("{prefix}.o_proj");
        let o_bias = loader.bias_once(&o_module, attention.o_bias)?;
        let q = loader.heads(&loader.shard.q, attention.heads);
        // Each head's query, and its gate behind it.
        let q_rows = if attention.gated { q.doubled() } else { q.clone() };
        let kv = loader.heads(&loader.shard.kv, attention.kv_heads);
        let column = |name: &str, rows: &Part| {
            loader.column(&format!("{prefix}.{name}"), rows, attention.qkv_bias)
        };
        let o = loader.matrix(&o_module, &loader.hidden(), &q)?;
        let parts = (column("q_proj", &q_rows)?, column("k_proj", &kv)?, column("v_proj", &kv)?, o);
        let qk_norms = qk_norms(loader, prefix, [&q, &kv])?;
        let (Some(q), Some(k), Some(v), Some(o)) = parts else {
            return Ok(Self { weights: None, o_bias });
        };
        let sinks = attention.sinks.then(|| {
            let full = attention.heads as usize;
            let part = Part { held: loader.shard.q.clone(), full };
            loader.vector(&format!("{prefix}.sinks"), &part)
        });
        let sinks = sinks.transpose()?;
        Ok(Self { weights: Some(Weights { q, k, v, qk_norms, sinks, o }), o_bias })
    }

    /// This rank's summand of the output; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        index: usize,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<Option<B::Tensor>, StepError> {
        let backend = step.backend;
        let layer = &step.spec.layers[index];
        let Some(weights) = &self.weights else {
            if step.spec.attention.qk_norm == QkNorm::Full {
                backend.all_reduce(backend.zeros(step.batch.tokens.len(), 2), step.ranks)?;
            }
            return Ok(step.with_bias(None, self.o_bias.as_ref()));
        };
        let head_dim = step.spec.attention.head_dim as usize;
        let [mut q, k, v] = Projection::apply_all(backend, x, [&weights.q, &weights.k, &weights.v]);
        let mut gate = None;
        if step.spec.attention.gated {
            let both = q;
            q = backend.slice_heads(&both, 2 * head_dim, 0..head_dim);
            gate = Some(backend.slice_heads(&both, 2 * head_dim, head_dim..2 * head_dim));
        }
        let [q, k] = weights.queries_and_keys(step, q, k)?;
        let [mut q, mut k] = match step.rotation(layer) {
            Some(rotation) => [q, k].map(|x| backend.rotate(x, rotation, head_dim)),
            None => [q, k],
        };
        if let (QkNorm::HeadAfterRope, Some([q_norm, k_norm])) =
            (step.spec.attention.qk_norm, &weights.qk_norms)
        {
            let norm = &step.spec.norm;
            [q, k] = [q_norm.apply(backend, norm, &q), k_norm.apply(backend, norm, &k)];
        }
        if let Some(scales) = &step.query_scales {
            q = backend.scale_rows(q, scales);
        }
        let at = weights.step(step, index, layer);
        let heads = backend.attention(Qkv { q: &q, k: &k, v: &v }, caches, &at);
        let heads = match &gate {
            Some(gate) => backend.sigmoid_gate(heads, gate),
            None => heads,
        };
        let part = backend.linear(&heads, &weights.o);
        Ok(step.with_bias(Some(part), self.o_bias.as_ref()))
    }
}

/// Norms of queries and keys; none on a rank without heads.
fn qk_norms<B: Backend>(
    loader: &Loader<'_, B>,
    prefix: &str,
    [q, kv]: [&Part; 2],
) -> Result<Option<[Norm<B>; 2]>, LoadError> {
    let attention = &loader.spec.attention;
    let one_head = Part::whole(attention.head_dim as usize);
    let [q, kv] = match attention.qk_norm {
        QkNorm::None => return Ok(None),
        QkNorm::Head | QkNorm::HeadAfterRope => [&one_head, &one_head],
        QkNorm::Full if q.held.is_empty() => return Ok(None),
        QkNorm::Full => [q, kv],
    };
    let norm = |name: &str, width| Norm::load(loader, &format!("{prefix}.{name}"), width);
    let [q_name, k_name] = match attention.qk_norm {
        QkNorm::HeadAfterRope => ["query_layernorm", "key_layernorm"],
        _ => ["q_norm", "k_norm"],
    };
    Ok(Some([norm(q_name, q)?, norm(k_name, kv)?]))
}

impl<B: Backend> Weights<B> {
    /// Normalised queries and keys.
    fn queries_and_keys(
        &self,
        step: &Step<'_, B>,
        q: B::Tensor,
        k: B::Tensor,
    ) -> Result<[B::Tensor; 2], StepError> {
        let backend = step.backend;
        let (attention, norm) = (&step.spec.attention, &step.spec.norm);
        let Some([q_norm, k_norm]) = &self.qk_norms else { return Ok([q, k]) };
        match attention.qk_norm {
            QkNorm::None | QkNorm::HeadAfterRope => return Ok([q, k]),
            QkNorm::Head => {
                return Ok([q_norm.apply(backend, norm, &q), k_norm.apply(backend, norm, &k)]);
            }
            QkNorm::Full => {}
        }
        let head_dim = attention.head_dim as usize;
        // A key-value head that several ranks hold counts once.
        let [held, owned] = [&step.shard.kv, &step.shard.kv_owned];
        let owned = if owned.is_empty() {
            0..0
        } else {
            (owned.start - held.start) * head_dim..(owned.end - held.start) * head_dim
        };
        let sums = backend.square_sums(&[(&q, 0..step.shard.q.len() * head_dim), (&k, owned)]);
        let sums = backend.all_reduce(sums, step.ranks)?;
        let full = |heads: u32| heads as usize * head_dim;
        let q = backend.norm_by_sums(q, &q_norm.step(norm), (&sums, 0), full(attention.heads));
        let k = backend.norm_by_sums(k, &k_norm.step(norm), (&sums, 1), full(attention.kv_heads));
        Ok([q, k])
    }

    fn step<'a>(
        &'a self,
        step: &'a Step<'_, B>,
        index: usize,
        layer: &spec::Layer,
    ) -> AttentionStep<'a, B::Vector> {
        let attention = &step.spec.attention;
        AttentionStep {
            layer: step.cached(index),
            lengths: &step.batch.lengths,
            q_to_kv: &step.shard.q_to_kv,
            head_dim: attention.head_dim as usize,
            scale: attention.scale.0,
            softcap: attention.softcap.map(|cap| cap.0),
            sinks: self.sinks.as_ref(),
            mask: layer.mask,
        }
    }
}
