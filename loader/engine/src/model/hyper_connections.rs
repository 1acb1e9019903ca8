//! Hyper-connections (Zhu et al. 2024; mHC in DeepSeek V4): several residual streams in place of one.
//!
//! ```text
//! m = norm(all streams) · W                          [tokens, columns]
//! pre = sigmoid(scale · m + base) + eps              [tokens, streams]
//! post = magnitude · sigmoid(scale · m + base) + eps [tokens, streams]
//! read = Σ_k pre[k] · stream[k]                      [tokens, hidden_size]
//! stream[k] ← Σ_j M[j, k] · stream[j] + post[k] · part(read)
//! ```
//!
//! `M` is the identity, or a doubly stochastic matrix that follows from `m` too (Sinkhorn-Knopp).
//! Every rank has all streams and all parameters and comes to the same bits, so nothing more is
//! exchanged than with one stream.

use std::ops::Range;

use shardpack_formats::spec::{HyperConnections, NormKind};

use super::{
    LoadError,
    load::{Loader, TensorSlice},
    step::ForwardPass,
};
use crate::backend::{Backend, NormParams, StreamParams};

/// The connection of one part of a layer with the streams.
pub(super) struct HyperConnection<B: Backend> {
    form: HyperConnections,
    mixes: Mixes<B>,
    /// Factors on what `pre`, `post` and, where streams are mixed, their matrix are made of.
    scales: Vec<f32>,
}

/// What a part of a layer reads of the streams, and how it adds to them.
pub(super) struct StreamRead<T> {
    /// What it reads, `[tokens, hidden_size]`.
    pub(super) x: T,
    /// `post`, `[tokens, streams]`.
    weights: T,
    /// The streams that it adds to, where they are mixed before.
    mixed: Option<T>,
}

impl<T> StreamRead<T> {
    /// All streams after the part.
    pub(super) fn add<B>(self, pass: &ForwardPass<'_, B>, streams: T, part: &T) -> T
    where
        B: Backend<Tensor = T>,
    {
        pass.backend.add_to_streams(self.mixed.unwrap_or(streams), part, &self.weights)
    }
}

/// One stream of all, before the last norm.
pub(super) struct StreamCollapse<B: Backend> {
    form: HyperConnections,
    mixes: Mixes<B>,
    scale: f32,
}

/// What weights are made of: columns that are linear in all streams of a row.
struct Mixes<B: Backend> {
    /// `[columns, streams · hidden_size]`.
    matrix: B::Matrix,
    /// Added to each column.
    base: B::Vector,
    /// Gains of the norm before the matrix, which has none.
    ones: B::Vector,
}

impl<B: Backend> Mixes<B> {
    fn load(
        loader: &Loader<'_, B>,
        [matrix, base]: [&str; 2],
        columns: usize,
    ) -> Result<Self, LoadError> {
        let columns = TensorSlice::whole(columns);
        let all = TensorSlice::whole(loader.spec.residual_width());
        Ok(Self {
            matrix: loader.float_matrix(matrix, &columns, &all)?,
            base: loader.vector(base, &columns)?,
            ones: loader.backend.ones(all.full),
        })
    }

    /// The columns of every row's streams.
    fn apply(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> B::Tensor {
        let eps = pass.spec.norm.eps.0;
        let norm = NormParams { kind: NormKind::Rms, eps, gain: &self.ones, bias: None };
        pass.backend.linear(&pass.backend.norm(x, &norm), &self.matrix)
    }
}

impl<B: Backend> HyperConnection<B> {
    /// The connection of this module.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        streams: &HyperConnections,
        module: &str,
    ) -> Result<Self, LoadError> {
        let name = |name: &str| format!("{module}.{name}");
        let (count, mixes) =
            (streams.expansion_rate as usize, streams.sinkhorn_iterations.is_some());
        let columns = if mixes { (2 + count) * count } else { 2 * count };
        Ok(Self {
            mixes: Mixes::load(loader, [&name("fn"), &name("base")], columns)?,
            scales: loader.values(&name("scale"), if mixes { 3 } else { 2 })?,
            form: streams.clone(),
        })
    }

    /// What the part reads of the streams `[tokens, streams · hidden_size]`.
    pub(super) fn read(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> StreamRead<B::Tensor> {
        let (backend, form) = (pass.backend, &self.form);
        let (count, eps) = (form.expansion_rate as usize, form.eps.0);
        let mixes = self.mixes.apply(pass, x);
        let params =
            |columns: Range<usize>, purpose: usize, magnitude: f32, eps: f32| StreamParams {
                columns,
                base: &self.mixes.base,
                scale: self.scales[purpose],
                magnitude,
                eps,
            };
        let pre = backend.stream_weights(&mixes, &params(0..count, 0, 1.0, eps));
        let read = backend.collapse_streams(x, &pre);
        let post_eps = if form.sinkhorn_iterations.is_some() { 0.0 } else { eps };
        let post = params(count..2 * count, 1, form.magnitude.0, post_eps);
        let mixed = form.sinkhorn_iterations.map(|rounds| {
            let matrix = params(2 * count..(2 + count) * count, 2, 1.0, eps);
            backend.mix_streams(x, &mixes, &matrix, rounds)
        });
        StreamRead { x: read, weights: backend.stream_weights(&mixes, &post), mixed }
    }
}

impl<B: Backend> StreamCollapse<B> {
    /// The last one of a model.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        streams: &HyperConnections,
    ) -> Result<Self, LoadError> {
        let names = ["model.hc_head.hc_fn", "model.hc_head.hc_base"];
        Ok(Self {
            mixes: Mixes::load(loader, names, streams.expansion_rate as usize)?,
            scale: loader.number("model.hc_head.hc_scale")?,
            form: streams.clone(),
        })
    }

    /// `[tokens, hidden_size]` of all streams.
    pub(super) fn apply(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> B::Tensor {
        let params = StreamParams {
            columns: 0..self.form.expansion_rate as usize,
            base: &self.mixes.base,
            scale: self.scale,
            magnitude: 1.0,
            eps: self.form.eps.0,
        };
        let weights = pass.backend.stream_weights(&self.mixes.apply(pass, x), &params);
        pass.backend.collapse_streams(x, &weights)
    }
}

/// All streams as a model's first layer reads them: each is the embedding.
pub(super) fn begin<B: Backend>(
    backend: &B,
    streams: &HyperConnections,
    x: B::Tensor,
) -> B::Tensor {
    let mut all = None;
    for _ in 1..streams.expansion_rate {
        let so_far = all.as_ref().unwrap_or(&x);
        all = Some(backend.join_heads(so_far, &x, 1));
    }
    all.unwrap_or(x)
}
