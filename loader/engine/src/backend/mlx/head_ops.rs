//! Operations on the heads within rows: parts of each, parts put together, and a matrix of its own
//! for each.

use std::ops::Range;

use super::{Matrix, Mlx, Tensor};
use crate::backend::HeadOps;

impl HeadOps for Mlx {
    fn slice_heads(&self, x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
        slice(x, width, part)
    }

    fn join_heads(&self, a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
        join(a, b, heads)
    }

    fn head_linear(&self, x: &Tensor, stack: &Matrix, heads: usize) -> Tensor {
        linear(x, stack, heads)
    }
}

/// Columns `part` of every head of `width` columns.
fn slice(x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
    let (heads, kept) = (x.width / width, part.len());
    let array = x.runs(width).slice(2, part.start, part.end).reshape(&[x.rows, heads * kept]);
    Tensor::new(x.rows, heads * kept, array)
}

/// Each head of `a` with the same head of `b` behind it.
fn join(a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
    let both = [a.runs(a.width / heads), b.runs(b.width / heads)];
    let array = both[0].library().concat(&[&both[0], &both[1]], 2);
    let width = a.width + b.width;
    Tensor::new(a.rows, width, array.reshape(&[a.rows, width]))
}

/// Every head times its own matrix of a stack.
fn linear(x: &Tensor, stack: &Matrix, heads: usize) -> Tensor {
    let input = x.array.reshape(&[x.rows, heads, 1, x.width / heads]);
    let width = stack.outputs();
    Tensor::new(x.rows, width, stack.per_head(&input, heads).reshape(&[x.rows, width]))
}
