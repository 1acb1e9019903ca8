//! Normalisation of hidden vectors.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::hex::HexF32;

/// Normalisation of hidden vectors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Norm {
    /// The formula.
    pub kind: NormKind,
    /// Added to the mean of squares (`rms_norm_eps`).
    pub eps: HexF32,
    /// Whether the gain is one more than what is stored (Gemma).
    #[serde(default, skip_serializing_if = "is_false")]
    pub plus_one: bool,
    /// Whether a bias is added.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Whether there are no gains.
    #[serde(rename = "unweighted", default, skip_serializing_if = "is_false")]
    pub plain: bool,
}

/// The formula of a [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `gain · x / sqrt(mean(x²) + eps)`.
    Rms,
    /// `gain · (x − mean(x)) / sqrt(variance(x) + eps)`.
    Layer,
}
