//! Element types of stored tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An element type, spelled as the container format spells it (`"BF16"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    /// 64-bit IEEE float; not read as weights.
    F64,
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper half of an [`Dtype::F32`].
    BF16,
    /// 8-bit float with 4 bits of exponent and 3 of mantissa, without infinities.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    /// 8-bit float with 5 bits of exponent and 2 of mantissa.
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    /// A power of two by its biased exponent.
    #[serde(rename = "F8_E8M0")]
    F8E8M0,
    /// A byte that is 0 or 1.
    Bool,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned 16-bit word.
    U16,
    /// Signed 16-bit word.
    I16,
    /// Unsigned 32-bit word; packed quantized weights.
    U32,
    /// Signed 32-bit word.
    I32,
    /// Unsigned 64-bit word.
    U64,
    /// Signed 64-bit word.
    I64,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Self; 16] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 | Self::Bool | Self::U8 | Self::I8 => 1,
            Self::F16 | Self::BF16 | Self::U16 | Self::I16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F64 | Self::U64 | Self::I64 => 8,
        }
    }

    /// Whether elements are floating-point numbers that are weights without a scale.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// The container's spelling.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::U64 => "U64",
            Self::I64 => "I64",
        }
    }

    /// The type with this container spelling.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
