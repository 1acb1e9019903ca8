//! Operations that every decoder needs: embedding, projections, norms, rotary embeddings and
//! elementwise functions.

use std::ops::Range;

use shardpack_formats::spec::{Activation, ClampedSwiglu, NormKind, Rope};

use super::Tensors;

/// Embedding, projections, norms, rotary embeddings and elementwise functions.
pub trait DenseOps: Tensors {
    /// Angles of one rotary embedding at the positions of one step.
    type Rotation: Send;

    /// Rows of `table`, which has those of the tokens `held`; zeros for other tokens.
    fn embed(&self, tokens: &[u32], table: &Self::Matrix, held: Range<usize>) -> Self::Tensor;

    /// `x · matrixᵀ`.
    fn linear(&self, x: &Self::Tensor, matrix: &Self::Matrix) -> Self::Tensor;

    /// [`DenseOps::linear`] of each of several matrices of the same inputs.
    fn linears<const N: usize>(
        &self,
        x: &Self::Tensor,
        matrices: [&Self::Matrix; N],
    ) -> [Self::Tensor; N] {
        matrices.map(|matrix| self.linear(x, matrix))
    }

    /// [`DenseOps::linear`] with the output head: what is rounded here reaches the logits as it is.
    fn logits(&self, x: &Self::Tensor, head: &Self::Matrix) -> Self::Tensor {
        self.linear(x, head)
    }

    /// Adds `bias` to every row.
    fn add_bias(&self, x: Self::Tensor, bias: &Self::Vector) -> Self::Tensor;

    /// Normalises each consecutive run of the gain's length.
    fn norm(&self, x: &Self::Tensor, params: &NormParams<'_, Self::Vector>) -> Self::Tensor;

    /// Angles for rows at `positions` of sequences that end with `totals` tokens; the total
    /// selects the frequencies of a rope with long-context frequencies.
    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Self::Rotation;

    /// Rotates a part of every head.
    fn rotate(&self, x: Self::Tensor, rotation: &Self::Rotation, part: RotatedPart)
    -> Self::Tensor;

    /// The activation between the projections of a feed-forward part: a function of `gate` times
    /// `up`, or of `up` alone where the activation has no gate.
    fn activate(
        &self,
        activation: Activation,
        gate: Option<Self::Tensor>,
        up: Self::Tensor,
    ) -> Self::Tensor;

    /// The activation with learned parameters, see [`Activation::Xielu`].
    fn xielu(&self, x: Self::Tensor, params: &Xielu) -> Self::Tensor;

    /// `min(silu(gate), limit) · clamp(up, −limit, limit)`.
    fn clamped_glu(&self, gate: Self::Tensor, up: Self::Tensor, limit: f32) -> Self::Tensor;

    /// See [`ClampedSwiglu`].
    fn clamped_swiglu(
        &self,
        gate: Self::Tensor,
        up: Self::Tensor,
        clamped: ClampedSwiglu,
    ) -> Self::Tensor;

    /// `x · sigmoid(gate)`; each column of the gate is for as many consecutive ones of `x`.
    fn sigmoid_gate(&self, x: Self::Tensor, gate: &Self::Tensor) -> Self::Tensor;

    /// `x · ln(1 + exp(gate))`; each column of the gate is for as many consecutive ones of `x`.
    fn softplus_gate(&self, x: Self::Tensor, gate: &Self::Tensor) -> Self::Tensor;

    /// `clamp(x, −limit, limit)`.
    fn limit(&self, x: Self::Tensor, limit: f32) -> Self::Tensor;

    /// `factor · x`.
    fn scale(&self, x: Self::Tensor, factor: f32) -> Self::Tensor;

    /// Each row times its factor.
    fn scale_rows(&self, x: Self::Tensor, factors: &[f32]) -> Self::Tensor;

    /// `cap · tanh(x / cap)`.
    fn softcap(&self, x: Self::Tensor, cap: f32) -> Self::Tensor;

    /// `a + b`.
    fn add(&self, a: Self::Tensor, b: &Self::Tensor) -> Self::Tensor;

    /// The given rows, in this order.
    fn select_rows(&self, x: &Self::Tensor, rows: &[usize]) -> Self::Tensor;
}

/// A norm's formula and gains.
#[derive(Debug)]
pub struct NormParams<'a, V> {
    /// The formula.
    pub kind: NormKind,
    /// Under the root.
    pub eps: f32,
    /// Factors; each run of as many elements is normalised by itself.
    pub gain: &'a V,
    /// Added to the result.
    pub bias: Option<&'a V>,
}

/// The part of every head that a rotary embedding rotates: from `offset` on, as many elements as
/// the embedding has angles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotatedPart {
    /// Width of a head.
    pub head_dim: usize,
    /// First element that is rotated.
    pub offset: usize,
}

/// Parameters of [`Activation::Xielu`], as it is computed with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xielu {
    /// Factor on the square, above zero.
    pub above: f32,
    /// Factor on the exponential, below zero.
    pub below: f32,
    /// Factor on the linear term.
    pub beta: f32,
    /// Largest exponent.
    pub eps: f32,
}
