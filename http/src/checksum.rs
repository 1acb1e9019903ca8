//! Checksums that servers state of a file's bytes: SHA-256, or git's SHA-1 (the hub's small files).

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Bytes of one read.
const STEP_BYTES: usize = 1 << 20;

/// The stated checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Of the bytes.
    Sha256([u8; 32]),
    /// Of the file as git stores it: behind a header with its size.
    Git([u8; 20]),
}

/// A checksum in the making.
pub enum Hasher {
    /// Of SHA-256.
    Sha256(Sha256),
    /// Of git's SHA-1.
    Git(Sha1),
}

impl Checksum {
    /// A SHA-256 from 64 hex digits.
    #[must_use]
    pub fn sha256(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
        }
        Some(Self::Sha256(bytes))
    }

    /// The SHA-256 of what a reader has, and the number of its bytes.
    pub fn sha256_of(reader: &mut dyn Read) -> io::Result<(u64, Self)> {
        let mut hasher = Hasher::Sha256(Sha256::new());
        let size = hasher.read_from(reader)?;
        Ok((size, hasher.finish()))
    }

    /// Hex digits.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Sha256(bytes) => hex(bytes),
            Self::Git(bytes) => hex(bytes),
        }
    }

    /// Name of the algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Git(_) => "git SHA-1",
        }
    }

    /// Begins to hash a file of `size` bytes.
    #[must_use]
    pub fn hasher(&self, size: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::Git(_) => Hasher::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    /// Whether the file at `path` has this size and checksum.
    pub fn matches(&self, path: &Path, size: u64) -> io::Result<bool> {
        let mut file = File::open(path)?;
        if file.metadata()?.len() != size {
            return Ok(false);
        }
        let mut hasher = self.hasher(size);
        hasher.read_from(&mut file)?;
        Ok(hasher.finish() == *self)
    }
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Git(hasher) => hasher.update(bytes),
        }
    }

    /// Adds what a reader has left; returns how much it was.
    pub fn read_from(&mut self, reader: &mut dyn Read) -> io::Result<u64> {
        let mut buffer = vec![0; STEP_BYTES];
        let mut total = 0;
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(total),
                Ok(count) => {
                    self.update(&buffer[..count]);
                    total += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The checksum of what was added.
    #[must_use]
    pub fn finish(self) -> Checksum {
        match self {
            Self::Sha256(hasher) => Checksum::Sha256(hasher.finalize().into()),
            Self::Git(hasher) => Checksum::Git(hasher.finalize().into()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}
