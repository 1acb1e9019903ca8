//! Parallel dense + `MoE` blocks (Gemma 4): a dense network and a mixture of experts, each between
//! norms of its own.
//!
//! `post_dense(dense(normed)) + post_experts(experts(pre_experts(x)))`, where the router reads the
//! residual stream `x` itself. Norms follow both, so each has an all-reduce of its own.

use shardpack_formats::spec;

use super::{
    LoadError,
    dense_ffn::DenseFfn,
    load::{LayerInfo, Loader},
    moe::{Moe, MoeInput},
    norm::Norm,
    step::ForwardPass,
};
use crate::backend::{Backend, StepError};

/// One rank's part of both.
pub(super) struct ParallelDenseMoe<B: Backend> {
    dense: DenseFfn<B>,
    post_dense: Norm<B>,
    pre_experts: Norm<B>,
    experts: Moe<B>,
    post_experts: Norm<B>,
}

impl<B: Backend> ParallelDenseMoe<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        moe: &spec::Moe,
        norms: &spec::ParallelDense,
    ) -> Result<Self, LoadError> {
        let norm = |name: &str| Norm::load(loader, &layer.name(name), &loader.hidden());
        Ok(Self {
            dense: DenseFfn::load(loader, layer)?,
            post_dense: norm(&norms.after_dense)?,
            pre_experts: norm(&norms.before_experts)?,
            experts: Moe::load(loader, layer, moe)?,
            post_experts: norm(&norms.after_experts)?,
        })
    }

    /// What both add, of the residual stream `x`, which is `normed` for the dense network.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        normed: &B::Tensor,
    ) -> Result<B::Tensor, StepError> {
        let backend = pass.backend;
        let dense = pass.all_reduce(self.dense.forward(pass, normed))?;
        let dense = self.post_dense.apply(backend, &dense);
        let read = self.pre_experts.apply(backend, x);
        let input = &MoeInput { router: x, experts: &read };
        let experts = pass.all_reduce(self.experts.partial(pass, input))?;
        Ok(backend.add(dense, &self.post_experts.apply(backend, &experts)))
    }
}
