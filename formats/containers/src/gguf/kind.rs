//! Types of a tensor's blocks: which there are, and their sizes.
//!
//! Source: `ggml-common.h` of llama.cpp and `GGML_QUANT_SIZES` of its Python package.

use std::fmt;

use shardpack_quantize::dtype::Dtype;

/// How a tensor's elements are stored. Rows are whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Floats as they are.
    Floats(Dtype),
    /// 32 integers of 4 bits around 8, one scale.
    Q4_0,
    /// 32 integers of 4 bits, scale and least value.
    Q4_1,
    /// 32 integers of 5 bits around 16, one scale.
    Q5_0,
    /// 32 integers of 5 bits, scale and least value.
    Q5_1,
    /// 32 signed bytes, one scale.
    Q8_0,
    /// 256 integers of 2 bits; scale and least value of each 16 in 4 bits.
    Q2K,
    /// 256 integers of 3 bits; scales of each 16 in 6 bits.
    Q3K,
    /// 256 integers of 4 bits; scale and least value of each 32 in 6 bits.
    Q4K,
    /// The same with integers of 5 bits.
    Q5K,
    /// 256 integers of 6 bits; scales of each 16 in 8 bits.
    Q6K,
    /// 32 indices of 4 bits into a table of signed bytes, one scale.
    Iq4Nl,
    /// 256 such indices; scales of each 32 in 6 bits.
    Iq4Xs,
    /// 256 of a codebook's entries: −1, 0 and 1 with an eighth; scales of each 32 in 3 bits.
    Iq1S,
    /// The same with scales of each 16.
    Iq1M,
    /// 256 of a codebook's magnitudes with signs; scales of each 32 in 4 bits.
    Iq2Xxs,
    /// The same with scales of each 16.
    Iq2Xs,
    /// The same with a larger codebook and all signs.
    Iq2S,
    /// 256 of a codebook's magnitudes with signs; scales of each 32 in 4 bits.
    Iq3Xxs,
    /// The same with a larger codebook and all signs.
    Iq3S,
    /// 256 of −1, 0 and 1 as digits of base 3, one scale.
    Tq1_0,
    /// 256 of −1, 0 and 1 in 2 bits, one scale.
    Tq2_0,
    /// 128 signs, one scale.
    Q1_0,
    /// 64 floats of 4 bits, scales of each 16 in 8 bits.
    Nvfp4,
    /// 32 floats of 4 bits, a power of two as scale.
    Mxfp4,
}

/// The names of types that are not read, for messages.
const UNREAD: &[(u32, &str)] = &[
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (42, "Q2_0"),
];

impl Kind {
    /// The type that ggml numbers so; the name of one that is not read otherwise.
    pub(super) fn from_id(id: u32) -> Result<Self, String> {
        Ok(match id {
            0 => Self::Floats(Dtype::F32),
            1 => Self::Floats(Dtype::F16),
            30 => Self::Floats(Dtype::BF16),
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            20 => Self::Iq4Nl,
            23 => Self::Iq4Xs,
            16 => Self::Iq2Xxs,
            17 => Self::Iq2Xs,
            18 => Self::Iq3Xxs,
            19 => Self::Iq1S,
            21 => Self::Iq3S,
            22 => Self::Iq2S,
            29 => Self::Iq1M,
            34 => Self::Tq1_0,
            35 => Self::Tq2_0,
            39 => Self::Mxfp4,
            40 => Self::Nvfp4,
            41 => Self::Q1_0,
            _ => {
                let unread = UNREAD.iter().find(|(number, _)| *number == id);
                return Err(unread.map_or_else(
                    || format!("the unknown ggml type {id}"),
                    |(_, name)| (*name).to_owned(),
                ));
            }
        })
    }

    /// Elements of a block.
    #[must_use]
    pub const fn block_len(self) -> u64 {
        match self {
            Self::Floats(_) => 1,
            Self::Q4_0
            | Self::Q4_1
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_0
            | Self::Iq4Nl
            | Self::Mxfp4 => 32,
            Self::Nvfp4 => 64,
            Self::Q1_0 => 128,
            Self::Q2K
            | Self::Q3K
            | Self::Q4K
            | Self::Q5K
            | Self::Q6K
            | Self::Iq1S
            | Self::Iq1M
            | Self::Iq2Xxs
            | Self::Iq2Xs
            | Self::Iq2S
            | Self::Iq3Xxs
            | Self::Iq3S
            | Self::Iq4Xs
            | Self::Tq1_0
            | Self::Tq2_0 => 256,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> u64 {
        match self {
            Self::Floats(dtype) => dtype.size_bytes() as u64,
            Self::Mxfp4 => 17,
            Self::Q4_0 | Self::Iq4Nl | Self::Q1_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K | Self::Iq3S => 110,
            Self::Nvfp4 => 36,
            Self::Iq1S => 50,
            Self::Tq1_0 => 54,
            Self::Iq1M => 56,
            Self::Iq2Xxs | Self::Tq2_0 => 66,
            Self::Iq2Xs => 74,
            Self::Iq2S => 82,
            Self::Iq3Xxs => 98,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Xs => 136,
        }
    }

    /// ggml's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Floats(dtype) => dtype.name(),
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Iq1S => "IQ1_S",
            Self::Iq1M => "IQ1_M",
            Self::Iq2Xxs => "IQ2_XXS",
            Self::Iq2Xs => "IQ2_XS",
            Self::Iq2S => "IQ2_S",
            Self::Iq3Xxs => "IQ3_XXS",
            Self::Iq3S => "IQ3_S",
            Self::Tq1_0 => "TQ1_0",
            Self::Tq2_0 => "TQ2_0",
            Self::Q1_0 => "Q1_0",
            Self::Nvfp4 => "NVFP4",
            Self::Mxfp4 => "MXFP4",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
