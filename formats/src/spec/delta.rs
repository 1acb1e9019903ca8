//! Linear attention by a gated delta rule.

use serde::{Deserialize, Serialize};

use crate::hex::HexF32;

/// Gated `DeltaNet`, in place of attention in some layers.
///
/// Queries, keys and values go through a causal convolution of each channel and `silu`. For each
/// value head there is a state `S` `[key_dim, value_dim]`; with the normalised key `k` and query
/// `q` of its key head, `S ← S·exp(g)`, `S ← S + k·(beta·(v − Sᵀk))ᵀ`, and the result is `Sᵀq`,
/// where `beta = sigmoid(b)` and `g = −exp(A_log)·softplus(a + dt_bias)`. The result is
/// normalised (rms, own gain) and multiplied by `silu(z)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    /// Heads of queries and keys.
    pub key_heads: u32,
    /// Heads of values, a multiple: consecutive ones share a key head.
    pub value_heads: u32,
    /// Width of a key head.
    pub key_dim: u32,
    /// Width of a value head.
    pub value_dim: u32,
    /// Tokens that the convolution sees.
    pub kernel: u32,
    /// Epsilon of the result's norm.
    pub eps: HexF32,
}
