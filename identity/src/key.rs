//! Public keys. All keys here are Ed25519's: 32 bytes are the whole key, so that a key is its own
//! fingerprint and needs no parser.

use std::fmt;

use base64ct::{Base64UrlUnpadded, Encoding as _};
use rcgen::{KeyPair, PKCS_ED25519, PublicKeyData, SignatureAlgorithm};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const KEY_BYTES: usize = 32;

/// What stands before an Ed25519 key's bytes in a certificate (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The public key of a controller or node; written as 43 characters of URL-safe base64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey([u8; KEY_BYTES]);

impl PeerKey {
    /// The key in a certificate's public key field; none where it is of another kind.
    pub(crate) fn of_spki(spki: &[u8]) -> Option<Self> {
        spki.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(Self)
    }

    pub(crate) fn of_pair(pair: &KeyPair) -> Self {
        // Pairs are made and read as Ed25519 alone.
        Self(pair.public_key_raw().try_into().expect("an Ed25519 key has 32 bytes"))
    }

    /// Parses what [`fmt::Display`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; KEY_BYTES];
        let decoded = Base64UrlUnpadded::decode(text, &mut bytes).ok()?;
        (decoded.len() == KEY_BYTES).then_some(Self(bytes))
    }

    pub(crate) const fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&Base64UrlUnpadded::encode_string(&self.0))
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerKey({self})")
    }
}

impl Serialize for PeerKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PeerKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| de::Error::custom("a key is 43 characters of base64"))
    }
}

impl PublicKeyData for PeerKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ED25519
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_as_text_and_as_certificates_hold_them() {
        let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let key = PeerKey::of_pair(&pair);
        assert_eq!(PeerKey::of_spki(&pair.subject_public_key_info()), Some(key));
        assert_eq!(PeerKey::parse(&key.to_string()), Some(key));
        let json = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<PeerKey>(&json).unwrap(), key);
        for bad in ["", "AAAA", &"A".repeat(44), &format!("{}=", "A".repeat(42)), "é"] {
            assert_eq!(PeerKey::parse(bad), None, "{bad}");
        }
        assert_eq!(PeerKey::of_spki(&SPKI_PREFIX), None);
        assert_eq!(PeerKey::of_spki(&[SPKI_PREFIX.as_slice(), &[0; 33]].concat()), None);
    }
}
