//! Attention over a compressed latent (multi-head latent attention).

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::hex::HexF32;

/// Multi-head latent attention, in place of grouped-query attention in every layer.
///
/// Keys and values of all heads are linear in one latent per token, which is all that is cached,
/// with one rotated key part that the heads share. A head's query is brought into the latent space
/// (`embed_q`), and its result out of it (`unembed_out`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mla {
    /// Width of the queries' latent; none where queries are projected at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_rank: Option<u32>,
    /// Width of the latent of keys and values.
    pub kv_rank: u32,
    /// Width of a head's part without position.
    pub nope: u32,
    /// Width of a head's rotated part.
    pub rope: u32,
    /// Width of a head's values.
    pub value: u32,
    /// Epsilon of the norms of both latents.
    pub eps: HexF32,
    /// Whether the projections to the latents have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
}
