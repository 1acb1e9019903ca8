//! Hyper-connections: several residual streams.

use serde::{Deserialize, Serialize};

use crate::hex::HexF32;

/// Hyper-connections: residual streams of `hidden_size` elements each, side by side in place of one.
///
/// Every stream begins as the embedding. For each part of a layer a matrix of the model's own
/// (`attn_hc`, `ffn_hc`: `fn`, `base`, `scale`) makes of all streams together, normalised by the
/// model's epsilon without gains, a value `m` for each stream and purpose, and of that a weight:
/// `pre = sigmoid(scale · m + base) + eps` and `post = magnitude · sigmoid(scale · m + base) + eps`.
/// The part reads the sum of `pre · stream`, and `post` times what it computes is added to each
/// stream. Before the last norm `hc_head` makes one of all by a `pre` of its own.
///
/// Where streams are mixed, `streams²` further values make a matrix `softmax(scale · m + base) + eps`,
/// row by row, whose columns and rows are divided in turn by their sum and `eps` (Sinkhorn and Knopp;
/// columns first and last). Before a part's result is added, stream `k` becomes the sum over `j` of
/// `matrix[j, k] · stream j`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HyperConnections {
    /// Streams (`hc_mult`).
    pub expansion_rate: u32,
    /// Factor on `post` (`hc_magnitude`).
    pub magnitude: HexF32,
    /// Added to `pre`, and to `post` where streams are not mixed (`hc_eps`).
    pub eps: HexF32,
    /// Sinkhorn iterations that normalise the matrix that mixes streams (`hc_sinkhorn_iters`); absent
    /// where streams are not mixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinkhorn_iterations: Option<u32>,
}
