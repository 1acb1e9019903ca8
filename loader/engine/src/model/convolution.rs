//! Gated short convolutions: the last few tokens instead of a cache that grows.

use shardpack_formats::spec;

use super::{
    LoadError,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, ConvolutionInputs, ConvolutionStep};

/// One rank's part of a short convolution.
pub(super) struct Convolution<B: Backend> {
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

impl<B: Backend> Convolution<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        convolution: &spec::Convolution,
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let hidden = loader.hidden();
        let channels = Part { held: loader.shard.conv.clone(), full: hidden.full };
        let column = |name: &str| loader.matrix(&format!("{prefix}.{name}"), &channels, &hidden);
        let parts = (column("in_proj_b")?, column("in_proj_c")?, column("in_proj_x")?);
        let out = loader.matrix(&format!("{prefix}.out_proj"), &hidden, &channels)?;
        let ((Some(b), Some(c), Some(x)), Some(out)) = (parts, out) else {
            return Ok(Self { weights: None });
        };
        let kernel = Part::whole(convolution.kernel as usize);
        let taps = loader.stacked_vector(&format!("{prefix}.conv1d.weight"), &channels, &kernel)?;
        Ok(Self { weights: Some(Weights { b, c, x, taps, out }) })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (layer, convolution): (usize, &spec::Convolution),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref()?;
        let backend = step.backend;
        let [b, c, x] = backend.linears(x, [&weights.b, &weights.c, &weights.x]);
        let at = ConvolutionStep {
            layer: step.state(layer),
            lengths: &step.batch.lengths,
            drafts: &step.batch.drafts,
            kernel: convolution.kernel as usize,
            taps: &weights.taps,
        };
        let inputs = ConvolutionInputs { b: &b, c: &c, x: &x };
        let channels = backend.short_convolution(inputs, caches, &at);
        Some(backend.linear(&channels, &weights.out))
    }
}
