//! `model.sig`: who vouches for a package. A bundle of the `OpenSSF` Model Signing specification
//! 1.0, which `model_signing verify key` accepts.
//!
//! | layer | content |
//! |---|---|
//! | bundle | JSON (Sigstore bundle 0.3): hint of the key, DSSE envelope |
//! | envelope | base64 of the payload, its type, one ECDSA signature (P-256, SHA-256, deterministic) |
//! | payload | JSON (in-toto statement 1): SHA-256 of every file, and of those digests |
//!
//! Every file of the package is listed, `manifest.json` included, so a signature vouches for the
//! BLAKE3 digests too. `model.sig` itself and names that start with a dot are not listed. The same
//! key signs the same package with the same bytes. Knows files and keys; prints nothing.

mod bundle;
mod hash;
mod key;
mod sign;
mod statement;
#[cfg(test)]
mod tests;
mod verify;

pub use hash::FileHasher;
pub use key::{KeyError, SigningKey, VerifyingKey, public_path};
pub use sign::{SignError, sign_hashed, sign_package};
pub use verify::{SignatureProblem, verify_signature};

/// Name of the signature within a package.
pub const SIGNATURE_FILE: &str = "model.sig";

/// Largest `model.sig` that is read: a bundle holds a certificate and a digest per file.
pub const MAX_SIGNATURE_BYTES: u64 = 16 << 20;

/// Told of bytes as they are read and hashed, from any thread.
pub type ReadObserver<'a> = &'a (dyn Fn(u64) + Sync);
