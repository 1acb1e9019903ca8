//! Affine groups: `w ≈ scale · q + bias` for 32, 64 or 128 neighbouring input features, with
//! unsigned integers `q` of a few bits. This is MLX's `affine` mode, byte for byte.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `weight` | u32 | `[…, in · bits / 32]` | little-endian bit stream; element `k` of a row has bits `k·bits..(k+1)·bits` |
//! | `scales` | model dtype | `[…, in / group]` | often negative: its sign says which end is exact |
//! | `biases` | model dtype | `[…, in / group]` | the exact end of the group's range |
//!
//! A group fills whole words (`group · bits / 32`), so a cut between groups is a cut between
//! words.

mod error;
mod pack;
mod quantize;

pub use error::{ErrorSums, error};
pub use pack::{pack, unpack};
pub use quantize::{QuantizeError, Rounding, quantize};

use half::{bf16, f16};

use crate::dtype::Dtype;

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

/// A float as it will be stored, and its bytes.
#[must_use]
pub fn round_to(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Writes `value` as `dtype` into `out`, which has the size of one element.
///
/// # Panics
/// When `dtype` is no float type.
pub fn store(dtype: Dtype, value: f32, out: &mut [u8]) {
    match dtype {
        Dtype::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        Dtype::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        Dtype::F32 => out.copy_from_slice(&value.to_le_bytes()),
        other => panic!("{other} holds no floats"),
    }
}

/// Widens little-endian floats to f32.
///
/// # Panics
/// When `dtype` is no float type or `bytes` and `out` differ in length.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size_bytes(), "one element for each");
    match dtype {
        Dtype::BF16 => {
            for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
            }
        }
        Dtype::F16 => {
            for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
            }
        }
        Dtype::F32 => {
            for (value, four) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            }
        }
        other => panic!("{other} holds no floats"),
    }
}
