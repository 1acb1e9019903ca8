//! The tensors of a backend, and the weights that they are multiplied by.

use shardpack_quantize::FloatFormat;

use crate::loading::{PackageTensor, Packing};

/// Tensors of one rank. Activations are `[tokens, width]`, one row per token of the step.
pub trait Tensors: Send + Sync {
    /// Activations; cheap to pass by value, perhaps not computed yet.
    type Tensor: Send;
    /// A weight matrix.
    type Matrix: Send + Sync;
    /// A gain or a bias.
    type Vector: Send + Sync;

    /// Calls `work` where this backend computes (its threads, its stream). A step runs in one
    /// such call.
    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R;

    /// Whether it reads integers packed this way; every backend reads them as they are stored.
    fn reads(&self, packing: Packing) -> bool {
        packing == Packing::Stored
    }

    /// Takes a matrix.
    fn matrix(&self, stored: StoredMatrix) -> Self::Matrix;

    /// Takes a matrix whose products decide between alternatives, tokens or experts: a backend that
    /// computes in 16 bits gives these in f32.
    fn precise_matrix(&self, stored: StoredMatrix) -> Self::Matrix {
        self.matrix(stored)
    }

    /// Takes a vector of floats.
    fn vector(&self, stored: &PackageTensor) -> Self::Vector;

    /// Takes a vector of floats and adds one to each.
    fn vector_plus_one(&self, stored: &PackageTensor) -> Self::Vector;

    /// A vector of ones.
    fn ones(&self, len: usize) -> Self::Vector;

    /// Zeros `[rows, width]`: the partial sum of a rank that holds nothing.
    fn zeros(&self, rows: usize, width: usize) -> Self::Tensor;

    /// Activations `[rows, width]` from their values; the opposite of
    /// [`TensorParallel::read`](super::TensorParallel::read).
    fn tensor(&self, values: Vec<f32>, width: usize) -> Self::Tensor;
}

/// A stored weight matrix `[outputs, inputs]` of this rank.
#[derive(Clone, Debug)]
pub struct StoredMatrix {
    /// Outputs held here.
    pub outputs: usize,
    /// Inputs held here.
    pub inputs: usize,
    /// The bytes; shapes and element types have been checked.
    pub weights: StoredWeights,
}

/// How a matrix is stored.
#[derive(Clone, Debug)]
pub enum StoredWeights {
    /// As floats `[outputs, inputs]`.
    Plain(PackageTensor),
    /// In MLX's affine groups.
    Affine {
        /// Packed integers, `[outputs, inputs · bits / 32]` words.
        words: PackageTensor,
        /// Floats `[outputs, inputs / group]`.
        scales: PackageTensor,
        /// Floats `[outputs, inputs / group]`.
        biases: PackageTensor,
        /// Bits per weight.
        bits: u32,
        /// Inputs per group.
        group: u32,
    },
    /// In float groups.
    Float {
        /// Packed values, `[outputs, inputs · bits / 32]` words.
        words: PackageTensor,
        /// Bytes `[outputs, inputs / group]`.
        scales: PackageTensor,
        /// What they are.
        format: FloatFormat,
    },
}

impl StoredWeights {
    /// The tensor that holds what is multiplied: floats, or packed values.
    #[must_use]
    pub const fn main(&self) -> &PackageTensor {
        match self {
            Self::Plain(weights)
            | Self::Affine { words: weights, .. }
            | Self::Float { words: weights, .. } => weights,
        }
    }
}
