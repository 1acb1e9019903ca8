//! Models: one definition, generic over the [`Backend`].
//!
//! A decoder is a stack of [`layer`](self)s, each a mixer (attention or what stands in its place) and a
//! feed-forward part around the residual stream, as the package's normalised architecture says; what
//! this rank holds of it is in the layout. No code depends on the name of a model family.
//!
//! | module | what it holds |
//! |---|---|
//! | `layer`, `residual` | one layer, its residual wiring, hyper-connections |
//! | `mixer` | attention, MLA, compressed attention, linear attention, short convolutions |
//! | `ffn` | dense, mixture of experts, parallel dense + MoE, shortcut-connected MoE |
//! | `step` | one forward pass: what layers share, and what one hands to another |
//! | `shard` | what this rank holds, checked against the architecture |
//! | `load` | from a package's tensors to weights |
//! | `layerwise` | one layer in memory at a time |

use std::ops::Range;

use shardpack_formats::Spec;

use crate::backend::{Backend, CacheShape, CompressedKvShape, LayerShape, Ranks, StepError};

mod attention;
mod block_indexer;
mod compressed_attention;
mod compressor;
mod dense_ffn;
mod embedding_and_head;
mod embedding_dense;
mod error;
mod ffn;
mod gated_delta_net;
mod group_norm;
mod hyper_connections;
mod indexer;
mod kda;
mod layer;
mod layerwise;
mod linear_attention;
mod load;
mod mamba2;
mod mixer;
mod mla;
mod moe;
mod norm;
mod output_gate;
mod parallel_moe;
mod qk_norm;
mod residual;
mod router;
mod shard;
mod short_convolution;
mod stage;
mod step;

pub use error::LoadError;
pub use layerwise::{CrossLayerState, LayerwiseModel, LoadedLayer};
pub use shard::{Heads, LinearHeads, Shard};

/// Tokens of one step: rows of one or several sequences, one sequence after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// One token per row.
    pub tokens: Vec<u32>,
    /// Each row's position in its sequence.
    pub positions: Vec<u32>,
    /// Rows of each sequence; they follow what its cache holds.
    pub lengths: Vec<usize>,
    /// Of each sequence, the last rows that may be rolled back afterwards (draft tokens); empty where none are.
    pub drafts: Vec<usize>,
    /// Tokens that each sequence may have in the end; empty where every sequence ends with this
    /// step. Some position embeddings depend on it, so it must not change from step to step.
    pub totals: Vec<u32>,
    /// Rows whose logits are wanted, in this order.
    pub logit_rows: Vec<usize>,
    /// Rows whose hidden vectors are wanted, in this order.
    pub hidden_rows: Vec<usize>,
}

/// What a step computes of the rows that were asked for.
pub struct StepOutputs<T> {
    /// This rank's part of the logits, `[logit_rows, tokens held]`.
    pub logits: Option<T>,
    /// Hidden vectors after the last norm, `[hidden_rows, hidden_size]`; on ranks of the last stage.
    pub hidden: Option<T>,
}

impl Batch {
    /// For every row the tokens that its sequence has in the end.
    fn row_totals(&self) -> Vec<u32> {
        let mut rows = Vec::with_capacity(self.positions.len());
        for (sequence, length) in self.lengths.iter().enumerate() {
            let last = (rows.len() + length).checked_sub(1).and_then(|row| self.positions.get(row));
            let total = self.totals.get(sequence).copied();
            let total = total.unwrap_or_else(|| last.map_or(0, |last| last + 1));
            rows.extend(std::iter::repeat_n(total, *length));
        }
        rows
    }
}

/// One rank's part of a model.
pub struct Model<B: Backend> {
    spec: Spec,
    shard: Shard,
    embedding_and_head: embedding_and_head::EmbeddingAndHead<B>,
    embedding_dense: embedding_dense::EmbeddingDense,
    layers: Vec<layer::Layer<B>>,
}

/// A column-parallel projection.
struct Projection<B: Backend> {
    matrix: B::Matrix,
    bias: Option<B::Vector>,
}

impl<B: Backend> Projection<B> {
    fn apply(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        let [y] = Self::apply_all(backend, x, [self]);
        y
    }

    /// Several projections of the same vectors.
    fn apply_all<const N: usize>(
        backend: &B,
        x: &B::Tensor,
        projections: [&Self; N],
    ) -> [B::Tensor; N] {
        let mut biases = projections.map(|projection| projection.bias.as_ref()).into_iter();
        backend.linears(x, projections.map(|projection| &projection.matrix)).map(|y| {
            match biases.next().flatten() {
                Some(bias) => backend.add_bias(y, bias),
                None => y,
            }
        })
    }
}

/// Width of the indexer's keys.
fn index_width(spec: &Spec) -> u32 {
    let of_mla = spec.mla.as_ref().and_then(|mla| Some(mla.indexer.as_ref()?.width));
    let attentions = [Some(&spec.attention), spec.second_attention.as_ref()];
    let of_blocks =
        attentions.into_iter().flatten().find_map(|it| Some(it.block_sparse.as_ref()?.width));
    of_mla.or(of_blocks).unwrap_or_default()
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
        // A rank without heads attends to nothing.
        let attends = |it: &usize| self.shard.attends(&self.spec.layers[*it]);
        let indexes = |it: &usize| self.shard.indexes(&self.spec, &self.spec.layers[*it]);
        let layers = || self.shard.layers(&self.spec);
        let cached = |layer: usize| LayerShape {
            kv_heads: self.shard.heads_of(&self.spec.layers[layer]).kv.len(),
            head_dim: match &self.spec.mla {
                None => self.spec.attention_of(layer).head_dim as usize,
                // The latent and the rotated part, once for all heads.
                Some(mla) => (mla.kv_rank + mla.rope) as usize,
            },
        };
        CacheShape {
            layers: layers().filter(attends).map(cached).collect(),
            states: layers().filter(|it| self.spec.layers[*it].has_state()).count(),
            keys_are_values: self.spec.mla.is_some() || self.spec.compressed_attention.is_some(),
            indexes: layers().filter(indexes).count(),
            index_width: index_width(&self.spec) as usize,
            entries: layers().filter(attends).filter_map(|it| self.entry_shape(it)).collect(),
        }
    }

    /// Compressed KV entries of a layer, if it has some.
    fn entry_shape(&self, layer: usize) -> Option<CompressedKvShape> {
        let index = self.spec.compressed_attention.as_ref()?.indexer.as_ref();
        let entries = self.spec.layers[layer].compressed_kv?;
        Some(CompressedKvShape {
            ratio: entries.compression_ratio as usize,
            width: self.spec.attention.head_dim as usize,
            key_width: index.filter(|_| entries.sparse).map_or(0, |index| index.width as usize),
        })
    }

    /// Whether a sequence can begin with pages of another: not where a layer keeps a recurrent state,
    /// which pages do not hold, nor where tokens see those after them.
    #[must_use]
    pub fn reuses_prefixes(&self) -> bool {
        !self.spec.has_states() && !self.spec.is_bidirectional()
    }

    /// The embedding of a pooled vector: what the dense layers after the pooling make of it.
    #[must_use]
    pub fn embedding_of(&self, pooled: Vec<f32>) -> Vec<f32> {
        self.embedding_dense.apply(pooled)
    }

    /// The ranks of this rank's stage, which all-reduce among themselves.
    #[must_use]
    pub fn own_ranks<'a>(&self, ranks: &Ranks<'a>) -> Ranks<'a> {
        match &self.shard.stage {
            Some(stage) => ranks.part(&stage.ranks),
            None => *ranks,
        }
    }

    /// The tokens that this rank's logits stand for.
    #[must_use]
    pub fn held_logits(&self) -> Range<usize> {
        match self.logit_ranges() {
            Some(ranges) => ranges[self.shard.rank].clone(),
            None => 0..self.spec.vocab_size as usize,
        }
    }

    /// The same for every rank; none where each has all logits.
    #[must_use]
    pub fn logit_ranges(&self) -> Option<&[Range<usize>]> {
        let sharded =
            self.shard.stage.is_some() || self.embedding_and_head.shards_logits(&self.shard);
        sharded.then_some(self.shard.logits.as_slice())
    }

    /// All logits `[rows, vocab_size]` from every rank's part.
    pub fn gather_logits(
        &self,
        backend: &B,
        part: B::Tensor,
        ranks: &Ranks<'_>,
    ) -> Result<B::Tensor, StepError> {
        let Some(ranges) = self.logit_ranges() else { return Ok(part) };
        let widths: Vec<_> = ranges.iter().map(ExactSizeIterator::len).collect();
        backend.gather_columns(part, &widths, ranks)
    }

    /// Room for the tokens of a step that is built before they are known; none where the backend
    /// or the model needs them first.
    #[must_use]
    pub fn late_tokens(&self, backend: &B, rows: usize) -> Option<B::LateTokens> {
        let by_token = self.spec.layers.iter().any(|layer| layer.hash_routing);
        // Stages exchange hidden vectors while their graphs are built.
        if by_token || self.shard.stage.is_some() {
            return None;
        }
        let held = embedding_and_head::embedding_range(&self.spec, &self.shard);
        backend.late_tokens(rows, held, self.spec.vocab_size as usize)
    }

    /// Runs a step and returns this rank's part of the logits, `[logit_rows, tokens held]`;
    /// none where no row was asked for. Ranks of stages before the last one hold no logits: their
    /// parts have no columns. `caches` are in the order of the batch's sequences.
    pub fn forward(
        &self,
        backend: &B,
        batch: &Batch,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<Option<B::Tensor>, StepError> {
        Ok(self.forward_outputs(backend, batch, caches, ranks)?.logits)
    }

    /// [`Model::forward`], with the hidden vectors that were asked for.
    pub fn forward_outputs(
        &self,
        backend: &B,
        batch: &Batch,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<StepOutputs<B::Tensor>, StepError> {
        self.forward_with(backend, batch, None, caches, ranks)
    }

    /// This rank's part of the logits of some of a step's hidden vectors.
    ///
    /// # Panics
    /// On a rank that has no hidden vectors.
    #[must_use]
    pub fn logits_of(&self, backend: &B, hidden: &B::Tensor, rows: &[usize]) -> B::Tensor {
        let rows_of = backend.select_rows(hidden, rows);
        self.embedding_and_head.logits_of(backend, &self.spec, &rows_of, rows.len())
    }

    /// [`Model::forward`] of tokens that are known later: those of `batch` are not looked at.
    pub fn forward_late(
        &self,
        backend: &B,
        batch: &Batch,
        tokens: &mut B::LateTokens,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<Option<B::Tensor>, StepError> {
        let outputs = self.forward_with(backend, batch, Some(tokens), caches, ranks);
        backend.set_aside(tokens);
        Ok(outputs?.logits)
    }

    fn forward_with(
        &self,
        backend: &B,
        batch: &Batch,
        late: Option<&B::LateTokens>,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<StepOutputs<B::Tensor>, StepError> {
        let own = self.own_ranks(ranks);
        let mut pass = step::ForwardPass::new(backend, &self.spec, &self.shard, batch, &own);
        pass.late = late;
        let mut x = match self.shard.stage.as_ref().and_then(|stage| stage.recv_from) {
            None => self.embedding_and_head.embed(&pass)?,
            Some(rank) => stage::recv(&pass, rank)?,
        };
        let mut cross = step::CrossLayer::new();
        for layer in &self.layers {
            x = layer.forward(&pass, &mut cross, x, caches)?;
            if self.shard.stage.is_some() {
                // Other stages wait for as long as this one's layers take.
                ranks.group.keep_alive()?;
            }
        }
        if let Some(stage) = self.shard.stage.as_ref().filter(|stage| !stage.is_last) {
            stage::send(&pass, x, &stage.send_to)?;
            let rows = batch.logit_rows.len();
            let logits = (rows > 0).then(|| backend.zeros(rows, 0));
            return Ok(StepOutputs { logits, hidden: None });
        }
        let hidden = |rows: &[usize]| {
            (!rows.is_empty()).then(|| self.embedding_and_head.hidden(&pass, &x, rows))
        };
        let logits = hidden(&batch.logit_rows).map(|rows| {
            let count = batch.logit_rows.len();
            self.embedding_and_head.logits_of(backend, &self.spec, &rows, count)
        });
        Ok(StepOutputs { logits, hidden: hidden(&batch.hidden_rows) })
    }
}

#[cfg(test)]
mod tests;
