//! Collectives between the ranks of one step, and norms whose rows are sharded over ranks.

use std::ops::Range;

use super::{KvCache, NormParams, Ranks, StepError};

/// Collectives within a step. A backend that computes later defers them too: a failure of the rank
/// group comes back from the call itself, or from [`TensorParallel::read`] or
/// [`TensorParallel::flush`].
pub trait TensorParallel: KvCache {
    /// The all-reduce of every rank's partial sum, added in rank order.
    fn all_reduce(&self, x: Self::Tensor, ranks: &Ranks<'_>) -> Result<Self::Tensor, StepError>;

    /// The ranks' columns side by side in rank order; `widths` are every rank's.
    fn gather_columns(
        &self,
        x: Self::Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Self::Tensor, StepError>;

    /// For each row the sum of squares over each part's columns, `[rows, parts]`; the first factor
    /// of a norm whose rows are sharded over ranks.
    fn square_sums(&self, parts: &[Columns<'_, Self::Tensor>]) -> Self::Tensor;

    /// `gain · x / sqrt(sum / full_width + eps)` with each row's sum of squares.
    fn norm_by_sums(
        &self,
        x: Self::Tensor,
        params: &NormParams<'_, Self::Vector>,
        sums: SquareSums<'_, Self::Tensor>,
    ) -> Self::Tensor;

    /// The values, rows contiguous. Deferred collectives take place now.
    fn read(&self, x: Self::Tensor, ranks: &Ranks<'_>) -> Result<Vec<f32>, StepError>;

    /// Ends a step: what was deferred and is kept in the caches is computed.
    fn flush(&self, caches: &mut [&mut Self::Cache], ranks: &Ranks<'_>) -> Result<(), StepError>;
}

/// Some columns of a tensor.
#[derive(Clone, Debug)]
pub struct Columns<'a, T> {
    /// The tensor.
    pub x: &'a T,
    /// The columns.
    pub columns: Range<usize>,
}

/// The sum of squares of every row, over all ranks.
#[derive(Clone, Copy, Debug)]
pub struct SquareSums<'a, T> {
    /// `[rows, parts]`, see [`TensorParallel::square_sums`].
    pub sums: &'a T,
    /// The part.
    pub part: usize,
    /// Elements of a row on all ranks together.
    pub full_width: usize,
}
