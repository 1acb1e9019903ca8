//! The envelope around what is signed: a Sigstore bundle with a DSSE envelope.

use base64ct::{Base64, Encoding};
use serde::{Deserialize, Serialize};

use super::key::{SigningKey, VerifyingKey};

const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Envelope,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    public_key: Hint,
    /// Public logs know nothing of a key on someone's disk.
    #[serde(default)]
    tlog_entries: Vec<serde_json::Value>,
}

#[derive(Serialize, Deserialize)]
struct Hint {
    #[serde(default)]
    hint: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Serialize, Deserialize)]
struct EnvelopeSignature {
    sig: String,
    #[serde(default)]
    keyid: String,
}

/// Why an envelope is not to be opened.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Not a bundle of this kind.
    Malformed(String),
    /// The bundle says that another key made it.
    OtherKey { found: String },
    /// The key did not sign this.
    Forged,
}

/// The text of a bundle of `payload`, signed.
pub(super) fn write(payload: &[u8], key: &SigningKey) -> String {
    let bundle = Bundle {
        media_type: MEDIA_TYPE.to_owned(),
        verification_material: Material {
            public_key: Hint { hint: key.verifying_key().hint() },
            tlog_entries: Vec::new(),
        },
        dsse_envelope: Envelope {
            payload: Base64::encode_string(payload),
            payload_type: PAYLOAD_TYPE.to_owned(),
            signatures: vec![EnvelopeSignature {
                sig: Base64::encode_string(&key.sign(&signed_bytes(payload))),
                keyid: String::new(),
            }],
        },
    };
    serde_json::to_string(&bundle).expect("strings and lists are JSON") + "\n"
}

/// The payload of a bundle, if `key` has signed it.
pub(super) fn open(bytes: &[u8], key: &VerifyingKey) -> Result<Vec<u8>, Refused> {
    let malformed = |what: &str| Refused::Malformed(what.to_owned());
    let bundle: Bundle = serde_json::from_slice(bytes)
        .map_err(|error| Refused::Malformed(format!("not a bundle with a key: {error}")))?;
    if bundle.media_type != MEDIA_TYPE {
        return Err(malformed(&format!(
            "mediaType {:?}, expected {MEDIA_TYPE:?}",
            bundle.media_type
        )));
    }
    let hint = bundle.verification_material.public_key.hint;
    if !hint.is_empty() && hint != key.hint() {
        return Err(Refused::OtherKey { found: hint });
    }
    let envelope = bundle.dsse_envelope;
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(malformed(&format!(
            "payloadType {:?}, expected {PAYLOAD_TYPE:?}",
            envelope.payload_type
        )));
    }
    let decode = |text: &str| Base64::decode_vec(text).ok();
    let payload =
        decode(&envelope.payload).ok_or_else(|| malformed("its payload is not base64"))?;
    // One and no more: who checks the first and who checks any would disagree.
    let [EnvelopeSignature { sig, .. }] = envelope.signatures.as_slice() else {
        return Err(malformed(&format!("{} signatures, expected one", envelope.signatures.len())));
    };
    let signature = decode(sig).ok_or_else(|| malformed("its signature is not base64"))?;
    if key.has_signed(&signed_bytes(&payload), &signature) {
        Ok(payload)
    } else {
        Err(Refused::Forged)
    }
}

/// DSSE's pre-authentication encoding: the type is signed with the payload.
fn signed_bytes(payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len());
    [head.as_bytes(), payload].concat()
}
