//! Norms and residual connections of a layer.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::hex::HexF32;

/// Norms and residual connections of attention and feed-forward part of a layer. A norm is named by
/// its module within the layer; where none is named, there is none.
///
/// `x += after(part(before(x)))` for attention and then for the feed-forward part; in a parallel
/// block `x += attention(before(x)) + ffn(before(x))`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Norm of what goes into attention.
    #[serde(rename = "pre_attention_norm", default, skip_serializing_if = "Option::is_none")]
    pub before_attention: Option<String>,
    /// Norm of what comes out of attention.
    #[serde(rename = "post_attention_norm", default, skip_serializing_if = "Option::is_none")]
    pub after_attention: Option<String>,
    /// Norm of what goes into the feed-forward part; in a parallel block without it, that part
    /// reads what attention reads.
    #[serde(rename = "pre_ffn_norm", default, skip_serializing_if = "Option::is_none")]
    pub before_ffn: Option<String>,
    /// Norm of what comes out of the feed-forward part.
    #[serde(rename = "post_ffn_norm", default, skip_serializing_if = "Option::is_none")]
    pub after_ffn: Option<String>,
    /// Whether attention and feed-forward part run in parallel on the same input. They then share
    /// one all-reduce.
    #[serde(default, skip_serializing_if = "is_false")]
    pub parallel: bool,
    /// The tensor of one element within a layer by which the residual stream is multiplied after
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_scale: Option<String>,
    /// Factor on what is added to the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual_scale: Option<HexF32>,
}

impl Block {
    /// Norms before both parts, as Llama has them.
    #[must_use]
    pub fn pre_norm() -> Self {
        Self {
            before_attention: Some("input_layernorm".to_owned()),
            after_attention: None,
            before_ffn: Some("post_attention_layernorm".to_owned()),
            after_ffn: None,
            parallel: false,
            layer_scale: None,
            residual_scale: None,
        }
    }

    /// Whether it is [`Block::pre_norm`].
    #[must_use]
    pub fn is_pre_norm(&self) -> bool {
        *self == Self::pre_norm()
    }
}
