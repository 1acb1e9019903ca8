//! Operations on the heads within rows: MLA's per-head projections, gates within a projection.

use std::ops::Range;

use super::Tensors;

/// Operations on the heads within rows.
pub trait HeadOps: Tensors {
    /// Columns `part` of every head of `width` columns.
    fn slice_heads(&self, x: &Self::Tensor, width: usize, part: Range<usize>) -> Self::Tensor;

    /// Each head of `a` followed by the same head of `b`.
    fn join_heads(&self, a: &Self::Tensor, b: &Self::Tensor, heads: usize) -> Self::Tensor;

    /// Every head times its own matrix of a stack.
    fn head_linear(&self, x: &Self::Tensor, stack: &Self::Matrix, heads: usize) -> Self::Tensor;
}
