//! Who hears what matrices read.

use crate::backend::StoredMatrix;

/// Hears the inputs of every matrix, before they are multiplied.
pub trait InputObserver: Send + Sync {
    /// `x`, `[rows, inputs]`, is about to be multiplied by one matrix of a stack of `count`; 0 of 1
    /// where it is no stack. Called on the thread that called [`Tensors::run`](super::Tensors::run).
    fn observe(&self, matrix: &StoredMatrix, index: usize, count: usize, x: &[f32]);
}
