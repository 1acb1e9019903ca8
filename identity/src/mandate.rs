//! Which controller acts for a cluster. Every handover gives a controller a fresh key and a mandate: a
//! number above all before, with that key, signed by it. A node remembers the highest mandate that it was
//! shown and lets nobody else change it, so a controller that was replaced cannot, whether it knows that
//! or not. Before the first handover there is no mandate, and every controller of the cluster may act.
//!
//! This is against mistakes, not against thieves: who has the authority's key can make a mandate.

use std::{
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock, RwLockReadGuard},
};

use serde::{Deserialize, Serialize};

use crate::{
    Credentials, CredentialsError, FileError, PeerKey, Signature, SignatureError,
    certificate::{date, now},
    files,
};

/// Version of the document.
const FORMAT: u32 = 1;

/// What the signature says it is for.
const PURPOSE: &str = "controller mandate";

/// Most bytes of a mandate: a key, two numbers and two short names.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// A node's file of the highest mandate that it was shown.
pub(crate) const FENCE_FILE: &str = "controller.json";

/// That a controller acts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mandate {
    format: u32,
    /// The cluster's id.
    pub cluster: String,
    /// Counts the handovers of the cluster.
    pub epoch: u64,
    /// The key of the controller that acts.
    pub controller: PeerKey,
    /// The machine that it acts on, for people.
    pub name: String,
    /// When it took over, in seconds since 1970.
    pub time: u64,
}

impl Mandate {
    /// Of the holder of `controller`, from now on.
    pub(crate) fn new(cluster: String, epoch: u64, controller: PeerKey, name: String) -> Self {
        Self { format: FORMAT, cluster, epoch, controller, name, time: now() }
    }
}

/// A mandate that is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum MandateError {
    /// Its text is none of this version.
    #[error("the controller's mandate cannot be used: {0}")]
    Text(String),
    /// Its signature.
    #[error("the signature of the controller's mandate is refused")]
    Signature(#[source] SignatureError),
    /// Somebody else signed it, or it is of another cluster.
    #[error("the controller's mandate is of {found}, expected {expected}")]
    Other {
        /// Whose it should be.
        expected: String,
        /// Whose it is.
        found: String,
    },
    /// It could not be kept.
    #[error(transparent)]
    File(#[from] FileError),
    /// The node is in no cluster.
    #[error("this node is in no cluster, and takes no mandate")]
    NoCluster,
}

/// A mandate as it is sent and kept: its text, and the signature of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct SignedMandate {
    mandate: Mandate,
    text: String,
    signature: Signature,
}

#[derive(Clone, Serialize, Deserialize)]
struct Stored {
    mandate: String,
    signature: Signature,
}

impl TryFrom<Stored> for SignedMandate {
    type Error = MandateError;

    fn try_from(stored: Stored) -> Result<Self, MandateError> {
        let Stored { mandate: text, signature } = stored;
        if text.len() > MAX_TEXT_BYTES {
            let problem = format!("{} bytes, at most {MAX_TEXT_BYTES} are read", text.len());
            return Err(MandateError::Text(problem));
        }
        let mandate: Mandate =
            serde_json::from_str(&text).map_err(|error| MandateError::Text(error.to_string()))?;
        if mandate.format != FORMAT {
            let problem = format!("format {}, this program reads {FORMAT}", mandate.format);
            return Err(MandateError::Text(problem));
        }
        Ok(Self { mandate, text, signature })
    }
}

impl From<SignedMandate> for Stored {
    fn from(signed: SignedMandate) -> Self {
        Self { mandate: signed.text, signature: signed.signature }
    }
}

impl SignedMandate {
    /// Signs it with the controller's own key.
    pub(crate) fn sign(mandate: Mandate, signer: &Credentials) -> Result<Self, CredentialsError> {
        let text = serde_json::to_string(&mandate).expect("a mandate is numbers and texts");
        let signature = Signature::sign(signer, PURPOSE, text.as_bytes())?;
        Ok(Self { mandate, text, signature })
    }

    /// The same mandate with the signer's present certificate.
    pub(crate) fn sign_again(&self, signer: &Credentials) -> Result<Self, CredentialsError> {
        let signature = Signature::sign(signer, PURPOSE, self.text.as_bytes())?;
        Ok(Self { signature, ..self.clone() })
    }

    /// What it says.
    #[must_use]
    pub const fn mandate(&self) -> &Mandate {
        &self.mandate
    }

    /// Verifies that a controller of the cluster of `credentials` signed it for itself.
    fn verify(&self, credentials: &Credentials, cluster: &str) -> Result<(), MandateError> {
        let signer = self
            .signature
            .verify(credentials, PURPOSE, self.text.as_bytes(), now())
            .map_err(MandateError::Signature)?;
        let Mandate { controller, cluster: found, .. } = &self.mandate;
        if signer != *controller {
            let (expected, found) = (signer.to_string(), controller.to_string());
            return Err(MandateError::Other { expected, found });
        }
        if found != cluster {
            let (expected, found) = (cluster.to_owned(), found.clone());
            return Err(MandateError::Other { expected, found });
        }
        Ok(())
    }
}

/// Why a controller may not change a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this controller was replaced by a handover on {} (epoch {epoch}, to {name}): only {name} may change the cluster; `shardpack cluster handover` on this machine takes over again", date(*time)
)]
pub struct Replaced {
    /// Of the mandate that the node knows.
    pub epoch: u64,
    /// The machine that acts.
    pub name: String,
    /// Since when, in seconds since 1970.
    pub time: u64,
}

impl Replaced {
    fn by(signed: &SignedMandate) -> Self {
        let Mandate { epoch, name, time, .. } = &signed.mandate;
        Self { epoch: *epoch, name: name.clone(), time: *time }
    }
}

/// What a node made of a mandate that it was shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presented {
    /// It is higher than any before, and is written to the disk.
    New,
    /// It is the one that the node knows.
    Known,
    /// The node knows a higher one, or another one with the same number.
    Refused(Replaced),
}

/// While it is held, no other controller takes over.
pub struct Acting<'a> {
    _known: RwLockReadGuard<'a, Option<SignedMandate>>,
}

/// The highest mandate that a node was shown.
pub(crate) struct Fence {
    path: PathBuf,
    known: RwLock<Option<SignedMandate>>,
}

impl Fence {
    /// Of the identity in `folder`.
    pub(crate) fn open(folder: &Path) -> Result<Self, FileError> {
        let path = folder.join(FENCE_FILE);
        let known = RwLock::new(files::read_json(&path)?);
        Ok(Self { path, known })
    }

    pub(crate) fn known(&self) -> Option<SignedMandate> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets a controller with this key change the node, which is in this cluster, or says who may
    /// instead.
    pub(crate) fn acting(
        &self,
        caller: Option<PeerKey>,
        cluster: Option<&str>,
    ) -> Result<Acting<'_>, Replaced> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let of_cluster = known.as_ref().filter(|signed| Some(&*signed.mandate.cluster) == cluster);
        match of_cluster {
            Some(signed) if caller != Some(signed.mandate.controller) => Err(Replaced::by(signed)),
            _ => Ok(Acting { _known: known }),
        }
    }

    /// Takes a mandate, if it is the highest. Changes that are under way end first.
    pub(crate) fn present(
        &self,
        signed: SignedMandate,
        credentials: &Credentials,
        cluster: &str,
    ) -> Result<Presented, MandateError> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.as_ref().filter(|it| it.mandate.cluster == cluster) {
            if known.text == signed.text {
                return Ok(Presented::Known);
            }
            // Of two with one number the first stays: they are of two controllers that raced.
            if signed.mandate.epoch <= known.mandate.epoch {
                return Ok(Presented::Refused(Replaced::by(known)));
            }
        }
        signed.verify(credentials, cluster)?;
        files::write_json(&self.path, &signed)?;
        *known = Some(signed);
        Ok(Presented::New)
    }

    /// The node is of this cluster no more.
    pub(crate) fn forget(&self) -> Result<(), FileError> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        files::remove(&self.path)?;
        *known = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, Role, Validity};

    struct Cluster {
        authority: Authority,
        node: Credentials,
    }

    impl Cluster {
        fn new() -> Self {
            let authority = Authority::generate("c").unwrap();
            let node = authority.issue(Role::Node, Validity::from_now()).unwrap();
            Self { authority, node }
        }

        fn controller(&self) -> Credentials {
            self.authority.issue(Role::Controller, Validity::from_now()).unwrap()
        }
    }

    fn mandate(of: &Credentials, epoch: u64) -> SignedMandate {
        let name = format!("machine-{epoch}");
        SignedMandate::sign(Mandate::new("c".to_owned(), epoch, of.key(), name), of).unwrap()
    }

    #[test]
    fn only_the_controller_with_the_highest_mandate_acts_and_the_disk_remembers() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = Cluster::new();
        let (a, b) = (cluster.controller(), cluster.controller());
        let fence = Fence::open(folder.path()).unwrap();
        let may = |fence: &Fence, of: &Credentials| fence.acting(Some(of.key()), Some("c")).is_ok();
        assert!(may(&fence, &a) && may(&fence, &b), "before the first handover all may");
        let present = |signed| fence.present(signed, &cluster.node, "c").unwrap();
        assert_eq!(present(mandate(&b, 1)), Presented::New);
        assert!(!may(&fence, &a) && may(&fence, &b));
        assert_eq!(present(mandate(&a, 3)), Presented::New);
        // The same number again, a lower one, and one that was known.
        for late in [mandate(&b, 3), mandate(&b, 2)] {
            assert!(matches!(present(late), Presented::Refused(Replaced { epoch: 3, .. })));
        }
        let again = Fence::open(folder.path()).unwrap();
        assert!(may(&again, &a) && !may(&again, &b), "it survives a restart");
        assert_eq!(again.acting(None, Some("c")).err().map(|replaced| replaced.epoch), Some(3));
        let text = again.acting(Some(b.key()), Some("c")).err().unwrap().to_string();
        assert!(text.contains("(epoch 3, to machine-3)"), "{text}");
        assert!(again.acting(Some(b.key()), Some("d")).is_ok(), "it is of no other cluster");
        again.forget().unwrap();
        assert!(may(&Fence::open(folder.path()).unwrap(), &b));
    }

    #[test]
    fn the_same_mandate_is_known_again_whatever_certificate_signed_it() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = Cluster::new();
        let controller = cluster.controller();
        let fence = Fence::open(folder.path()).unwrap();
        let signed = mandate(&controller, 1);
        let renewed = signed.sign_again(&controller).unwrap();
        assert_eq!(fence.present(signed, &cluster.node, "c").unwrap(), Presented::New);
        assert_eq!(fence.present(renewed, &cluster.node, "c").unwrap(), Presented::Known);
    }

    #[test]
    fn a_mandate_that_is_not_of_the_clusters_controller_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = Cluster::new();
        let fence = Fence::open(folder.path()).unwrap();
        let refuse = |signed| fence.present(signed, &cluster.node, "c").unwrap_err();
        let stranger = Cluster::new().controller();
        assert!(matches!(refuse(mandate(&stranger, 9)), MandateError::Signature(_)));
        assert!(matches!(refuse(mandate(&cluster.node, 9)), MandateError::Signature(_)));
        let (a, b) = (cluster.controller(), cluster.controller());
        let of_b = Mandate::new("c".to_owned(), 9, b.key(), "b".to_owned());
        assert!(matches!(
            refuse(SignedMandate::sign(of_b, &a).unwrap()),
            MandateError::Other { .. }
        ));
        let elsewhere = Mandate::new("d".to_owned(), 9, a.key(), "a".to_owned());
        assert!(matches!(
            refuse(SignedMandate::sign(elsewhere, &a).unwrap()),
            MandateError::Other { .. }
        ));
        let json = serde_json::to_string(&mandate(&a, 1)).unwrap();
        let higher = json.replace(r#"\"epoch\":1"#, r#"\"epoch\":8"#);
        assert_ne!(json, higher);
        let bent: SignedMandate = serde_json::from_str(&higher).unwrap();
        assert!(matches!(refuse(bent), MandateError::Signature(SignatureError::Mismatch)));
        assert!(fence.known().is_none());
    }
}
