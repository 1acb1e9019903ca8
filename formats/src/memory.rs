//! Sizes that the engine allocates by and the planner counts with: pages of the KV cache, bytes of a
//! cached key or value, tokens of a step. Knows no model, no layout and no backend.

/// Tokens of a page of the KV cache: what sequences with a common prefix share, and the unit of KV
/// memory.
pub const TOKENS_PER_PAGE: usize = 256;

/// KV memory of each rank at least, unless told otherwise: several sequences of a small model fit.
pub const MIN_KV_BYTES: u64 = 64 << 20;

/// Chunked-prefill token budget: prompt tokens of one step, which bounds its activations.
pub const PREFILL_TOKENS: usize = 512;

/// Chunked-prefill token budget of a step in which other sequences decode, so that these never wait
/// long for their next token.
pub const PREFILL_TOKENS_BESIDE_DECODE: usize = 64;

/// Index scores that a backend holds at the same time: 32 MiB. Rows beyond follow one after the
/// other.
pub const MAX_INDEX_SCORES: usize = 8 << 20;

/// How the KV cache is stored. What is stored is rounded once, so a token's bits do not depend on
/// how its sequence was divided into steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// As computed.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// 8-bit integers, with one scale for each head of each token.
    Q8,
}

impl KvType {
    /// Bytes of one element.
    #[must_use]
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8 => 1,
        }
    }

    /// Bytes of the scale of a head of a token.
    #[must_use]
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Q8 => size_of::<f32>(),
        }
    }

    /// How keys of an indexer are stored: integers are too coarse for scores that decide.
    #[must_use]
    pub const fn of_indexer(self) -> Self {
        match self {
            Self::Q8 => Self::F16,
            kind => kind,
        }
    }

    /// Bytes of the key or value of one head of a token, its scale included.
    #[must_use]
    pub const fn head_bytes(self, head_dim: u64) -> u64 {
        head_dim * self.element_bytes() as u64 + self.scale_bytes() as u64
    }

    /// Bytes of the indexer's key of a token.
    #[must_use]
    pub const fn indexer_bytes(self, head_dim: u64) -> u64 {
        self.of_indexer().head_bytes(head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_head_are_its_elements_and_its_scale() {
        let found = [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8]
            .map(|kind| [kind.head_bytes(128), kind.indexer_bytes(128)]);
        assert_eq!(found, [[512, 512], [256, 256], [256, 256], [132, 256]]);
    }
}
