//! Float groups: `w ≈ scale · v` for 16 or 32 neighbouring input features, with floats `v` of 4 or
//! 8 bits. These are MLX's modes `mxfp4` and `mxfp8` (the OCP's microscaling formats) and `nvfp4`
//! (NVIDIA's, without its second scale), byte for byte.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `weight` | u32 | `[…, in · bits / 32]` | E2M1 nibbles, the low one first, or E4M3 bytes |
//! | `scales` | u8 | `[…, in / group]` | a power of two as E8M0 (`mxfp4`, `mxfp8`), or E4M3 (`nvfp4`) |
//!
//! A group fills whole words, so a shard boundary between groups is one between words.

mod quantize;
#[cfg(test)]
mod tests;

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::small_floats::{E2M1, E4M3, e8m0};

pub use quantize::{Source, quantize_after};

/// A format of float groups. Bits and group size are part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FloatFormat {
    /// E2M1 in groups of 32 with powers of two.
    Mxfp4,
    /// E2M1 in groups of 16 with scales in E4M3.
    Nvfp4,
    /// E4M3 in groups of 32 with powers of two.
    Mxfp8,
}

impl FloatFormat {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Mxfp4, Self::Nvfp4, Self::Mxfp8];

    /// The name on the command line, in manifests and as MLX's mode.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// Bits of one value.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::Mxfp4 | Self::Nvfp4 => 4,
            Self::Mxfp8 => 8,
        }
    }

    /// Weights that share a scale.
    #[must_use]
    pub const fn group_size(self) -> u32 {
        match self {
            Self::Mxfp4 | Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Bytes of one group's values; a multiple of four.
    #[must_use]
    pub const fn group_bytes(self) -> usize {
        (self.group_size() * self.bits() / 8) as usize
    }

    /// The number that a scale's byte is.
    #[must_use]
    #[inline]
    pub fn scale(self, byte: u8) -> f32 {
        match self {
            Self::Mxfp4 | Self::Mxfp8 => e8m0(byte),
            Self::Nvfp4 => E4M3[usize::from(byte)],
        }
    }

    /// The largest magnitude of a value.
    const fn largest(self) -> f32 {
        match self {
            Self::Mxfp4 | Self::Nvfp4 => 6.0,
            Self::Mxfp8 => 448.0,
        }
    }
}

impl fmt::Display for FloatFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for FloatFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("unknown format of float groups {name:?}; known: {known}")
        })
    }
}

/// Writes the weights of whole groups as f32. Every product is exact, but for those below the
/// range of f32.
///
/// # Panics
/// When a length does not fit the others.
pub fn dequantize(format: FloatFormat, packed: &[u8], scales: &[u8], out: &mut [f32]) {
    assert_eq!(packed.len(), scales.len() * format.group_bytes(), "values of every group");
    let group = format.group_size() as usize;
    assert_eq!(out.len(), scales.len() * group, "weights of every group");
    let groups = packed.chunks_exact(format.group_bytes()).zip(out.chunks_exact_mut(group));
    for ((packed, out), scale) in groups.zip(scales) {
        let scale = format.scale(*scale);
        if format.bits() == 4 {
            for (byte, pair) in packed.iter().zip(out.as_chunks_mut::<2>().0) {
                *pair = [byte & 15, byte >> 4].map(|nibble| scale * E2M1[usize::from(nibble)]);
            }
        } else {
            for (byte, out) in packed.iter().zip(out) {
                *out = scale * E4M3[usize::from(*byte)];
            }
        }
    }
}
