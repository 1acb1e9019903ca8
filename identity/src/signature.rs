//! Documents that a controller signs: the signature carries the controller's certificate, so whoever
//! trusts the cluster's authority can verify it, now or later.
//!
//! Knows keys and certificates; does not know what is signed.

use rcgen::SigningKey as _;
use rustls::{
    SignatureScheme,
    pki_types::{CertificateDer, UnixTime},
};
use serde::{Deserialize, Serialize};

use crate::{
    Credentials, CredentialsError, PeerKey, Role, certificate::parse_key, credentials::peer_of,
    credentials::provider, message::Bytes,
};
use std::time::Duration;

/// Stands before every signed document, with its purpose: a signature on one kind of document, or on
/// a TLS handshake, is never one on another.
const CONTEXT: &[u8] = b"shardpack signed document\0";

/// A signature that is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    /// Its certificate is not of this cluster, has ended, or has another role.
    #[error("the signer's certificate is not one of this cluster's controllers")]
    Certificate(#[source] rustls::Error),
    /// The certificate's key is of no kind that this program uses.
    #[error("the signer's certificate holds no Ed25519 key")]
    Key,
    /// The document was changed, or signed by another key.
    #[error("the signature is not of this document and the signer's key")]
    Mismatch,
}

/// A signature with the signer's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    certificate: Bytes,
    signature: Bytes,
}

impl Signature {
    /// Signs a document of this `purpose`.
    pub fn sign(
        credentials: &Credentials,
        purpose: &str,
        document: &[u8],
    ) -> Result<Self, CredentialsError> {
        let key = parse_key(credentials.pkcs8())?;
        let signature = key.sign(&framed(purpose, document)).map_err(CredentialsError::Make)?;
        Ok(Self {
            certificate: Bytes(credentials.certificate().to_vec()),
            signature: Bytes(signature),
        })
    }

    /// Verifies that a controller of the cluster of `credentials` has signed the document; its
    /// certificate must hold at `seconds` since 1970. Returns the controller's key.
    pub fn verify(
        &self,
        credentials: &Credentials,
        purpose: &str,
        document: &[u8],
        seconds: u64,
    ) -> Result<PeerKey, SignatureError> {
        let certificate = CertificateDer::from(self.certificate.0.as_slice());
        let at = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        credentials
            .check_other(&certificate, Role::Controller, at)
            .map_err(SignatureError::Certificate)?;
        let key = peer_of(&certificate).ok_or(SignatureError::Key)?.key;
        let algorithms = provider().signature_verification_algorithms;
        let mut mapping = algorithms.mapping.iter();
        let ed25519 = mapping
            .find(|(scheme, _)| *scheme == SignatureScheme::ED25519)
            .and_then(|(_, found)| found.first())
            .ok_or(SignatureError::Key)?;
        ed25519
            .verify_signature(key.bytes(), &framed(purpose, document), &self.signature.0)
            .map_err(|_| SignatureError::Mismatch)?;
        Ok(key)
    }
}

fn framed(purpose: &str, document: &[u8]) -> Vec<u8> {
    [CONTEXT, purpose.as_bytes(), b"\0", document].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Validity, certificate::now};

    #[test]
    fn only_a_controller_of_the_cluster_signs_and_only_what_it_signed_verifies() {
        let authority = Authority::generate("a").unwrap();
        let issue =
            |authority: &Authority, role| authority.issue(role, Validity::from_now()).unwrap();
        let (controller, node) =
            (issue(&authority, Role::Controller), issue(&authority, Role::Node));
        let stranger = issue(&Authority::generate("b").unwrap(), Role::Controller);
        let signed = Signature::sign(&controller, "release", b"document").unwrap();
        let json = serde_json::to_string(&signed).unwrap();
        let signed: Signature = serde_json::from_str(&json).unwrap();
        assert_eq!(signed.verify(&node, "release", b"document", now()).unwrap(), controller.key());
        let mismatch = |purpose, document| {
            matches!(signed.verify(&node, purpose, document, now()), Err(SignatureError::Mismatch))
        };
        assert!(mismatch("release", b"Document"));
        assert!(mismatch("other", b"document"));
        assert!(mismatch("releas", b"e\0document"));
        for other in [&stranger, &node] {
            let foreign = Signature::sign(other, "release", b"document").unwrap();
            assert!(matches!(
                foreign.verify(&node, "release", b"document", now()),
                Err(SignatureError::Certificate(_))
            ));
        }
        let late = now() + 20_000 * 24 * 60 * 60;
        assert!(matches!(
            signed.verify(&node, "release", b"document", late),
            Err(SignatureError::Certificate(_))
        ));
    }
}
