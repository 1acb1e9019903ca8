//! Mixtures of experts: routing, and the experts that are held here.

use std::ops::Range;

use shardpack_formats::spec::{Activation, ClampedSwiglu, Router};

use super::Tensors;

/// Routing and experts.
pub trait MixtureOfExperts: Tensors {
    /// Which experts the rows of a step go to, with their weights.
    type Routes: Send;

    /// Selects `top_k` experts for each row of logits `[rows, experts]`. Every rank comes to the
    /// same selection.
    fn route(
        &self,
        logits: Self::Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Self::Vector>,
    ) -> Self::Routes;

    /// Hash routing: weighs the experts that a table names, `top_k` for each row.
    fn hash_route(
        &self,
        logits: Self::Tensor,
        router: &Router,
        experts: &[u32],
        top_k: u32,
    ) -> Self::Routes;

    /// For each row the weighted sum of its experts, of what is held here.
    fn experts(
        &self,
        x: &Self::Tensor,
        routes: &Self::Routes,
        params: &ExpertParams<'_, Self::Matrix, Self::Vector>,
    ) -> Self::Tensor;
}

/// A router's vectors, one value for each expert.
#[derive(Clone, Copy, Debug)]
pub struct RouterVectors<'a, V> {
    /// Added to scores for the selection alone (`e_score_correction_bias`).
    pub correction: Option<&'a V>,
    /// Factors on weights.
    pub scales: Option<&'a V>,
}

/// The experts of one layer that are held here. Stacks are matrices whose outputs are those of
/// all experts held here, one after the other.
#[derive(Debug)]
pub struct ExpertParams<'a, M, V> {
    /// The experts held here.
    pub held: Range<usize>,
    /// Inner columns of each that are held here.
    pub size: usize,
    /// Stack of `[size, hidden]`; absent where the activation has no gate.
    pub gate: Option<&'a M>,
    /// Stack of `[size, hidden]`.
    pub up: &'a M,
    /// Stack of `[hidden, size]`.
    pub down: &'a M,
    /// `[held, size]`.
    pub gate_bias: Option<&'a V>,
    /// `[held, size]`.
    pub up_bias: Option<&'a V>,
    /// `[held, hidden]`, on the rank that adds it.
    pub down_bias: Option<&'a V>,
    /// The activation between the projections.
    pub activation: Activation,
    /// In its place.
    pub clamped: Option<ClampedSwiglu>,
    /// Largest `silu(gate)` and largest magnitude of `up`.
    pub limit: Option<f32>,
    /// Whether weights multiply the experts' inputs, not their outputs.
    pub weighs_inputs: bool,
    /// The first zero-computation expert, which returns its input, on the rank that adds it.
    pub zero_experts: Option<usize>,
}
