//! The embedding and the LM head: from tokens to hidden vectors, and from hidden vectors to logits.
//!
//! Both are sharded by vocabulary, or the embedding is whole on every rank.

use std::ops::Range;

use shardpack_formats::Spec;

use super::{
    LoadError, Projection, Shard,
    hyper_connections::{self, StreamCollapse},
    load::{Loader, TensorSlice},
    norm::Norm,
    step::ForwardPass,
};
use crate::backend::{Backend, StepError};

/// One rank's part of the embedding and the LM head.
pub(super) struct EmbeddingAndHead<B: Backend> {
    /// Absent where the shard is empty, and where the stage needs none.
    embedding: Option<B::Matrix>,
    /// Of embeddings, where they have one.
    embedding_norm: Option<Norm<B>>,
    /// Absent where another stage has it.
    output: Option<Output<B>>,
}

/// From the residual stream to logits.
struct Output<B: Backend> {
    /// Of several streams.
    collapse: Option<StreamCollapse<B>>,
    norm: Norm<B>,
    head: Head<B>,
}

/// The LM head.
enum Head<B: Backend> {
    /// A matrix of its own, sharded by vocabulary; absent where the shard is empty.
    Own(Option<Projection<B>>),
    /// The embedding, sharded as it is.
    Tied,
}

impl<B: Backend> EmbeddingAndHead<B> {
    pub(super) fn load(loader: &Loader<'_, B>) -> Result<Self, LoadError> {
        let (spec, shard) = (loader.spec, &loader.shard);
        let vocab = TensorSlice { held: shard.vocab.clone(), full: spec.vocab_size as usize };
        let rows =
            if shard.embedding_sharded { vocab.clone() } else { TensorSlice::whole(vocab.full) };
        let hidden = loader.hidden();
        let [embeds, has_head] = match &shard.stage {
            None => [true, true],
            Some(stage) => [stage.is_first, stage.is_last],
        };
        let needed = embeds || (has_head && spec.tied_embeddings);
        let embedding = needed.then(|| {
            if spec.tied_embeddings && has_head {
                return loader.head_matrix("model.embed_tokens", &rows);
            }
            loader.matrix("model.embed_tokens", &rows, &hidden)
        });
        let output = || {
            let streams = spec.hyper_connections.as_ref();
            let collapse =
                streams.map(|streams| StreamCollapse::load(loader, streams)).transpose()?;
            let norm = Norm::load(loader, "model.norm", &hidden)?;
            let head = if spec.tied_embeddings {
                Head::Tied
            } else {
                Head::Own(match loader.head_matrix("lm_head", &vocab)? {
                    None => None,
                    Some(matrix) => {
                        let bias = spec.lm_head_bias.then(|| loader.vector("lm_head.bias", &vocab));
                        Some(Projection { matrix, bias: bias.transpose()? })
                    }
                })
            };
            Ok(Output { collapse, norm, head })
        };
        let embedding_norm = (spec.embedding_norm && embeds)
            .then(|| Norm::load(loader, "model.embed_norm", &hidden))
            .transpose()?;
        Ok(Self {
            embedding: embedding.transpose()?.flatten(),
            embedding_norm,
            output: has_head.then(output).transpose()?,
        })
    }

    /// The residual stream before the first layer, or all of them.
    pub(super) fn embed(&self, pass: &ForwardPass<'_, B>) -> Result<B::Tensor, StepError> {
        let ForwardPass { backend, spec, shard, batch, .. } = pass;
        let x = match &self.embedding {
            Some(table) => match pass.late {
                Some(tokens) => backend.embed_late(tokens, table),
                None => backend.embed(&batch.tokens, table, embedding_range(spec, shard)),
            },
            None => backend.zeros(batch.tokens.len(), spec.hidden_size as usize),
        };
        let x = if shard.embedding_sharded { backend.all_reduce(x, pass.ranks)? } else { x };
        let x = match spec.embedding_scale {
            Some(scale) => backend.scale(x, scale.0),
            None => x,
        };
        let x = match &self.embedding_norm {
            Some(norm) => norm.apply(*backend, &x),
            None => x,
        };
        Ok(match &spec.hyper_connections {
            Some(streams) => hyper_connections::begin(*backend, streams, x),
            None => x,
        })
    }

    /// Hidden vectors of some rows after the last norm.
    pub(super) fn hidden(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        rows: &[usize],
    ) -> B::Tensor {
        let rows = pass.backend.select_rows(x, rows);
        let Output { collapse, norm, .. } = self.output.as_ref().expect("the last stage has it");
        let rows = match collapse {
            Some(collapse) => collapse.apply(pass, &rows),
            None => rows,
        };
        norm.apply(pass.backend, &rows)
    }

    /// Logits of such vectors, `count` rows: the columns that [`super::Model::held_logits`] names.
    pub(super) fn logits_of(
        &self,
        backend: &B,
        spec: &Spec,
        hidden: &B::Tensor,
        count: usize,
    ) -> B::Tensor {
        let Output { head, .. } = self.output.as_ref().expect("the last stage has it");
        let part = match head {
            Head::Own(own) => own.as_ref().map(|own| {
                let logits = backend.logits(hidden, &own.matrix);
                match &own.bias {
                    Some(bias) => backend.add_bias(logits, bias),
                    None => logits,
                }
            }),
            Head::Tied => self.embedding.as_ref().map(|matrix| backend.logits(hidden, matrix)),
        };
        let mut part = part.unwrap_or_else(|| backend.zeros(count, 0));
        if let Some(scale) = spec.logit_scale {
            part = backend.scale(part, scale.0);
        }
        if let Some(cap) = spec.logit_softcap {
            part = backend.softcap(part, cap.0);
        }
        part
    }

    /// Whether each rank has logits of a part of the vocabulary only. A whole embedding that is
    /// the head too gives every rank all logits; there is nothing to gather.
    pub(super) const fn shards_logits(&self, shard: &Shard) -> bool {
        match &self.output {
            Some(Output { head: Head::Own(_), .. }) | None => true,
            Some(Output { head: Head::Tied, .. }) => shard.embedding_sharded,
        }
    }
}

/// Tokens whose embeddings are held here.
pub(super) fn embedding_range(spec: &Spec, shard: &Shard) -> Range<usize> {
    if shard.embedding_sharded { shard.vocab.clone() } else { 0..spec.vocab_size as usize }
}
