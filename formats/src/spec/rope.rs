//! Rotary position embeddings.

use serde::{Deserialize, Serialize};

use crate::hex::HexF32;

/// A rotary position embedding. Angle of pair `i` at position `p` is `p · inv_freq[i]`, in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rope {
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Inverse frequencies, one per pair; the first `2 · len` elements of a head are rotated.
    pub inv_freq: Vec<HexF32>,
    /// Factor on cosine and sine.
    pub attention_factor: HexF32,
    /// Other frequencies for long sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long: Option<LongRope>,
}

/// Frequencies of all positions of a sequence that is longer than what a model was made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongRope {
    /// Sequences of more tokens than this, counted at their end, are long.
    #[serde(rename = "original_max_positions")]
    pub beyond: u32,
    /// Inverse frequencies, as many as the short ones.
    pub inv_freq: Vec<HexF32>,
}

/// How a head's elements pair up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeStyle {
    /// Element `i` with element `i + dim/2` (`rotate_half`).
    Half,
    /// Element `2i` with element `2i + 1`.
    Interleaved,
}
