//! Grouped-query attention.

use shardpack_formats::spec::{self, GateFunction, QkNorm};

use super::{
    LoadError, Projection,
    blocks::Blocks,
    load::{Loader, Part},
    norm::Norm,
    shard::Heads,
    step::Step,
};
use crate::backend::{AttentionStep, Backend, NormStep, Qkv, StepError};

/// One rank's part of grouped-query attention.
pub(super) struct Attention<B: Backend> {
    /// Absent on a rank without query heads.
    weights: Option<Weights<B>>,
    o_bias: Option<B::Vector>,
}

struct Weights<B: Backend> {
    q: Projection<B>,
    k: Projection<B>,
    /// Absent where keys are values too.
    v: Option<Projection<B>>,
    /// For queries and keys.
    qk_norms: Option<[Norm<B>; 2]>,
    /// Of a norm without gains, one for each element of a head.
    ones: Option<B::Vector>,
    sinks: Option<B::Vector>,
    gate: Option<B::Matrix>,
    /// Absent where all keys are attended to.
    blocks: Option<Blocks<B>>,
    o: B::Matrix,
}

/// Queries, keys and values as they are cached, and the gate within the queries' projection.
struct Parts<T> {
    q: T,
    k: T,
    v: T,
    gate: Option<T>,
}

impl<B: Backend> Attention<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        index: usize,
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let attention = loader.spec.attention_of(index);
        let held = loader.shard.heads_of(&loader.spec.layers[index]);
        let (head_dim, value_dim) = (attention.head_dim, attention.value_width());
        let o_module = format!("{prefix}.o_proj");
        let o_bias = loader.bias_once(&o_module, attention.o_bias)?;
        let q = Part::heads(&held.q, attention.heads, head_dim);
        // Each head's query, and its gate behind it.
        let q_rows = if attention.gated { q.doubled() } else { q.clone() };
        let k = Part::heads(&held.kv, attention.kv_heads, head_dim);
        let v = Part::heads(&held.kv, attention.kv_heads, value_dim);
        let out = Part::heads(&held.q, attention.heads, value_dim);
        let column = |name: &str, rows: &Part| {
            loader.column(&format!("{prefix}.{name}"), rows, attention.qkv_bias)
        };
        let o = loader.matrix(&o_module, &loader.hidden(), &out)?;
        let gate = match &attention.head_gate {
            None => None,
            Some(gate) => {
                let each = Part::heads(&held.q, attention.heads, 1);
                let rows = if gate.per_head { &each } else { &out };
                loader.matrix(&format!("{prefix}.{}", gate.module), rows, &loader.hidden())?
            }
        };
        let blocks = Blocks::of_layer(loader, (index, attention), prefix, held)?;
        let v = if attention.values_are_keys { None } else { column("v_proj", &v)? };
        let parts = (column("q_proj", &q_rows)?, column("k_proj", &k)?, o);
        let qk_norms = qk_norms(loader, attention, prefix, [&q, &k])?;
        let (Some(q), Some(k), Some(o)) = parts else {
            return Ok(Self { weights: None, o_bias });
        };
        let sinks = attention.sinks.then(|| {
            let part = Part::heads(&held.q, attention.heads, 1);
            let name = attention.sinks_in.as_deref().unwrap_or("sinks");
            loader.vector(&format!("{prefix}.{name}"), &part)
        });
        let sinks = sinks.transpose()?;
        let plain = attention.value_norm || attention.qk_norm == QkNorm::PlainAfterRope;
        let ones = plain.then(|| loader.backend.ones(head_dim as usize));
        Ok(Self {
            weights: Some(Weights { q, k, v, qk_norms, ones, sinks, gate, blocks, o }),
            o_bias,
        })
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
        let attention = step.spec.attention_of(index);
        let Some(weights) = &self.weights else {
            if attention.qk_norm == QkNorm::Full {
                backend.all_reduce(backend.zeros(step.batch.tokens.len(), 2), step.ranks)?;
            }
            return Ok(step.with_bias(None, self.o_bias.as_ref()));
        };
        let held = step.shard.heads_of(&step.spec.layers[index]);
        let Parts { q, k, v, gate } = weights.project(step, (attention, held), x);
        let [q, k] = weights.queries_and_keys(step, (attention, held), q, k)?;
        let [q, k, v] = match attention.limit {
            Some(limit) => [q, k, v].map(|x| backend.limit(x, limit.0)),
            None => [q, k, v],
        };
        let [q, k] = weights.placed(step, index, q, k);
        let at = weights.step(step, index, (attention, held));
        let qkv = Qkv { q: &q, k: &k, v: &v };
        let heads = match weights.blocks.as_ref().zip(attention.blocks.as_ref()) {
            None => backend.attention(qkv, caches, &at),
            Some((blocks, form)) => {
                let chosen = blocks.choose(step, (index, form, held), x, caches);
                backend.attention_to(&chosen, qkv, caches, &at)
            }
        };
        let heads = match attention.value_dim {
            None => heads,
            Some(width) => {
                backend.slice_heads(&heads, attention.head_dim as usize, 0..width as usize)
            }
        };
        let heads = match &gate {
            Some(gate) => backend.sigmoid_gate(heads, gate),
            None => heads,
        };
        let heads = match &weights.gate {
            Some(matrix) => {
                let gate = backend.linear(x, matrix);
                match attention.head_gate.as_ref().map(|gate| gate.function) {
                    Some(GateFunction::Softplus) => backend.softplus_gate(heads, &gate),
                    _ => backend.sigmoid_gate(heads, &gate),
                }
            }
            None => heads,
        };
        let part = backend.linear(&heads, &weights.o);
        Ok(step.with_bias(Some(part), self.o_bias.as_ref()))
    }
}

/// Norms of queries and keys; none on a rank without heads.
fn qk_norms<B: Backend>(
    loader: &Loader<'_, B>,
    attention: &spec::Attention,
    prefix: &str,
    [q, kv]: [&Part; 2],
) -> Result<Option<[Norm<B>; 2]>, LoadError> {
    let one_head = Part::whole(attention.head_dim as usize);
    let [q, kv] = match attention.qk_norm {
        QkNorm::None | QkNorm::PlainAfterRope => return Ok(None),
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
    /// Projections of the rows, values as wide as keys.
    fn project(
        &self,
        step: &Step<'_, B>,
        (attention, held): (&spec::Attention, &Heads),
        x: &B::Tensor,
    ) -> Parts<B::Tensor> {
        let backend = step.backend;
        let head_dim = attention.head_dim as usize;
        let (mut q, k, mut v);
        if let Some(own) = &self.v {
            [q, k, v] = Projection::apply_all(backend, x, [&self.q, &self.k, own]);
        } else {
            [q, k] = Projection::apply_all(backend, x, [&self.q, &self.k]);
            v = backend.slice_heads(&k, head_dim, 0..head_dim);
        }
        let mut gate = None;
        if attention.gated {
            let both = q;
            q = backend.slice_heads(&both, 2 * head_dim, 0..head_dim);
            gate = Some(backend.slice_heads(&both, 2 * head_dim, head_dim..2 * head_dim));
        }
        if let (true, Some(ones)) = (attention.value_norm, &self.ones) {
            v = backend.norm(&v, &plain_norm(step, ones));
        }
        if let Some(scale) = attention.value_scale {
            v = backend.scale(v, scale.0);
        }
        if let Some(width) = attention.value_dim {
            // The cache has one width for both.
            let heads = held.kv.len();
            let rest = heads * (head_dim - width as usize);
            let zeros = backend.zeros(step.batch.tokens.len(), rest);
            v = backend.join_heads(&v, &zeros, heads);
        }
        Parts { q, k, v, gate }
    }

    /// Queries and keys with their positions.
    fn placed(
        &self,
        step: &Step<'_, B>,
        index: usize,
        q: B::Tensor,
        k: B::Tensor,
    ) -> [B::Tensor; 2] {
        let backend = step.backend;
        let (attention, layer) = (step.spec.attention_of(index), &step.spec.layers[index]);
        let head_dim = attention.head_dim as usize;
        let [mut q, mut k] = match step.rotation(layer) {
            Some(rotation) => [q, k].map(|x| backend.rotate(x, rotation, (head_dim, 0))),
            None => [q, k],
        };
        let norm = &step.spec.norm;
        match (attention.qk_norm, &self.qk_norms, &self.ones) {
            (QkNorm::HeadAfterRope, Some([q_norm, k_norm]), _) => {
                [q, k] = [q_norm.apply(backend, norm, &q), k_norm.apply(backend, norm, &k)];
            }
            (QkNorm::PlainAfterRope, _, Some(ones)) if layer.rope.is_some() => {
                [q, k] = [q, k].map(|x| backend.norm(&x, &plain_norm(step, ones)));
            }
            _ => {}
        }
        let unrotated = attention.position_scale.as_ref().is_some_and(|scale| scale.unrotated);
        match &step.query_scales {
            Some(scales) if !unrotated || layer.rope.is_none() => {
                q = backend.scale_rows(q, scales);
            }
            _ => {}
        }
        [q, k]
    }

    /// Normalised queries and keys.
    fn queries_and_keys(
        &self,
        step: &Step<'_, B>,
        (attention, heads): (&spec::Attention, &Heads),
        q: B::Tensor,
        k: B::Tensor,
    ) -> Result<[B::Tensor; 2], StepError> {
        let backend = step.backend;
        let norm = &step.spec.norm;
        let Some([q_norm, k_norm]) = &self.qk_norms else { return Ok([q, k]) };
        match attention.qk_norm {
            QkNorm::None | QkNorm::HeadAfterRope | QkNorm::PlainAfterRope => return Ok([q, k]),
            QkNorm::Head => {
                return Ok([q_norm.apply(backend, norm, &q), k_norm.apply(backend, norm, &k)]);
            }
            QkNorm::Full => {}
        }
        let head_dim = attention.head_dim as usize;
        // A key-value head that several ranks hold counts once.
        let [held, owned] = [&heads.kv, &heads.kv_owned];
        let owned = if owned.is_empty() {
            0..0
        } else {
            (owned.start - held.start) * head_dim..(owned.end - held.start) * head_dim
        };
        let sums = backend.square_sums(&[(&q, 0..heads.q.len() * head_dim), (&k, owned)]);
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
        (attention, held): (&spec::Attention, &'a Heads),
    ) -> AttentionStep<'a, B::Vector> {
        AttentionStep {
            layer: step.cached(index),
            lengths: &step.batch.lengths,
            q_to_kv: &held.q_to_kv,
            head_dim: attention.head_dim as usize,
            scale: attention.scale.0,
            softcap: attention.softcap.map(|cap| cap.0),
            sinks: self.sinks.as_ref(),
            mask: step.spec.layers[index].mask,
        }
    }
}

/// A norm without gains, by the model's formula.
fn plain_norm<'a, B: Backend>(step: &Step<'_, B>, ones: &'a B::Vector) -> NormStep<'a, B::Vector> {
    let norm = &step.spec.norm;
    NormStep { kind: norm.kind, eps: norm.eps.0, gain: ones, bias: None }
}
