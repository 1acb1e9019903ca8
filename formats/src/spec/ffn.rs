//! Feed-forward parts.

use serde::{Deserialize, Serialize};

use super::ClampedSwiglu;
use crate::hex::HexF32;

/// A dense feed-forward part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ffn {
    /// Inner width.
    #[serde(rename = "intermediate_size")]
    pub size: u32,
    /// What stands between the input and output projections.
    pub activation: Activation,
    /// Whether its projections have biases.
    pub bias: bool,
    /// Names of the input and output projections where they are not `up_proj` and `down_proj`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<[String; 2]>,
    /// Factor on the gate's projection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_scale: Option<HexF32>,
    /// Factor on the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_scale: Option<HexF32>,
    /// Limits in place of the activation, of dense parts and of shared experts alike.
    #[serde(rename = "clamped_swiglu", default, skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedSwiglu>,
}

impl Ffn {
    /// Names of the input and output projections within the module.
    #[must_use]
    pub fn names(&self) -> [&str; 2] {
        self.names.as_ref().map_or(["up_proj", "down_proj"], |[up, down]| [up, down])
    }
}

/// The non-linearity of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate(x)) · up(x)`.
    SiluGlu,
    /// `gelu(gate(x)) · up(x)`, the approximation by tanh.
    GeluTanhGlu,
    /// `gelu(gate(x)) · up(x)`, exact.
    GeluGlu,
    /// `gelu(up(x))`, the approximation by tanh.
    GeluTanh,
    /// `gelu(up(x))`, exact.
    Gelu,
    /// `max(up(x), 0)²`.
    ReluSquared,
    /// `silu(up(x))`.
    Silu,
    /// `xielu(up(x))`: `α·x² + β·x` above zero, `α'·(exp(min(x, ε)) − 1 − x) + β·x` elsewhere, with
    /// parameters of each layer's own (`act_fn`): `α = softplus(alpha_p)`, `α' = β +
    /// softplus(alpha_n)`. Not for experts.
    Xielu,
}

impl Activation {
    /// Whether there is a gate projection next to the input projection.
    #[must_use]
    pub const fn is_gated(self) -> bool {
        matches!(self, Self::SiluGlu | Self::GeluTanhGlu | Self::GeluGlu)
    }
}
