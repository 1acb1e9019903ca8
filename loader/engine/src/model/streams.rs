//! Several residual streams in place of one (hyper-connections): what a part of a layer reads is a
//! weighted sum of all streams, and what it computes is added to each by a weight of its own. All
//! weights of a row follow from its streams alone.
//!
//! Every rank has all streams and all parameters and comes to the same bits, so nothing more is
//! exchanged than with one stream.

use std::ops::Range;

use shardpack_formats::spec::{NormKind, Streams};

use super::{
    LoadError,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, NormStep, StreamStep};

/// The connection of one part of a layer with the streams.
pub(super) struct Connection<B: Backend> {
    mixes: Mixes<B>,
    /// Factors of what is read, of what is added and, where streams are mixed, of their matrix.
    scales: Vec<f32>,
}

/// What a part of a layer meets of the streams.
pub(super) struct Read<T> {
    /// What it reads, `[rows, hidden_size]`.
    pub(super) x: T,
    /// The weights by which streams take up what it computes, `[rows, streams]`.
    pub(super) weights: T,
    /// The streams that it is added to, where they are mixed before.
    pub(super) mixed: Option<T>,
}

/// One stream of all, before the last norm.
pub(super) struct Collapse<B: Backend> {
    mixes: Mixes<B>,
    scale: f32,
}

/// What weights are made of: numbers that are linear in all streams of a row.
struct Mixes<B: Backend> {
    /// `[numbers, streams · hidden_size]`.
    matrix: B::Matrix,
    /// A summand for each number.
    base: B::Vector,
    /// Gains of the norm before the matrix, which has none.
    ones: B::Vector,
}

impl<B: Backend> Mixes<B> {
    fn load(
        loader: &Loader<'_, B>,
        [matrix, base]: [&str; 2],
        numbers: usize,
    ) -> Result<Self, LoadError> {
        let (numbers, all) = (Part::whole(numbers), Part::whole(loader.spec.residual_width()));
        Ok(Self {
            matrix: loader.float_matrix(matrix, &numbers, &all)?,
            base: loader.vector(base, &numbers)?,
            ones: loader.backend.ones(all.full),
        })
    }

    /// The numbers of every row's streams.
    fn apply(&self, step: &Step<'_, B>, x: &B::Tensor) -> B::Tensor {
        let eps = step.spec.norm.eps.0;
        let norm = NormStep { kind: NormKind::Rms, eps, gain: &self.ones, bias: None };
        step.backend.linear(&step.backend.norm(x, &norm), &self.matrix)
    }
}

impl<B: Backend> Connection<B> {
    /// The connection of this module.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        streams: &Streams,
        module: &str,
    ) -> Result<Self, LoadError> {
        let name = |name: &str| format!("{module}.{name}");
        let (count, mixes) = (streams.count as usize, streams.mixed.is_some());
        let numbers = if mixes { (2 + count) * count } else { 2 * count };
        Ok(Self {
            mixes: Mixes::load(loader, [&name("fn"), &name("base")], numbers)?,
            scales: loader.numbers(&name("scale"), if mixes { 3 } else { 2 })?,
        })
    }

    /// What the part meets of the streams `x`.
    pub(super) fn read(
        &self,
        step: &Step<'_, B>,
        streams: &Streams,
        x: &B::Tensor,
    ) -> Read<B::Tensor> {
        let (backend, count) = (step.backend, streams.count as usize);
        let mixes = self.mixes.apply(step, x);
        let at = |numbers: Range<usize>, purpose: usize, magnitude: f32, eps: f32| StreamStep {
            numbers,
            base: &self.mixes.base,
            scale: self.scales[purpose],
            magnitude,
            eps,
        };
        let eps = streams.eps.0;
        let weights = backend.stream_weights(&mixes, &at(0..count, 0, 1.0, eps));
        let read = backend.collapse_streams(x, &weights);
        let post = if streams.mixed.is_some() { 0.0 } else { eps };
        let post = at(count..2 * count, 1, streams.magnitude.0, post);
        let mixed = streams.mixed.map(|rounds| {
            let matrix = at(2 * count..(2 + count) * count, 2, 1.0, eps);
            backend.mix_streams(x, &mixes, &matrix, rounds)
        });
        Read { x: read, weights: backend.stream_weights(&mixes, &post), mixed }
    }
}

impl<B: Backend> Collapse<B> {
    /// The last one of a model.
    pub(super) fn load(loader: &Loader<'_, B>, streams: &Streams) -> Result<Self, LoadError> {
        let names = ["model.hc_head.hc_fn", "model.hc_head.hc_base"];
        Ok(Self {
            mixes: Mixes::load(loader, names, streams.count as usize)?,
            scale: loader.number("model.hc_head.hc_scale")?,
        })
    }

    /// `[rows, hidden_size]` of all streams.
    pub(super) fn apply(&self, step: &Step<'_, B>, streams: &Streams, x: &B::Tensor) -> B::Tensor {
        let at = StreamStep {
            numbers: 0..streams.count as usize,
            base: &self.mixes.base,
            scale: self.scale,
            magnitude: 1.0,
            eps: streams.eps.0,
        };
        let weights = step.backend.stream_weights(&self.mixes.apply(step, x), &at);
        step.backend.collapse_streams(x, &weights)
    }
}

/// All streams as a model's first layer reads them: each is the embedding.
pub(super) fn begin<B: Backend>(backend: &B, streams: &Streams, x: B::Tensor) -> B::Tensor {
    let mut all = None;
    for _ in 1..streams.count {
        let so_far = all.as_ref().unwrap_or(&x);
        all = Some(backend.join_heads(so_far, &x, 1));
    }
    all.unwrap_or(x)
}
