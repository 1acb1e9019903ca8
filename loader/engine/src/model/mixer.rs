//! Mixers: what looks at other tokens. One variant, and one file, for each form.

use super::{
    LoadError,
    attention::Attention,
    compressed_attention::CompressedAttention,
    linear_attention::LinearAttention,
    load::{LayerInfo, Loader},
    mla::Mla,
    short_convolution::ShortConvolution,
    step::{CrossLayer, ForwardPass},
};
use crate::backend::{Backend, StepError};

/// One rank's part of a mixer.
pub(super) enum Mixer<B: Backend> {
    /// Multi-head, grouped-query or multi-query attention, dense or block-sparse.
    Attention(Box<Attention<B>>),
    /// Multi-head latent attention, dense or sparse by an indexer.
    Mla(Box<Mla<B>>),
    /// Attention to a window and to compressed KV entries.
    CompressedAttention(Box<CompressedAttention<B>>),
    /// Gated `DeltaNet`, Kimi Delta Attention or Mamba-2.
    LinearAttention(Box<LinearAttention<B>>),
    /// Attention and linear attention read the same and are added up (Falcon-H1).
    ParallelHybrid(Box<ParallelHybrid<B>>),
    /// A gated short convolution.
    ShortConvolution(Box<ShortConvolution<B>>),
}

/// Attention beside linear attention.
pub(super) struct ParallelHybrid<B: Backend> {
    attention: Attention<B>,
    linear: LinearAttention<B>,
}

impl<B: Backend> Mixer<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &LayerInfo<'_>) -> Result<Self, LoadError> {
        let (spec, form) = (loader.spec, layer.form);
        if let Some(delta) = spec.linear_attention.as_ref().filter(|_| form.linear_attention) {
            let linear = LinearAttention::load(loader, layer, delta)?;
            if !form.parallel_attention {
                return Ok(Self::LinearAttention(Box::new(linear)));
            }
            let attention = Attention::load(loader, layer)?;
            return Ok(Self::ParallelHybrid(Box::new(ParallelHybrid { attention, linear })));
        }
        if let Some(convolution) =
            spec.short_convolution.as_ref().filter(|_| form.short_convolution)
        {
            let convolution = ShortConvolution::load(loader, layer, convolution)?;
            return Ok(Self::ShortConvolution(Box::new(convolution)));
        }
        if let Some(compressed) = &spec.compressed_attention {
            let attention = CompressedAttention::load(loader, layer, compressed)?;
            return Ok(Self::CompressedAttention(Box::new(attention)));
        }
        match &spec.mla {
            Some(mla) => Ok(Self::Mla(Box::new(Mla::load(loader, layer, mla)?))),
            None => Ok(Self::Attention(Box::new(Attention::load(loader, layer)?))),
        }
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        cross: &mut CrossLayer<B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<Option<B::Tensor>, StepError> {
        match self {
            Self::Attention(attention) => attention.forward(pass, x, caches),
            Self::Mla(mla) => Ok(mla.forward(pass, cross, x, caches)),
            Self::CompressedAttention(attention) => Ok(attention.forward(pass, x, caches)),
            Self::LinearAttention(linear) => linear.forward(pass, x, caches),
            Self::ParallelHybrid(both) => {
                let attended = both.attention.forward(pass, x, caches)?;
                let linear = both.linear.forward(pass, x, caches)?;
                Ok(pass.join(attended, linear))
            }
            Self::ShortConvolution(convolution) => Ok(convolution.forward(pass, x, caches)),
        }
    }
}
