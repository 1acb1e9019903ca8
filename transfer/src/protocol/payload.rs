//! Fields of a payload, read and written.

use shardpack_manifests::digest::Digest;

/// Takes fields from the front of a payload.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

/// The payload ends before the field does, or continues after the last one.
pub(super) type FieldError = &'static str;

impl<'a> Fields<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], FieldError> {
        let (field, rest) = self.rest.split_at_checked(len).ok_or("it ends inside a field")?;
        self.rest = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FieldError> {
        let field = self.take(N)?;
        Ok(field.try_into().expect("as long as was taken"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, FieldError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16, FieldError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, FieldError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, FieldError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn digest(&mut self) -> Result<Digest, FieldError> {
        Ok(Digest(self.array()?))
    }

    /// A length of four bytes and as many bytes, at most `limit`.
    pub(super) fn bytes(&mut self, limit: u64) -> Result<Vec<u8>, FieldError> {
        let len = self.u32()?;
        if u64::from(len) > limit {
            return Err("a field is longer than allowed");
        }
        Ok(self.take(len as usize)?.to_vec())
    }

    /// As [`Self::bytes`], of UTF-8.
    pub(super) fn text(&mut self, limit: u64) -> Result<String, FieldError> {
        String::from_utf8(self.bytes(limit)?).map_err(|_| "a text is not UTF-8")
    }

    /// What is left, all of it.
    pub(super) fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub(super) fn finish(self) -> Result<(), FieldError> {
        if self.rest.is_empty() { Ok(()) } else { Err("it continues after its last field") }
    }
}

/// Appends a length of four bytes and the bytes.
pub(super) fn put_bytes(payload: &mut Vec<u8>, bytes: &[u8]) {
    let len = u32::try_from(bytes.len()).expect("fields are bounded far below 4 GiB");
    payload.extend_from_slice(&len.to_le_bytes());
    payload.extend_from_slice(bytes);
}

/// Truncates `text` to at most `limit` bytes at a character's border.
pub(super) fn clipped(text: &str, limit: u64) -> &str {
    &text[..text.floor_char_boundary(limit as usize)]
}
