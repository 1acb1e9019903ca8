//! Element types of stored tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An element type, spelled as the container format spells it (`"BF16"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper half of an [`Dtype::F32`].
    BF16,
    /// Unsigned byte.
    U8,
    /// Unsigned 32-bit word; packed quantized weights.
    U32,
    /// Signed 32-bit word.
    I32,
    /// Signed 64-bit word.
    I64,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// The container's spelling.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U8 => "U8",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::I64 => "I64",
        }
    }

    /// The type with this container spelling.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::BF16, Self::U8, Self::U32, Self::I32, Self::I64]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
