//! Values of keys.

use zerocopy::{
    FromBytes,
    little_endian::{F32, F64, I16, I32, I64, U16, U32, U64},
};

/// Types of values that are numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

impl NumberKind {
    /// The type that the format numbers so; neither a string nor an array.
    pub(super) const fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    pub(super) const fn size_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

/// Numbers of one type, as they stand in the file: no larger in memory than there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers {
    pub(super) kind: NumberKind,
    pub(super) bytes: Vec<u8>,
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number or a truth value.
    Number(Numbers),
    /// Text.
    Text(String),
    /// Any number of numbers.
    Numbers(Numbers),
    /// Any number of texts.
    Texts(Vec<String>),
}

impl Numbers {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / self.kind.size_bytes() as usize
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn get(&self, index: usize) -> Option<&[u8]> {
        let size = self.kind.size_bytes() as usize;
        self.bytes.get(index.checked_mul(size)?..)?.get(..size)
    }

    /// Number `index` as an integer, if it is one.
    #[must_use]
    pub fn integer(&self, index: usize) -> Option<i64> {
        let bytes = self.get(index)?;
        Some(match self.kind {
            NumberKind::U8 => i64::from(*bytes.first()?),
            NumberKind::I8 => i64::from(*bytes.first()? as i8),
            NumberKind::U16 => i64::from(U16::read_from_bytes(bytes).ok()?.get()),
            NumberKind::I16 => i64::from(I16::read_from_bytes(bytes).ok()?.get()),
            NumberKind::U32 => i64::from(U32::read_from_bytes(bytes).ok()?.get()),
            NumberKind::I32 => i64::from(I32::read_from_bytes(bytes).ok()?.get()),
            NumberKind::U64 => i64::try_from(U64::read_from_bytes(bytes).ok()?.get()).ok()?,
            NumberKind::I64 => I64::read_from_bytes(bytes).ok()?.get(),
            NumberKind::F32 | NumberKind::F64 | NumberKind::Bool => return None,
        })
    }

    /// Number `index` as a finite decimal: what its writer most likely spelled, since keys hold
    /// 32-bit floats where configurations have decimals (`1e-5`, not 9.99999975e-6).
    #[must_use]
    pub fn decimal(&self, index: usize) -> Option<f64> {
        let bytes = self.get(index)?;
        let value = match self.kind {
            NumberKind::F32 => {
                let value = F32::read_from_bytes(bytes).ok()?.get();
                format!("{value:e}").parse().ok()?
            }
            NumberKind::F64 => F64::read_from_bytes(bytes).ok()?.get(),
            _ => self.integer(index)? as f64,
        };
        value.is_finite().then_some(value)
    }
}

impl Value {
    /// A number that is an integer.
    #[must_use]
    pub fn integer(&self) -> Option<i64> {
        match self {
            Self::Number(number) => number.integer(0),
            _ => None,
        }
    }

    /// A number, written as a decimal.
    #[must_use]
    pub fn decimal(&self) -> Option<f64> {
        match self {
            Self::Number(number) => number.decimal(0),
            _ => None,
        }
    }

    /// A truth value.
    #[must_use]
    pub fn truth(&self) -> Option<bool> {
        match self {
            Self::Number(number) if number.kind == NumberKind::Bool => {
                Some(*number.bytes.first()? != 0)
            }
            _ => None,
        }
    }

    /// Text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// What it is, for messages.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Number(number) if number.kind.is_float() => {
                number.decimal(0).map_or_else(|| "no finite number".to_owned(), |n| n.to_string())
            }
            Self::Number(number) => match (number.integer(0), self.truth()) {
                (Some(integer), _) => integer.to_string(),
                (None, Some(truth)) => truth.to_string(),
                (None, None) => "a number beyond 2^63".to_owned(),
            },
            Self::Text(text) => format!("{:?}", text.chars().take(64).collect::<String>()),
            Self::Numbers(numbers) => format!("a list of {} numbers", numbers.len()),
            Self::Texts(texts) => format!("a list of {} texts", texts.len()),
        }
    }
}
