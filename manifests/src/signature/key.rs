//! Keys: ECDSA on P-256, in PEM files.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use p256::{
    PublicKey, SecretKey,
    ecdsa::{
        Signature,
        signature::{Signer, Verifier},
    },
    pkcs8::{DecodePrivateKey, DecodePublicKey, EncodePrivateKey, EncodePublicKey, LineEnding},
};
use shardpack_formats::hex;

use super::hash::sha256;
use crate::verify::{Problem, read_document};

/// Largest key file that is read: a P-256 key has about 250 bytes, and people put notes around it.
const MAX_KEY_BYTES: u64 = 64 << 10;

/// A key cannot be made, written or read.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The system gives no random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    /// The file cannot be read.
    #[error("{}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Problem,
    },
    /// The file cannot be written.
    #[error("{}: cannot be written", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{}: {problem}", .path.display())]
    NotKey {
        /// The file.
        path: PathBuf,
        /// What was expected.
        problem: &'static str,
    },
}

impl KeyError {
    /// Whether the key was looked at and is none (else it could not be looked at).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        matches!(self, Self::NotKey { .. })
    }
}

/// The private half: makes signatures. Wiped from memory when dropped.
pub struct SigningKey(SecretKey);

impl std::fmt::Debug for SigningKey {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SigningKey")
    }
}

/// The public half: checks signatures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyingKey(PublicKey);

/// Where the public half of the key in file `path` is kept: beside it, with `.pub` added.
#[must_use]
pub fn public_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".pub");
    name.into()
}

impl SigningKey {
    /// A new key from the system's random bytes.
    pub fn generate() -> Result<Self, KeyError> {
        loop {
            let mut bytes = [0; 32];
            getrandom::fill(&mut bytes).map_err(KeyError::Random)?;
            // One in 2^32 strings of 32 bytes is no scalar of the curve.
            if let Ok(key) = SecretKey::from_slice(&bytes) {
                return Ok(Self(key));
            }
        }
    }

    /// Reads a PEM file with an unencrypted PKCS#8 key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let key = SecretKey::from_pkcs8_pem(&read_text(path)?);
        key.map(Self).map_err(|_| KeyError::NotKey {
            path: path.to_owned(),
            problem: "not a private key that signs packages; expected PEM with an unencrypted PKCS#8 key on P-256",
        })
    }

    /// Writes the key for its owner's eyes alone (mode 0600), and its public half beside it. An
    /// existing file is never overwritten: a lost key cannot be made again.
    pub fn write(&self, path: &Path) -> Result<(), KeyError> {
        let public = public_path(path);
        if public.symlink_metadata().is_ok() {
            let source = io::ErrorKind::AlreadyExists.into();
            return Err(KeyError::Write { path: public, source });
        }
        let private = self.0.to_pkcs8_pem(LineEnding::LF).expect("a P-256 key has a PKCS#8 form");
        write_new(path, 0o600, private.as_bytes())?;
        write_new(&public, 0o644, self.verifying_key().to_pem().as_bytes())
    }

    /// The public half.
    #[must_use]
    pub fn verifying_key(&self) -> VerifyingKey {
        VerifyingKey(self.0.public_key())
    }

    /// The DER form of the signature of `bytes`; the same bytes give the same signature (RFC 6979).
    pub(super) fn sign(&self, bytes: &[u8]) -> Vec<u8> {
        let signature: Signature = p256::ecdsa::SigningKey::from(&self.0).sign(bytes);
        signature.to_der().as_bytes().to_vec()
    }
}

impl VerifyingKey {
    /// Reads a PEM file with a `SubjectPublicKeyInfo`.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let key = PublicKey::from_public_key_pem(&read_text(path)?);
        key.map(Self).map_err(|_| KeyError::NotKey {
            path: path.to_owned(),
            problem: "not a public key of a signer; expected PEM with a SubjectPublicKeyInfo on P-256, as `shardpack keygen` writes it to the file that ends in .pub",
        })
    }

    /// The PEM text.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.0.to_public_key_pem(LineEnding::LF).expect("a P-256 key has an SPKI form")
    }

    /// What a bundle says of its key: the SHA-256 of the PEM text in hex.
    #[must_use]
    pub fn hint(&self) -> String {
        hex::encode(&sha256(self.to_pem().as_bytes()))
    }

    /// Whether `signature` (DER) is this key's signature of `bytes`.
    pub(super) fn has_signed(&self, bytes: &[u8], signature: &[u8]) -> bool {
        let key = p256::ecdsa::VerifyingKey::from(&self.0);
        Signature::from_der(signature).is_ok_and(|signature| key.verify(bytes, &signature).is_ok())
    }
}

fn read_text(path: &Path) -> Result<String, KeyError> {
    let bytes = read_document(path, MAX_KEY_BYTES)
        .map_err(|source| KeyError::Read { path: path.to_owned(), source })?;
    String::from_utf8(bytes)
        .map_err(|_| KeyError::NotKey { path: path.to_owned(), problem: "not a PEM file" })
}

fn write_new(path: &Path, mode: u32, bytes: &[u8]) -> Result<(), KeyError> {
    let write = || {
        let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| KeyError::Write { path: path.to_owned(), source })
}
