//! One layer: attention and feed-forward part around the residual stream.

use shardpack_formats::spec::{LayerPart, Streams};

use super::{
    LoadError, attention::Attention, beside::Beside, compressed::Compressed,
    convolution::Convolution, delta::Delta, ffn::Ffn, load::Loader, mla::Latent, moe::Moe,
    norm::Norm, step::Step, streams::Connection,
};
use crate::backend::{Backend, StepError};

/// One rank's part of a layer.
pub(super) struct Block<B: Backend> {
    index: usize,
    before_attention: Option<Norm<B>>,
    attention: Option<Mixer<B>>,
    after_attention: Option<Norm<B>>,
    before_ffn: Option<Norm<B>>,
    ffn: Option<FeedForward<B>>,
    after_ffn: Option<Norm<B>>,
    /// One output: what the residual stream is multiplied by.
    scale: Option<f32>,
    /// Of attention and of the feed-forward part with several residual streams.
    connections: Option<[Connection<B>; 2]>,
}

/// What looks at other tokens.
enum Mixer<B: Backend> {
    Heads(Attention<B>),
    Latent(Latent<B>),
    Compressed(Compressed<B>),
    Linear(Delta<B>),
    /// Both read the same, and what they give is added up.
    Both(Box<(Attention<B>, Delta<B>)>),
    Convolution(Convolution<B>),
}

impl<B: Backend> Mixer<B> {
    fn load(loader: &Loader<'_, B>, index: usize, layer: &str) -> Result<Self, LoadError> {
        let prefix = format!("{layer}.self_attn");
        let form = &loader.spec.layers[index];
        if let Some(delta) = loader.spec.delta.as_ref().filter(|_| form.delta) {
            let linear = Delta::load(loader, delta, &format!("{layer}.linear_attn"))?;
            if !form.both {
                return Ok(Self::Linear(linear));
            }
            let heads = Attention::load(loader, index, &prefix)?;
            return Ok(Self::Both(Box::new((heads, linear))));
        }
        if let Some(convolution) = loader.spec.convolution.as_ref().filter(|_| form.convolution) {
            let prefix = format!("{layer}.conv");
            return Convolution::load(loader, convolution, &prefix).map(Self::Convolution);
        }
        if let Some(compressed) = &loader.spec.compressed {
            return Compressed::load(loader, (index, compressed), &prefix).map(Self::Compressed);
        }
        match &loader.spec.mla {
            Some(mla) => Latent::load(loader, (index, mla), &prefix).map(Self::Latent),
            None => Attention::load(loader, index, &prefix).map(Self::Heads),
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
            Self::Compressed(compressed) => {
                let spec = step.spec.compressed.as_ref().expect(LOADED);
                Ok(compressed.forward(step, (index, spec), x, caches))
            }
            Self::Linear(linear) => {
                let delta = step.spec.delta.as_ref().expect(LOADED);
                linear.forward(step, (index, delta), x, caches)
            }
            Self::Both(both) => {
                let (heads, linear) = &**both;
                let delta = step.spec.delta.as_ref().expect(LOADED);
                let attended = heads.forward(step, index, x, caches)?;
                let moved = linear.forward(step, (index, delta), x, caches)?;
                Ok(match (attended, moved) {
                    (Some(a), Some(b)) => Some(step.backend.add(a, &b)),
                    (a, b) => a.or(b),
                })
            }
            Self::Convolution(layer) => {
                let convolution = step.spec.convolution.as_ref().expect(LOADED);
                Ok(layer.forward(step, (index, convolution), x, caches))
            }
        }
    }
}

/// What follows attention.
enum FeedForward<B: Backend> {
    Dense(Ffn<B>),
    Experts(Moe<B>),
    Both(Box<Beside<B>>),
    /// What the experts give is added with what the next layer's dense part gives.
    Deferred(Box<(Ffn<B>, Moe<B>)>),
}

impl<B: Backend> FeedForward<B> {
    fn load(loader: &Loader<'_, B>, index: usize, prefix: &str) -> Result<Self, LoadError> {
        match &loader.spec.moe {
            Some(moe) if loader.spec.layers[index].moe => {
                if let Some(beside) = &moe.beside {
                    let both = Beside::load(loader, (moe, beside), prefix)?;
                    return Ok(Self::Both(Box::new(both)));
                }
                let by_token = loader.spec.layers[index].experts_by_token;
                let experts = Moe::load(loader, (moe, by_token), prefix)?;
                if moe.deferred {
                    let dense = Ffn::load(loader, &format!("{prefix}.mlp"))?;
                    return Ok(Self::Deferred(Box::new((dense, experts))));
                }
                Ok(Self::Experts(experts))
            }
            _ => Ffn::load(loader, &format!("{prefix}.mlp")).map(Self::Dense),
        }
    }

    /// This rank's summand; none where it has nothing to add.
    fn forward(&self, step: &Step<'_, B>, index: usize, x: &B::Tensor) -> Option<B::Tensor> {
        let layer = &step.spec.layers[index];
        match (self, &step.spec.moe) {
            (Self::Dense(ffn), _) => step.with_deferred(ffn.forward(step, layer, x)),
            (Self::Deferred(both), Some(moe)) => {
                let (dense, experts) = &**both;
                step.defer(experts.forward(step, (moe, layer), [x, x]));
                dense.forward(step, layer, x)
            }
            (Self::Experts(experts), Some(moe)) => experts.forward(step, (moe, layer), [x, x]),
            _ => unreachable!("loaded from the same architecture; both by `summed`"),
        }
    }

    /// What all ranks add to the residual stream `x`, which is `normed` for a dense part.
    fn summed(
        &self,
        step: &Step<'_, B>,
        index: usize,
        [x, normed]: [&B::Tensor; 2],
    ) -> Result<B::Tensor, StepError> {
        match (self, &step.spec.moe) {
            (Self::Both(both), Some(moe)) => both.forward(step, (moe, index), [x, normed]),
            (Self::Experts(experts), _) => {
                Ok(experts.after(step, step.sum(self.forward(step, index, normed))?))
            }
            _ => step.sum(self.forward(step, index, normed)),
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
        let only = loader.spec.layers[index].only;
        let [attends, feeds] =
            [LayerPart::FeedForward, LayerPart::Attention].map(|other| only != Some(other));
        let norm =
            |name: &Option<String>, is_there: bool| if is_there { norm(name) } else { Ok(None) };
        Ok(Self {
            index,
            before_attention: norm(&form.before_attention, attends)?,
            attention: attends.then(|| Mixer::load(loader, index, &prefix)).transpose()?,
            after_attention: norm(&form.after_attention, attends)?,
            before_ffn: norm(&form.before_ffn, feeds)?,
            ffn: feeds.then(|| FeedForward::load(loader, index, &prefix)).transpose()?,
            after_ffn: norm(&form.after_ffn, feeds)?,
            scale: match &form.layer_scale {
                Some(name) => Some(loader.number(&format!("{prefix}.{name}"))?),
                None => None,
            },
            connections: match &loader.spec.streams {
                Some(streams) => {
                    let connection =
                        |module| Connection::load(loader, streams, &format!("{prefix}.{module}"));
                    Some([connection("attn_hc")?, connection("ffn_hc")?])
                }
                None => None,
            },
        })
    }

    /// The residual stream after this layer, or all of them.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        x: B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        if let (Some(connections), Some(streams)) = (&self.connections, &step.spec.streams) {
            return self.connected(step, (connections, streams), x, caches);
        }
        let (Some(attention), Some(ffn)) = (&self.attention, &self.ffn) else {
            return self.one_part(step, x, caches);
        };
        let normed = apply(step, self.before_attention.as_ref(), &x);
        let read = normed.as_ref().unwrap_or(&x);
        let attended = attention.forward(step, self.index, read, caches)?;
        if step.spec.block.parallel {
            let own = apply(step, self.before_ffn.as_ref(), &x);
            let computed = ffn.forward(step, self.index, own.as_ref().unwrap_or(read));
            let both = match (attended, computed) {
                (Some(a), Some(b)) => Some(step.backend.add(a, &b)),
                (a, b) => a.or(b),
            };
            return Ok(self.scaled(step, add(step, x, step.sum(both)?)));
        }
        let part = after(step, self.after_attention.as_ref(), step.sum(attended)?);
        let x = add(step, x, part);
        let normed = apply(step, self.before_ffn.as_ref(), &x);
        let computed = ffn.summed(step, self.index, [&x, normed.as_ref().unwrap_or(&x)])?;
        let part = after(step, self.after_ffn.as_ref(), computed);
        Ok(self.scaled(step, add(step, x, part)))
    }

    /// All residual streams after a layer of a model that has several.
    fn connected(
        &self,
        step: &Step<'_, B>,
        ([to_attention, to_ffn], streams): (&[Connection<B>; 2], &Streams),
        x: B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        let mut x = x;
        if let Some(attention) = &self.attention {
            let read = to_attention.read(step, streams, &x);
            let normed = apply(step, self.before_attention.as_ref(), &read.x);
            let seen = normed.as_ref().unwrap_or(&read.x);
            let part = attention.forward(step, self.index, seen, caches)?;
            let part = after(step, self.after_attention.as_ref(), step.sum(part)?);
            x = step.backend.add_to_streams(read.mixed.unwrap_or(x), &part, &read.weights);
        }
        if let Some(ffn) = &self.ffn {
            let read = to_ffn.read(step, streams, &x);
            let normed = apply(step, self.before_ffn.as_ref(), &read.x);
            let seen = normed.as_ref().unwrap_or(&read.x);
            let part = ffn.summed(step, self.index, [&read.x, seen])?;
            let part = after(step, self.after_ffn.as_ref(), part);
            x = step.backend.add_to_streams(read.mixed.unwrap_or(x), &part, &read.weights);
        }
        Ok(x)
    }

    /// The residual stream after a layer that has attention or a feed-forward part alone.
    fn one_part(
        &self,
        step: &Step<'_, B>,
        x: B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        let mut x = x;
        if let Some(attention) = &self.attention {
            let normed = apply(step, self.before_attention.as_ref(), &x);
            let read = normed.as_ref().unwrap_or(&x);
            let part = attention.forward(step, self.index, read, caches)?;
            let part = after(step, self.after_attention.as_ref(), step.sum(part)?);
            x = add(step, x, part);
        }
        if let Some(ffn) = &self.ffn {
            let normed = apply(step, self.before_ffn.as_ref(), &x);
            let part = ffn.summed(step, self.index, [&x, normed.as_ref().unwrap_or(&x)])?;
            let part = after(step, self.after_ffn.as_ref(), part);
            x = add(step, x, part);
        }
        Ok(self.scaled(step, x))
    }

    fn scaled(&self, step: &Step<'_, B>, x: B::Tensor) -> B::Tensor {
        match self.scale {
            Some(scale) => step.backend.scale(x, scale),
            None => x,
        }
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
