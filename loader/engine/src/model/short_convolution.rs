//! Gated short convolutions (LFM2): the last few tokens in place of keys and values.
//!
//! ```text
//! b, c, u = x · Wb, x · Wc, x · Wx     [tokens, channels]
//! y = (c ⊙ conv(b ⊙ u)) · Wo           [tokens, hidden_size]
//! ```
//!
//! Each channel has a causal convolution of its own; channels are sharded over ranks.

use shardpack_formats::spec;

use super::{
    LoadError,
    load::{LayerInfo, Loader, TensorSlice},
    step::ForwardPass,
};
use crate::backend::{Backend, ShortConvolutionInputs, ShortConvolutionParams};

/// One rank's part of a short convolution.
pub(super) struct ShortConvolution<B: Backend> {
    /// Tokens that it sees.
    kernel: usize,
    /// The layer in the caches.
    state_slot: usize,
    /// Absent on a rank without channels.
    weights: Option<Weights<B>>,
}

struct Weights<B: Backend> {
    b: B::Matrix,
    c: B::Matrix,
    x: B::Matrix,
    /// `[channels, kernel]`.
    taps: B::Vector,
    out: B::Matrix,
}

impl<B: Backend> ShortConvolution<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::ShortConvolution,
    ) -> Result<Self, LoadError> {
        let name = |name: &str| layer.name(&format!("conv.{name}"));
        let hidden = loader.hidden();
        let channels = TensorSlice { held: loader.shard.conv.clone(), full: hidden.full };
        let (kernel, state_slot) = (form.kernel as usize, layer.slots.state);
        let column = |module: &str| loader.matrix(&name(module), &channels, &hidden);
        let (b, c, x) = (column("in_proj_b")?, column("in_proj_c")?, column("in_proj_x")?);
        let out = loader.matrix(&name("out_proj"), &hidden, &channels)?;
        let (Some(b), Some(c), Some(x), Some(out)) = (b, c, x, out) else {
            return Ok(Self { kernel, state_slot, weights: None });
        };
        let taps = TensorSlice::whole(kernel);
        let taps = loader.stacked_vector(&name("conv1d.weight"), &channels, &taps)?;
        Ok(Self { kernel, state_slot, weights: Some(Weights { b, c, x, taps, out }) })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref()?;
        let backend = pass.backend;
        let [b, c, x] = backend.linears(x, [&weights.b, &weights.c, &weights.x]);
        let params = ShortConvolutionParams {
            layer: self.state_slot,
            lengths: &pass.batch.lengths,
            drafts: &pass.batch.drafts,
            kernel: self.kernel,
            taps: &weights.taps,
        };
        let inputs = ShortConvolutionInputs { b: &b, c: &c, x: &x };
        let channels = backend.short_convolution(inputs, caches, &params);
        Some(backend.linear(&channels, &weights.out))
    }
}
