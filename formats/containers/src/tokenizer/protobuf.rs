//! Fields of a protobuf message, as far as sentencepiece's models use them.

use super::{TokenizerError, damaged};

/// A field's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Field<'a> {
    Number(u64),
    Float(f32),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    pub(super) fn bytes(self) -> Result<&'a [u8], TokenizerError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(damaged("a number where a text or a message belongs")),
        }
    }

    pub(super) fn text(self) -> Result<&'a str, TokenizerError> {
        str::from_utf8(self.bytes()?).map_err(|_| damaged("a text that is not UTF-8"))
    }

    pub(super) fn number(self) -> Result<u64, TokenizerError> {
        match self {
            Self::Number(number) => Ok(number),
            _ => Err(damaged("something else where an integer belongs")),
        }
    }

    pub(super) fn float(self) -> Result<f32, TokenizerError> {
        match self {
            Self::Float(float) if float.is_finite() => Ok(float),
            _ => Err(damaged("something else where a number belongs")),
        }
    }

    pub(super) fn flag(self) -> Result<bool, TokenizerError> {
        self.number().map(|number| number != 0)
    }
}

/// The fields of a message in their order, by number.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), TokenizerError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            // Nothing that follows can be told apart.
            self.0 = &[];
        }
        Some(field.ok_or_else(|| damaged("it is not a sentencepiece model, or its end is missing")))
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Field::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Number(0)
            }
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => Field::Float(f32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            let seven = u64::from(byte & 0x7f);
            if shift == 63 && seven > 1 {
                return None;
            }
            value |= seven << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}
