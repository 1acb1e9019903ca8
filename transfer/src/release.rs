//! The activation record: which packages, one per rank, are the current release of a model.
//!
//! A controller writes it and signs it; every node of the release gets the same record, and keeps it
//! in its `active.json`, first as pending, then as current. The signature is over the record's text,
//! so the text is kept as it came.
//!
//! Knows documents and keys; does not know where a node keeps them.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use shardpack_identity::{Credentials, CredentialsError, Signature, SignatureError};
use shardpack_manifests::{Digest, canonical};

use crate::protocol::PackageKey;

/// Version of the record.
const FORMAT: u32 = 1;

/// What the signature says it is for.
const PURPOSE: &str = "activation record";

/// Most ranks of a release: beyond any group of ranks; bounds the record.
const MAX_RANKS: usize = 256;

/// Longest name of a model: the longest of the hub, organisation and model, and as much again.
const MAX_MODEL_BYTES: usize = 256;

/// Most bytes of a record: every rank takes about 180.
const MAX_RECORD_BYTES: usize = 64 << 10;

/// The package of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasePackage {
    /// Its name on the node.
    pub package: PackageKey,
    /// Digest of its `manifest.json`.
    pub manifest: Digest,
}

/// The record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Version of the record.
    format: u32,
    /// The name under which the model is served.
    pub model: String,
    /// Number of the release, which grows by one with every release of the model.
    pub release: u64,
    /// Digest of `set.json`; unknown when a release of a version without records is restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<Digest>,
    /// Layout id of the packages.
    pub layout: Digest,
    /// One package per rank, in rank order.
    pub packages: Vec<ReleasePackage>,
    /// The release that a rollback restores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restores: Option<u64>,
    /// When it was made, in seconds since 1970.
    pub time: u64,
}

/// A record that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// Its text is no record of this version.
    #[error("the activation record cannot be used: {0}")]
    Record(String),
    /// No signature where one is needed.
    #[error("the activation record is not signed; a member of a cluster takes signed ones only")]
    Unsigned,
    /// A signature that does not verify.
    #[error("the activation record's signature is refused")]
    Signature(#[source] SignatureError),
    /// It could not be signed.
    #[error("the activation record could not be signed")]
    Sign(#[source] CredentialsError),
}

impl Release {
    /// The record of a release of these packages, made now.
    #[must_use]
    pub fn new(
        model: String,
        release: u64,
        set: Option<Digest>,
        layout: Digest,
        packages: Vec<ReleasePackage>,
    ) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self { format: FORMAT, model, release, set, layout, packages, restores: None, time }
    }

    /// Names the release that it restores.
    #[must_use]
    pub fn restoring(self, release: u64) -> Self {
        Self { restores: Some(release), ..self }
    }

    /// The package of a rank.
    #[must_use]
    pub fn package(&self, rank: u32) -> Option<&ReleasePackage> {
        self.packages.get(rank as usize)
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT {
            return Err(format!("format {}, this program reads {FORMAT}", self.format));
        }
        if self.model.is_empty() || self.model.len() > MAX_MODEL_BYTES {
            return Err(format!("a model's name has 1 to {MAX_MODEL_BYTES} bytes"));
        }
        if self.packages.is_empty() || self.packages.len() > MAX_RANKS {
            let found = self.packages.len();
            return Err(format!("{found} packages, expected 1 to {MAX_RANKS}"));
        }
        for (rank, ReleasePackage { package, .. }) in (0..).zip(&self.packages) {
            if *package != (PackageKey { layout: self.layout, rank }) {
                return Err(format!("package {package} stands in the place of rank {rank}"));
            }
        }
        Ok(())
    }
}

/// A record as it is sent and kept: its text, and the controller's signature of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct SignedRelease {
    release: Release,
    text: String,
    signature: Option<Signature>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Stored {
    record: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<Signature>,
}

impl TryFrom<Stored> for SignedRelease {
    type Error = ReleaseError;

    fn try_from(stored: Stored) -> Result<Self, ReleaseError> {
        let Stored { record: text, signature } = stored;
        if text.len() > MAX_RECORD_BYTES {
            let problem = format!("{} bytes, at most {MAX_RECORD_BYTES} are read", text.len());
            return Err(ReleaseError::Record(problem));
        }
        let release: Release =
            serde_json::from_str(&text).map_err(|error| ReleaseError::Record(error.to_string()))?;
        release.check().map_err(ReleaseError::Record)?;
        Ok(Self { release, text, signature })
    }
}

impl From<SignedRelease> for Stored {
    fn from(signed: SignedRelease) -> Self {
        Self { record: signed.text, signature: signed.signature }
    }
}

impl SignedRelease {
    /// Signs a record as the controller with these credentials; without any, for nodes of this
    /// machine that are in no cluster, it stays unsigned.
    pub fn sign(release: Release, signer: Option<&Credentials>) -> Result<Self, ReleaseError> {
        release.check().map_err(ReleaseError::Record)?;
        let text = canonical::to_string(&release)
            .map_err(|error| ReleaseError::Record(error.to_string()))?;
        let sign = |signer| Signature::sign(signer, PURPOSE, text.as_bytes());
        let signature = signer.map(sign).transpose().map_err(ReleaseError::Sign)?;
        Ok(Self { release, text, signature })
    }

    /// Verifies that a controller of the cluster of `credentials` signed it; the controller's
    /// certificate must hold at `seconds` since 1970.
    pub fn verify(&self, credentials: &Credentials, seconds: u64) -> Result<(), ReleaseError> {
        let signature = self.signature.as_ref().ok_or(ReleaseError::Unsigned)?;
        signature
            .verify(credentials, PURPOSE, self.text.as_bytes(), seconds)
            .map_err(ReleaseError::Signature)?;
        Ok(())
    }

    /// What it says.
    #[must_use]
    pub const fn release(&self) -> &Release {
        &self.release
    }

    /// Names the record: two nodes hold the same one if this is equal.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(self.text.as_bytes())
    }

    /// Whether a controller signed it; not whether that signature verifies.
    #[must_use]
    pub const fn is_signed(&self) -> bool {
        self.signature.is_some()
    }
}

#[cfg(test)]
mod tests {
    use shardpack_identity::{Authority, Role, Validity};

    use super::*;

    fn release() -> Release {
        let layout = Digest::of(b"layout");
        let package = |rank| ReleasePackage {
            package: PackageKey { layout, rank },
            manifest: Digest::of(b"manifest"),
        };
        Release::new("tiny".to_owned(), 3, None, layout, vec![package(0), package(1)])
    }

    #[test]
    fn record_and_signature_survive_the_way_to_a_node_and_no_change_does() {
        let authority = Authority::generate("a").unwrap();
        let issue = |role| authority.issue(role, Validity::from_now()).unwrap();
        let (controller, node) = (issue(Role::Controller), issue(Role::Node));
        let signed = SignedRelease::sign(release(), Some(&controller)).unwrap();
        let json = serde_json::to_string(&signed).unwrap();
        let read: SignedRelease = serde_json::from_str(&json).unwrap();
        assert_eq!((&read, read.digest()), (&signed, signed.digest()));
        read.verify(&node, release().time).unwrap();
        let later = json.replace(r#"\"release\":3"#, r#"\"release\":4"#);
        let changed: SignedRelease = serde_json::from_str(&later).unwrap();
        assert_eq!(changed.release().release, 4, "the text was changed");
        let refused = changed.verify(&node, release().time);
        assert!(matches!(refused, Err(ReleaseError::Signature(_))));
        let unsigned = SignedRelease::sign(release(), None).unwrap();
        assert!(matches!(unsigned.verify(&node, 0), Err(ReleaseError::Unsigned)));
    }

    #[test]
    fn records_that_contradict_themselves_are_refused() {
        let check = |change: fn(&mut Release), expected: &str| {
            let mut release = release();
            change(&mut release);
            let error = SignedRelease::sign(release, None).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(|it| it.format = 2, "format 2");
        check(|it| it.model.clear(), "name");
        check(|it| it.packages.clear(), "0 packages");
        check(|it| it.packages.swap(0, 1), "place of rank 0");
        check(|it| it.layout = Digest::of(b"other"), "place of rank 0");
    }
}
