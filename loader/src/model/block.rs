//! One layer: attention and feed-forward part around the residual stream.

use super::{
    LoadError, attention::Attention, delta::Delta, ffn::Ffn, load::Loader, mla::Latent, moe::Moe,
    norm::Norm, step::Step,
};
use crate::backend::{Backend, StepError};

/// One rank's part of a layer.
pub(super) struct Block<B: Backend> {
    index: usize,
    before_attention: Option<Norm<B>>,
    attention: Mixer<B>,
    after_attention: Option<Norm<B>>,
    before_ffn: Option<Norm<B>>,
    ffn: FeedForward<B>,
    after_ffn: Option<Norm<B>>,
}

/// What looks at other tokens.
enum Mixer<B: Backend> {
    Heads(Attention<B>),
    Latent(Latent<B>),
    Linear(Delta<B>),
}

impl<B: Backend> Mixer<B> {
    fn load(loader: &Loader<'_, B>, index: usize, layer: &str) -> Result<Self, LoadError> {
        if let Some(delta) = loader.spec.delta.as_ref().filter(|_| loader.spec.layers[index].delta)
        {
            return Delta::load(loader, delta, &format!("{layer}.linear_attn")).map(Self::Linear);
        }
        let prefix = format!("{layer}.self_attn");
        match &loader.spec.mla {
            Some(mla) => Latent::load(loader, (index, mla), &prefix).map(Self::Latent),
            None => Attention::load(loader, &prefix).map(Self::Heads),
        }
    }

    /// This rank's summand; none where it has nothing to add.
    fn forward(
        &self,
        step: &Step<'_, B>,
        index: usize,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<Option<B::Tensor>, StepError> {
        const LOADED: &str = "loaded from the same architecture";
        match self {
            Self::Heads(heads) => heads.forward(step, index, x, caches),
            Self::Latent(latent) => {
                let mla = step.spec.mla.as_ref().expect(LOADED);
                Ok(latent.forward(step, (index, mla), x, caches))
            }
            Self::Linear(linear) => {
                let delta = step.spec.delta.as_ref().expect(LOADED);
                Ok(linear.forward(step, (index, delta), x, caches))
            }
        }
    }
}

/// What follows attention.
enum FeedForward<B: Backend> {
    Dense(Ffn<B>),
    Experts(Moe<B>),
}

impl<B: Backend> FeedForward<B> {
    fn load(loader: &Loader<'_, B>, index: usize, prefix: &str) -> Result<Self, LoadError> {
        match &loader.spec.moe {
            Some(moe) if loader.spec.layers[index].moe => {
                Moe::load(loader, moe, prefix).map(Self::Experts)
            }
            _ => Ffn::load(loader, &format!("{prefix}.mlp")).map(Self::Dense),
        }
    }

    /// This rank's summand; none where it has nothing to add.
    fn forward(&self, step: &Step<'_, B>, x: &B::Tensor) -> Option<B::Tensor> {
        match (self, &step.spec.moe) {
            (Self::Dense(ffn), _) => ffn.forward(step, x),
            (Self::Experts(experts), Some(moe)) => experts.forward(step, moe, x),
            (Self::Experts(_), None) => unreachable!("loaded from the same architecture"),
        }
    }
}

impl<B: Backend> Block<B> {
    pub(super) fn load(loader: &Loader<'_, B>, index: usize) -> Result<Self, LoadError> {
        let prefix = format!("model.layers.{index}");
        let form = &loader.spec.block;
        let norm = |name: &Option<String>| {
            let load =
                |name: &String| Norm::load(loader, &format!("{prefix}.{name}"), &loader.hidden());
            name.as_ref().map(load).transpose()
        };
        Ok(Self {
            index,
            before_attention: norm(&form.before_attention)?,
            attention: Mixer::load(loader, index, &prefix)?,
            after_attention: norm(&form.after_attention)?,
            before_ffn: norm(&form.before_ffn)?,
            ffn: FeedForward::load(loader, index, &prefix)?,
            after_ffn: norm(&form.after_ffn)?,
        })
    }

    /// The residual stream after this layer.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        x: B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        let normed = apply(step, self.before_attention.as_ref(), &x);
        let read = normed.as_ref().unwrap_or(&x);
        let attended = self.attention.forward(step, self.index, read, caches)?;
        if step.spec.block.parallel {
            let own = apply(step, self.before_ffn.as_ref(), &x);
            let computed = self.ffn.forward(step, own.as_ref().unwrap_or(read));
            let both = match (attended, computed) {
                (Some(a), Some(b)) => Some(step.backend.add(a, &b)),
                (a, b) => a.or(b),
            };
            return Ok(add(step, x, step.sum(both)?));
        }
        let part = after(step, self.after_attention.as_ref(), step.sum(attended)?);
        let x = add(step, x, part);
        let normed = apply(step, self.before_ffn.as_ref(), &x);
        let computed = self.ffn.forward(step, normed.as_ref().unwrap_or(&x));
        let part = after(step, self.after_ffn.as_ref(), step.sum(computed)?);
        Ok(add(step, x, part))
    }
}

fn apply<B: Backend>(
    step: &Step<'_, B>,
    norm: Option<&Norm<B>>,
    x: &B::Tensor,
) -> Option<B::Tensor> {
    norm.map(|norm| norm.apply(step.backend, &step.spec.norm, x))
}

fn after<B: Backend>(step: &Step<'_, B>, norm: Option<&Norm<B>>, part: B::Tensor) -> B::Tensor {
    apply(step, norm, &part).unwrap_or(part)
}

fn add<B: Backend>(step: &Step<'_, B>, x: B::Tensor, part: B::Tensor) -> B::Tensor {
    let part = match step.spec.block.residual_scale {
        Some(scale) => step.backend.scale(part, scale.0),
        None => part,
    };
    step.backend.add(x, &part)
}
