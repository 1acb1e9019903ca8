//! Names of models and layouts, computed from what they name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardpack_formats::Spec;
use shardpack_quantize::Dtype;

use crate::{
    canonical::{self, CanonicalError},
    digest::Digest,
    layout::Layout,
};

/// The three names of what a package holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// Weights and architecture, the same for any number of ranks.
    pub weights: Digest,
    /// Weights id with tokenizer, chat template and generation config.
    pub model: Digest,
    /// Model id with every axis's ranges.
    pub layout: Digest,
}

/// One unsharded tensor, as the weights id sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorIdentity {
    /// Normalised name.
    pub name: String,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Shape as stored, before sharding.
    pub shape: Vec<u64>,
    /// Bits of the matrix that it belongs to; 0 when not quantized.
    pub bits: u32,
    /// Group size of the matrix that it belongs to; 0 when not quantized.
    pub group: u32,
    /// BLAKE3 of its unsharded bytes.
    pub blake3: Digest,
}

/// Digests of the files that make text of a model's tokens. An absent file has no entry.
pub type TextFiles = BTreeMap<String, Digest>;

/// Files of a package that are part of the model id.
pub const TEXT_FILES: &[&str] =
    &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// BLAKE3 of the canonical list of unsharded tensors, sorted by name, and the architecture.
pub fn weights_id(tensors: &[TensorIdentity], spec: &Spec) -> Result<Digest, CanonicalError> {
    #[derive(Serialize)]
    struct Input<'a> {
        architecture: &'a Spec,
        tensors: Vec<&'a TensorIdentity>,
    }
    let mut sorted: Vec<_> = tensors.iter().collect();
    sorted.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    canonical::digest(&Input { architecture: spec, tensors: sorted })
}

/// BLAKE3 of the weights id and the digests of the text files.
pub fn model_id(weights: Digest, text: &TextFiles) -> Result<Digest, CanonicalError> {
    #[derive(Serialize)]
    struct Input<'a> {
        text: &'a TextFiles,
        weights: Digest,
    }
    canonical::digest(&Input { text, weights })
}

/// BLAKE3 of the model id and every axis's ranges.
pub fn layout_id(model: Digest, layout: &Layout) -> Result<Digest, CanonicalError> {
    #[derive(Serialize)]
    struct Input<'a> {
        layout: &'a Layout,
        model: Digest,
    }
    canonical::digest(&Input { layout, model })
}
