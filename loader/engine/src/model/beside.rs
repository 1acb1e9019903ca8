//! A dense feed-forward part and experts beside each other, each between norms of its own.

use shardpack_formats::spec::{Beside as BesideSpec, Moe as MoeSpec};

use super::{LoadError, ffn::Ffn, load::Loader, moe::Moe, norm::Norm, step::Step};
use crate::backend::{Backend, StepError};

/// One rank's part of both.
pub(super) struct Beside<B: Backend> {
    dense: Ffn<B>,
    after_dense: Norm<B>,
    before_experts: Norm<B>,
    experts: Moe<B>,
    after_experts: Norm<B>,
}

impl<B: Backend> Beside<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        (moe, beside): (&MoeSpec, &BesideSpec),
        layer: &str,
    ) -> Result<Self, LoadError> {
        let norm = |name: &str| Norm::load(loader, &format!("{layer}.{name}"), &loader.hidden());
        Ok(Self {
            dense: Ffn::load(loader, &format!("{layer}.mlp"))?,
            after_dense: norm(&beside.after_dense)?,
            before_experts: norm(&beside.before_experts)?,
            experts: Moe::load(loader, (moe, false), layer)?,
            after_experts: norm(&beside.after_experts)?,
        })
    }

    /// What both add: the dense part to `normed`, the experts to the residual stream `x`. It is
    /// summed over the ranks already, since norms follow.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (moe, index): (&MoeSpec, usize),
        [x, normed]: [&B::Tensor; 2],
    ) -> Result<B::Tensor, StepError> {
        let (backend, layer) = (step.backend, &step.spec.layers[index]);
        let norm = |norm: &Norm<B>, x: &B::Tensor| norm.apply(backend, &step.spec.norm, x);
        let dense = step.sum(self.dense.forward(step, layer, normed))?;
        let dense = norm(&self.after_dense, &dense);
        let read = norm(&self.before_experts, x);
        let experts = step.sum(self.experts.forward(step, (moe, layer), [x, &read]))?;
        Ok(backend.add(dense, &norm(&self.after_experts, &experts)))
    }
}
