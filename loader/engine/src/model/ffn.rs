//! Feed-forward parts. One variant, and one file, for each form.

use super::{
    LoadError,
    dense_ffn::DenseFfn,
    load::{LayerInfo, Loader},
    moe::{Moe, MoeInput},
    parallel_moe::ParallelDenseMoe,
    step::{CrossLayer, ForwardPass},
};
use crate::backend::{Backend, StepError};

/// One rank's part of a feed-forward part.
pub(super) enum FeedForward<B: Backend> {
    /// One network for all tokens.
    Dense(DenseFfn<B>),
    /// A mixture of experts.
    Moe(Box<Moe<B>>),
    /// A dense network and a mixture of experts, each between norms of its own (Gemma 4).
    ParallelDenseMoe(Box<ParallelDenseMoe<B>>),
    /// Shortcut-connected mixture of experts (`LongCat` Flash).
    ShortcutMoe(Box<ShortcutMoe<B>>),
}

/// A dense network beside a mixture of experts that reads the same; what the experts give is added
/// with what the next layer's dense network gives.
pub(super) struct ShortcutMoe<B: Backend> {
    dense: DenseFfn<B>,
    moe: Moe<B>,
}

/// What a feed-forward part gives.
pub(super) enum FfnOutput<T> {
    /// This rank's partial sum; none where it has nothing to add.
    Partial(Option<T>),
    /// The all-reduce of every rank's part, where a norm follows it.
    Reduced(T),
}

impl<B: Backend> FeedForward<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &LayerInfo<'_>) -> Result<Self, LoadError> {
        let dense = || DenseFfn::load(loader, layer);
        let Some(moe) = loader.spec.moe.as_ref().filter(|_| layer.form.moe) else {
            return dense().map(Self::Dense);
        };
        if let Some(norms) = &moe.parallel_dense {
            let both = ParallelDenseMoe::load(loader, layer, moe, norms)?;
            return Ok(Self::ParallelDenseMoe(Box::new(both)));
        }
        let experts = Moe::load(loader, layer, moe)?;
        if moe.shortcut {
            return Ok(Self::ShortcutMoe(Box::new(ShortcutMoe { dense: dense()?, moe: experts })));
        }
        Ok(Self::Moe(Box::new(experts)))
    }

    /// What this part makes of the residual stream `x`, which is `normed` for a dense network.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        cross: &mut CrossLayer<B>,
        x: &B::Tensor,
        normed: &B::Tensor,
    ) -> Result<FfnOutput<B::Tensor>, StepError> {
        let input = &MoeInput { router: normed, experts: normed };
        Ok(match self {
            Self::Dense(ffn) => {
                // The shortcut's partial sums are reduced in the same all-reduce.
                let part = ffn.forward(pass, normed);
                FfnOutput::Partial(pass.join(part, cross.shortcut.take()))
            }
            Self::Moe(moe) => moe.forward(pass, input)?,
            Self::ParallelDenseMoe(both) => FfnOutput::Reduced(both.forward(pass, x, normed)?),
            Self::ShortcutMoe(both) => {
                cross.shortcut = both.moe.partial(pass, input);
                FfnOutput::Partial(both.dense.forward(pass, normed))
            }
        })
    }
}

impl<T> FfnOutput<T> {
    /// What all ranks add together.
    pub(super) fn all_reduce<B>(self, pass: &ForwardPass<'_, B>) -> Result<T, StepError>
    where
        B: Backend<Tensor = T>,
    {
        match self {
            Self::Partial(part) => pass.all_reduce(part),
            Self::Reduced(part) => Ok(part),
        }
    }

    /// The same with another partial sum, in one all-reduce where possible.
    pub(super) fn all_reduce_with<B>(
        self,
        pass: &ForwardPass<'_, B>,
        other: Option<T>,
    ) -> Result<T, StepError>
    where
        B: Backend<Tensor = T>,
    {
        match self {
            Self::Partial(part) => pass.all_reduce(pass.join(other, part)),
            Self::Reduced(part) => Ok(pass.backend.add(pass.all_reduce(other)?, &part)),
        }
    }
}
