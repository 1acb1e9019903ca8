//! From tokens to hidden vectors, and from hidden vectors to logits.

use std::ops::Range;

use shardpack_formats::Spec;

use super::{
    LoadError, Shard,
    load::{Loader, Part},
    norm::Norm,
    step::Step,
};
use crate::backend::{Backend, StepError};

/// Both ends of a model on one rank.
pub(super) struct Ends<B: Backend> {
    /// Absent where the cut is empty.
    embedding: Option<B::Matrix>,
    norm: Norm<B>,
    head: Head<B>,
}

/// The output head.
enum Head<B: Backend> {
    /// Own matrix, cut by vocabulary; absent where the cut is empty.
    Own(Option<B::Matrix>),
    /// The embedding, cut as it is.
    Tied,
}

impl<B: Backend> Ends<B> {
    pub(super) fn load(loader: &Loader<'_, B>) -> Result<Self, LoadError> {
        let (spec, shard) = (loader.spec, &loader.shard);
        let held = shard.vocab[shard.rank].clone();
        let vocab = Part { held, full: spec.vocab_size as usize };
        let rows = if shard.embedding_cut { vocab.clone() } else { Part::whole(vocab.full) };
        let hidden = loader.hidden();
        Ok(Self {
            embedding: loader.matrix("model.embed_tokens", &rows, &hidden)?,
            norm: Norm::load(loader, "model.norm", &hidden)?,
            head: if spec.tied_embeddings {
                Head::Tied
            } else {
                Head::Own(loader.matrix("lm_head", &vocab, &hidden)?)
            },
        })
    }

    /// The residual stream before the first layer.
    pub(super) fn embed(&self, step: &Step<'_, B>) -> Result<B::Tensor, StepError> {
        let Step { backend, spec, shard, batch, .. } = step;
        let x = match &self.embedding {
            Some(table) => backend.embed(&batch.tokens, table, embedding_range(spec, shard)),
            None => backend.zeros(batch.tokens.len(), spec.hidden_size as usize),
        };
        let x = if shard.embedding_cut { backend.all_reduce(x, step.ranks)? } else { x };
        Ok(match spec.embedding_scale {
            Some(scale) => backend.scale(x, scale.0),
            None => x,
        })
    }

    /// Logits of the rows that want them: the columns that [`super::Model::held_logits`] names.
    pub(super) fn logits(&self, step: &Step<'_, B>, x: &B::Tensor) -> B::Tensor {
        let Step { backend, spec, batch, .. } = step;
        let rows = backend.select_rows(x, &batch.logit_rows);
        let x = self.norm.apply(backend, &spec.norm, &rows);
        let matrix = match &self.head {
            Head::Own(matrix) => matrix.as_ref(),
            Head::Tied => self.embedding.as_ref(),
        };
        let mut part = match matrix {
            Some(matrix) => backend.linear(&x, matrix),
            None => backend.zeros(batch.logit_rows.len(), 0),
        };
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
    pub(super) const fn cuts_logits(&self, shard: &Shard) -> bool {
        match self.head {
            Head::Own(_) => true,
            Head::Tied => shard.embedding_cut,
        }
    }
}

/// Tokens whose embeddings are held here.
fn embedding_range(spec: &Spec, shard: &Shard) -> Range<usize> {
    if shard.embedding_cut { shard.vocab[shard.rank].clone() } else { 0..spec.vocab_size as usize }
}
