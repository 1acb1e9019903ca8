//! Models: one definition each, generic over the [`Backend`].
//!
//! Today there is one, the dense decoder with grouped-query attention (`dense-gqa`), which covers
//! Llama, Mistral and Qwen 2 and 3. What it computes is in the package's normalised architecture
//! and what this rank holds of it in the layout; no name of a model family is looked at.

use std::ops::Range;

use shardpack_formats::{
    Spec,
    spec::{Activation, NormKind},
};

use crate::backend::{AttentionStep, Backend, CacheShape, Qkv, Ranks, StepError};

mod error;
mod load;
mod shard;

pub use error::LoadError;
pub use shard::Shard;

/// Tokens of one step: rows of one or several sequences, one sequence after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// One token per row.
    pub tokens: Vec<u32>,
    /// Each row's position in its sequence.
    pub positions: Vec<u32>,
    /// Rows of each sequence; they follow what its cache holds.
    pub lengths: Vec<usize>,
    /// Rows whose logits are wanted, in this order.
    pub logit_rows: Vec<usize>,
}

/// One rank's part of a model.
pub struct Model<B: Backend> {
    spec: Spec,
    shard: Shard,
    embedding: Option<B::Matrix>,
    layers: Vec<Layer<B>>,
    norm: B::Vector,
    head: Head<B>,
}

/// The output head.
enum Head<B: Backend> {
    /// Own matrix, cut by vocabulary; absent where the cut is empty.
    Own(Option<B::Matrix>),
    /// The embedding, cut as it is.
    Tied,
}

struct Layer<B: Backend> {
    attention_norm: B::Vector,
    /// Absent on a rank without query heads.
    attention: Option<AttentionWeights<B>>,
    o_bias: Option<B::Vector>,
    ffn_norm: B::Vector,
    /// Absent on a rank without inner columns.
    ffn: Option<FfnWeights<B>>,
    down_bias: Option<B::Vector>,
}

/// A column-cut projection.
struct Projection<B: Backend> {
    matrix: B::Matrix,
    bias: Option<B::Vector>,
}

struct AttentionWeights<B: Backend> {
    q: Projection<B>,
    k: Projection<B>,
    v: Projection<B>,
    /// Gains for the heads of queries and keys.
    qk_norms: Option<[B::Vector; 2]>,
    o: B::Matrix,
}

struct FfnWeights<B: Backend> {
    gate: Projection<B>,
    up: Projection<B>,
    down: B::Matrix,
}

impl<B: Backend> Projection<B> {
    fn apply(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        let y = backend.linear(x, &self.matrix);
        match &self.bias {
            Some(bias) => backend.add_bias(y, bias),
            None => y,
        }
    }
}

impl<B: Backend> Model<B> {
    /// What the model computes.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// What this rank holds.
    #[must_use]
    pub const fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Room for one sequence.
    #[must_use]
    pub fn cache_shape(&self) -> CacheShape {
        CacheShape {
            layers: self.layers.len(),
            kv_heads: self.shard.kv.len(),
            head_dim: self.spec.attention.head_dim as usize,
        }
    }

    /// Runs a step and returns the logits `[logit_rows, vocab_size]`, the same on every rank;
    /// none where no row was asked for. `caches` are in the order of the batch's sequences.
    pub fn forward(
        &self,
        backend: &B,
        batch: &Batch,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<Option<B::Tensor>, StepError> {
        let eps = self.spec.norm.eps.0;
        let NormKind::Rms = self.spec.norm.kind;
        let ropes = &self.spec.ropes;
        let rotations: Vec<_> =
            ropes.iter().map(|rope| backend.rotation(rope, &batch.positions)).collect();
        let mut x = self.embed(backend, &batch.tokens, ranks)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = backend.rms_norm(&x, &layer.attention_norm, eps);
            let rotation = self.spec.layers[index].rope.map(|rope| &rotations[rope as usize]);
            let at = AttentionStep {
                layer: index,
                lengths: &batch.lengths,
                q_to_kv: &self.shard.q_to_kv,
                head_dim: self.spec.attention.head_dim as usize,
                scale: self.spec.attention.scale.0,
                mask: self.spec.layers[index].mask,
            };
            let part = self.attention(backend, layer, &normed, rotation, caches, &at);
            let part = self.finish(backend, part, layer.o_bias.as_ref(), batch, ranks)?;
            x = backend.add(x, &part);
            let normed = backend.rms_norm(&x, &layer.ffn_norm, eps);
            let part = layer.ffn.as_ref().map(|ffn| self.ffn(backend, ffn, &normed));
            let part = self.finish(backend, part, layer.down_bias.as_ref(), batch, ranks)?;
            x = backend.add(x, &part);
        }
        if batch.logit_rows.is_empty() {
            return Ok(None);
        }
        let rows = backend.select_rows(&x, &batch.logit_rows);
        let normed = backend.rms_norm(&rows, &self.norm, eps);
        self.logits(backend, &normed, batch.logit_rows.len(), ranks).map(Some)
    }

    fn embed(
        &self,
        backend: &B,
        tokens: &[u32],
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let x = match &self.embedding {
            Some(table) => backend.embed(tokens, table, self.embedding_range()),
            None => backend.zeros(tokens.len(), self.spec.hidden_size as usize),
        };
        if self.shard.embedding_cut { backend.all_reduce(x, ranks) } else { Ok(x) }
    }

    /// Tokens whose embeddings are held here.
    fn embedding_range(&self) -> Range<usize> {
        if self.shard.embedding_cut {
            self.shard.vocab[self.shard.rank].clone()
        } else {
            0..self.spec.vocab_size as usize
        }
    }

    /// This rank's part of the output of attention; none where it has no heads.
    fn attention(
        &self,
        backend: &B,
        layer: &Layer<B>,
        x: &B::Tensor,
        rotation: Option<&B::Rotation>,
        caches: &mut [&mut B::Cache],
        step: &AttentionStep<'_>,
    ) -> Option<B::Tensor> {
        let weights = layer.attention.as_ref()?;
        let eps = self.spec.norm.eps.0;
        let prepare = |projection: &Projection<B>, gain: Option<&B::Vector>| {
            let mut y = projection.apply(backend, x);
            if let Some(gain) = gain {
                y = backend.rms_norm(&y, gain, eps);
            }
            match rotation {
                Some(rotation) => backend.rotate(y, rotation, step.head_dim),
                None => y,
            }
        };
        let [q_norm, k_norm] = match &weights.qk_norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        let q = prepare(&weights.q, q_norm);
        let k = prepare(&weights.k, k_norm);
        let v = weights.v.apply(backend, x);
        let heads = backend.attention(Qkv { q: &q, k: &k, v: &v }, caches, step);
        Some(backend.linear(&heads, &weights.o))
    }

    fn ffn(&self, backend: &B, weights: &FfnWeights<B>, x: &B::Tensor) -> B::Tensor {
        let Activation::SiluGlu = self.spec.ffn.activation;
        let gate = weights.gate.apply(backend, x);
        let up = weights.up.apply(backend, x);
        backend.linear(&backend.silu_glu(gate, &up), &weights.down)
    }

    /// The sum over ranks of a row-cut projection. A bias is held by one rank and so added once;
    /// a rank without a part takes part with zeros.
    fn finish(
        &self,
        backend: &B,
        part: Option<B::Tensor>,
        bias: Option<&B::Vector>,
        batch: &Batch,
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let zeros = || backend.zeros(batch.tokens.len(), self.spec.hidden_size as usize);
        let mut part = part.unwrap_or_else(zeros);
        if let Some(bias) = bias {
            part = backend.add_bias(part, bias);
        }
        backend.all_reduce(part, ranks)
    }

    fn logits(
        &self,
        backend: &B,
        x: &B::Tensor,
        rows: usize,
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let (matrix, cut) = match &self.head {
            Head::Own(matrix) => (matrix.as_ref(), true),
            // A whole embedding gives every rank all logits; there is nothing to gather.
            Head::Tied => (self.embedding.as_ref(), self.shard.embedding_cut),
        };
        let part = match matrix {
            Some(matrix) => backend.linear(x, matrix),
            None => backend.zeros(rows, 0),
        };
        if !cut {
            return Ok(part);
        }
        let widths: Vec<_> = self.shard.vocab.iter().map(ExactSizeIterator::len).collect();
        backend.gather_columns(part, &widths, ranks)
    }
}

#[cfg(test)]
mod tests;
