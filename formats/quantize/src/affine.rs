//! Affine groups: `w ≈ scale · q + bias` for 32, 64 or 128 neighbouring input features, with
//! unsigned integers `q` of a few bits. This is MLX's `affine` mode, byte for byte.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `weight` | u32 | `[…, in · bits / 32]` | little-endian bit stream; element `k` of a row has bits `k·bits..(k+1)·bits` |
//! | `scales` | model dtype | `[…, in / group]` | often negative: its sign says which end is exact |
//! | `biases` | model dtype | `[…, in / group]` | the exact end of the group's range |
//!
//! A group fills whole words (`group · bits / 32`), so a shard boundary between groups is one between
//! words.

#![expect(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables its instructions"
)]

mod descent;
mod error;
mod feedback;
mod floats;
mod hessian;
mod lanes;
mod mlx;
mod pack;
mod products;
mod quantize;
mod search;
#[cfg(test)]
mod tests;
mod trials;

pub use error::{ErrorSums, GROUPS_PER_TASK, error};
pub use feedback::{OutputError, quantize_with_feedback};
pub use floats::{CastError, cast, narrow, widen};
pub use hessian::Hessian;
pub use pack::{pack, unpack};
pub use quantize::{QuantizeError, QuantizeOptions, Rounding, quantize, quantize_after};

/// Bits and group size of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffineFormat {
    bits: u32,
    group_size: u32,
}

impl AffineFormat {
    /// A format that MLX's kernels know: 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128.
    #[must_use]
    pub const fn new(bits: u32, group_size: u32) -> Option<Self> {
        match (bits, group_size) {
            (2..=6 | 8, 32 | 64 | 128) => Some(Self { bits, group_size }),
            _ => None,
        }
    }

    /// Bits of one integer.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.bits
    }

    /// Weights that share a scale and a bias.
    #[must_use]
    pub const fn group_size(self) -> u32 {
        self.group_size
    }

    /// Bytes of one group's integers; a multiple of four.
    #[must_use]
    pub const fn group_bytes(self) -> usize {
        self.group_size as usize * self.bits as usize / 8
    }

    /// Largest integer.
    #[must_use]
    pub const fn max_q(self) -> u32 {
        (1 << self.bits) - 1
    }
}
