//! Reading little-endian fields from the front of a file, never beyond what is there of it.

use super::GgufError;

/// Why a field could not be taken.
pub(super) enum Stop {
    /// The file goes on, but not what is there of it: this many bytes are needed at least.
    More(u64),
    /// The file is wrong.
    Wrong(GgufError),
}

impl From<GgufError> for Stop {
    fn from(error: GgufError) -> Self {
        Self::Wrong(error)
    }
}

/// A place in the beginning of a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Bytes of the whole file.
    size: u64,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8], size: u64) -> Self {
        Self { bytes, at: 0, size }
    }

    /// Bytes read so far.
    pub(super) const fn at(&self) -> u64 {
        self.at as u64
    }

    /// An error at this place.
    pub(super) fn wrong(&self, problem: impl Into<String>) -> Stop {
        Stop::Wrong(GgufError::Malformed { at: self.at(), problem: problem.into() })
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], Stop> {
        let field = usize::try_from(len).ok().and_then(|len| self.bytes[self.at..].get(..len));
        if let Some(field) = field {
            self.at += field.len();
            return Ok(field);
        }
        match self.at().checked_add(len) {
            Some(end) if end <= self.size => Err(Stop::More(end)),
            _ => {
                let left = self.size - self.at();
                Err(self.wrong(format!("{what} of {len} bytes, {left} are left")))
            }
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Stop> {
        let field = self.take(N as u64, what)?;
        Ok(field.try_into().expect("as long as was taken"))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Stop> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Stop> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length and so many bytes of text, at most `limit`.
    pub(super) fn text(&mut self, limit: u64, what: &str) -> Result<&'a str, Stop> {
        let len = self.u64(what)?;
        if len > limit {
            return Err(self.wrong(format!("{what} of {len} bytes, at most {limit} are read")));
        }
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| self.wrong(format!("{what} is no text")))
    }
}
