//! Gated short convolutions.

use serde::{Deserialize, Serialize};

/// A gated short convolution, in place of attention in some layers (LFM 2).
///
/// Each token is projected to `b`, `c` and `x`, as wide as the residual stream. Each channel of `b · x`
/// goes through a causal convolution of its own, and the result is multiplied by `c`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShortConvolution {
    /// Kernel size, in tokens.
    #[serde(rename = "kernel_size")]
    pub kernel: u32,
}
