//! Short convolutions: the last few tokens in place of keys and values.

use serde::{Deserialize, Serialize};

/// A gated short convolution, in place of attention in some layers (LFM 2).
///
/// Of each token there are `b`, `c` and `x`, as wide as the residual stream. Each channel of `b · x`
/// goes through a causal convolution of its own, and the result is multiplied by `c`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convolution {
    /// Tokens that it sees.
    #[serde(rename = "kernel_size")]
    pub kernel: u32,
}
