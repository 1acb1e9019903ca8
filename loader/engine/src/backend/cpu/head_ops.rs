//! Operations on the heads within rows: parts of each, parts put together, and a matrix of its own
//! for each.

use std::ops::Range;

use shardpack_kernels::matmul;

use super::{Cpu, InputObserver, Tensor};
use crate::backend::{HeadOps, StoredMatrix};

impl HeadOps for Cpu {
    fn slice_heads(&self, x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
        slice(x, width, part)
    }

    fn join_heads(&self, a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
        join(a, b, heads)
    }

    fn head_linear(&self, x: &Tensor, stack: &StoredMatrix, heads: usize) -> Tensor {
        linear(x, stack, heads, self.observer.as_deref())
    }
}

/// Columns `part` of every head of `width` columns.
fn slice(x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
    assert!(x.width.is_multiple_of(width) && part.end <= width, "parts of heads");
    let heads = x.values.chunks_exact(width);
    let mut out = Tensor::unset(x.rows(), x.width / width * part.len());
    for (to, head) in out.values.chunks_exact_mut(part.len().max(1)).zip(heads) {
        to.copy_from_slice(&head[part.clone()]);
    }
    out
}

/// Each head of `a` with the same head of `b` behind it.
fn join(a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
    assert_eq!(a.rows(), b.rows(), "rows of both parts");
    let [left, right] = [a.width / heads, b.width / heads];
    let mut out = Tensor::unset(a.rows(), a.width + b.width);
    let both = a.values.chunks_exact(left).zip(b.values.chunks_exact(right));
    for (to, (a, b)) in out.values.chunks_exact_mut(left + right).zip(both) {
        to[..left].copy_from_slice(a);
        to[left..].copy_from_slice(b);
    }
    out
}

/// Every head times its own matrix of the stack.
fn linear(
    x: &Tensor,
    stack: &StoredMatrix,
    heads: usize,
    observer: Option<&dyn InputObserver>,
) -> Tensor {
    let (rows, inputs, outputs) = (x.rows(), stack.inputs, stack.outputs / heads);
    assert_eq!(x.width, heads * inputs, "inputs of every head");
    let mut out = Tensor::zeros(rows, heads * outputs);
    let [mut gathered, mut part] = [inputs, outputs].map(|width| Tensor::unset(rows, width).values);
    for head in 0..heads {
        for (row, to) in gathered.chunks_exact_mut(inputs).enumerate() {
            to.copy_from_slice(&x.values[row * x.width + head * inputs..][..inputs]);
        }
        if let Some(observer) = observer {
            observer.observe(stack, head, heads, &gathered);
        }
        matmul(&gathered, &stack.rows(head * outputs..(head + 1) * outputs), &mut part);
        for (row, from) in part.chunks_exact(outputs).enumerate() {
            out.values[row * heads * outputs + head * outputs..][..outputs].copy_from_slice(from);
        }
    }
    out
}
