//! A controller takes over: with a fresh key, and a mandate that is above all that the nodes know.

use std::{fs::File, path::Path};

use crate::{
    Authority, Credentials, Endpoint, HomeError, Member, PeerKey, Role, Validity,
    certificate::{generate_key, parse_key},
    files,
    mandate::{Mandate, SignedMandate},
    message::Bytes,
};

use super::{
    AUTHORITY_FILE, CONTROLLER_FILE, DOCUMENT_FILE, Document, FORMAT_OF_MANDATES, Home, LOCK_FILE,
};

/// Held by a handover from its begin to its end.
const HANDOVER_LOCK_FILE: &str = "handover.lock";

/// A controller that is about to take over, imported or replaced before. Nothing of it is on the disk.
pub struct Candidate {
    folder: std::path::PathBuf,
    document: Document,
    certificate: Bytes,
    expires: u64,
    key: Vec<u8>,
    credentials: Credentials,
    _lock: File,
}

impl Candidate {
    /// Of the cluster in `folder`, whether it acts at present or not.
    pub fn new(folder: &Path) -> Result<Self, HomeError> {
        let lock = files::lock(&folder.join(HANDOVER_LOCK_FILE), files::LOCK_TIMEOUT);
        // Without a folder there is no cluster, which is the better thing to say.
        let document = Home::read(folder)?;
        let lock = lock?;
        let unusable = |source| HomeError::Credentials { folder: folder.to_owned(), source };
        let authority_key = files::read_private(&folder.join(AUTHORITY_FILE))?;
        let authority_key = parse_key(&authority_key).map_err(unusable)?;
        let authority = Authority::new(document.cluster.clone(), authority_key);
        // A key of its own for every handover: connections then show by themselves under which mandate
        // they are made, and a copy of the folder from before is a controller that was replaced.
        let key = generate_key().map_err(unusable)?;
        let validity = Validity::from_now();
        let public = PeerKey::of_pair(&key);
        let certificate =
            authority.sign(Role::Controller, "controller", public, validity).map_err(unusable)?;
        let key = key.serialized_der().to_vec();
        let credentials =
            Credentials::new(&document.authority.0, &certificate, &key).map_err(unusable)?;
        Ok(Self {
            folder: folder.to_owned(),
            document,
            certificate: Bytes(certificate.to_vec()),
            expires: validity.until,
            key,
            credentials,
            _lock: lock,
        })
    }

    /// The cluster's id.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.document.cluster
    }

    /// The members.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.document.members
    }

    /// How a member is reached with the new key.
    #[must_use]
    pub fn endpoint(&self, member: &Member) -> Endpoint {
        let Member { name, address, key, .. } = member.clone();
        Endpoint::member(name, address, self.credentials.clone(), key)
    }

    /// Number of the mandate that this folder knows; 0 before the first handover.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.document.mandate.as_ref().map_or(0, |signed| signed.mandate().epoch)
    }

    /// A mandate of this number for the machine of this name.
    pub fn mandate(&self, epoch: u64, name: &str) -> Result<SignedMandate, HomeError> {
        let mandate =
            Mandate::new(self.cluster().to_owned(), epoch, self.credentials.key(), name.to_owned());
        SignedMandate::sign(mandate, &self.credentials)
            .map_err(|source| HomeError::Credentials { folder: self.folder.clone(), source })
    }

    /// Keeps key and mandate: the folder's controller acts from now on.
    pub fn keep(self, mandate: SignedMandate) -> Result<Home, HomeError> {
        let folder = &self.folder;
        // Of a new name, so that key and certificate change in one step, which is the document's.
        let key_file = format!("controller-{}.key", mandate.mandate().epoch);
        files::write(&folder.join(&key_file), &self.key)?;
        let lock = files::lock(&folder.join(LOCK_FILE), files::LOCK_TIMEOUT)?;
        let mut document = Home::read(folder)?;
        let before = document.key_file.replace(key_file.clone());
        document.format = FORMAT_OF_MANDATES;
        document.controller = self.certificate;
        document.expires = self.expires;
        document.mandate = Some(mandate);
        document.standby = false;
        files::write_json(&folder.join(DOCUMENT_FILE), &document)?;
        drop(lock);
        let before = before.unwrap_or_else(|| CONTROLLER_FILE.to_owned());
        if before != key_file {
            files::remove(&folder.join(before))?;
        }
        Home::open(folder)
    }
}
