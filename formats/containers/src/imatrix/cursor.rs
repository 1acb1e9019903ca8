//! Reading little-endian fields from the front of a file, never beyond its end.

use super::{ImatrixError, MAX_NAME_BYTES};

/// A place in a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) const fn at(&self) -> u64 {
        self.at as u64
    }

    /// Bytes left.
    pub(super) const fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// An error at this place.
    pub(super) fn wrong(&self, problem: impl Into<String>) -> ImatrixError {
        ImatrixError::Malformed { at: self.at(), problem: problem.into() }
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], ImatrixError> {
        let field = usize::try_from(len).ok().and_then(|len| self.bytes[self.at..].get(..len));
        let Some(field) = field else {
            return Err(self.wrong(format!("{what} of {len} bytes, {} are left", self.left())));
        };
        self.at += field.len();
        Ok(field)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ImatrixError> {
        let field = self.take(N as u64, what)?;
        Ok(field.try_into().expect("as long as was taken"))
    }

    /// A count that is stored as a signed integer.
    pub(super) fn i32(&mut self, what: &str) -> Result<u32, ImatrixError> {
        let value = i32::from_le_bytes(self.array(what)?);
        u32::try_from(value).map_err(|_| self.wrong(format!("{what} is {value}")))
    }

    /// A name of `len` bytes.
    pub(super) fn name(&mut self, len: u64) -> Result<String, ImatrixError> {
        if len == 0 || len > MAX_NAME_BYTES {
            return Err(self.wrong(format!("a name of {len} bytes")));
        }
        let bytes = self.take(len, "a name")?;
        let name = std::str::from_utf8(bytes).ok().filter(|name| !name.contains('\0'));
        name.map(str::to_owned).ok_or_else(|| self.wrong("a name that is no text"))
    }
}

/// Little-endian floats; bytes after the last whole one are left out.
pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    let (fours, _) = bytes.as_chunks::<4>();
    fours.iter().map(|four| f32::from_le_bytes(*four)).collect()
}
