//! Hyper-connections: several residual streams in place of one.

use std::ops::Range;

use super::Tensors;

/// Operations on residual streams `[rows, streams · width]`.
pub trait HyperConnections: Tensors {
    /// `magnitude · sigmoid(scale · x + base) + eps` of some columns, `[rows, streams]`.
    fn stream_weights(
        &self,
        mixes: &Self::Tensor,
        params: &StreamParams<'_, Self::Vector>,
    ) -> Self::Tensor;

    /// Mixes the streams of each row: stream `k` becomes the sum over `j` of
    /// `matrix[j, k] · stream j`. The matrix is `softmax(scale · x + base) + eps` of `streams²`
    /// columns, row by row, whose columns and rows are divided in turn by their sum and `eps`
    /// (Sinkhorn-Knopp): columns first and last, `rounds` times.
    fn mix_streams(
        &self,
        x: &Self::Tensor,
        mixes: &Self::Tensor,
        params: &StreamParams<'_, Self::Vector>,
        rounds: u32,
    ) -> Self::Tensor;

    /// For each row the sum of its streams, times their weights `[rows, streams]`, in their order.
    fn collapse_streams(&self, x: &Self::Tensor, weights: &Self::Tensor) -> Self::Tensor;

    /// Adds a part `[rows, width]` to every stream, times its weight.
    fn add_to_streams(
        &self,
        x: Self::Tensor,
        part: &Self::Tensor,
        weights: &Self::Tensor,
    ) -> Self::Tensor;
}

/// Weights of residual streams, from some columns of a tensor.
#[derive(Debug)]
pub struct StreamParams<'a, V> {
    /// The columns, one for each stream.
    pub columns: Range<usize>,
    /// Added to each column of the tensor.
    pub base: &'a V,
    /// Factor on the columns.
    pub scale: f32,
    /// Factor on the sigmoids.
    pub magnitude: f32,
    /// Added to them in the end.
    pub eps: f32,
}
