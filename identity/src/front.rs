//! Certificates with which a node runs a front: it starts ranks and connects to them for its controller,
//! and may do nothing else.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    Credentials, GuardError, Home, HomeError, Role, Validity, files, guard::KEY_FILE,
    message::Bytes,
};

/// A front's certificate for the key of the node that runs it, with the authority's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontCertificate {
    authority: Bytes,
    certificate: Bytes,
}

impl FrontCertificate {
    /// The front's certificate with the key of the node whose identity is in `folder`.
    pub fn credentials(&self, folder: &Path) -> Result<Credentials, GuardError> {
        let key = files::read_private(&folder.join(KEY_FILE))?;
        let unusable = |source| GuardError::Credentials { folder: folder.to_owned(), source };
        let credentials = Credentials::new(&self.authority.0, &self.certificate.0, &key)
            .and_then(|credentials| credentials.check_own(Role::Front).map(|()| credentials));
        credentials.map_err(unusable)
    }
}

impl Home {
    /// Lets the member of this name or address run a front.
    pub fn front_certificate(&self, name: &str) -> Result<FrontCertificate, HomeError> {
        let member = self.known(name)?;
        let (certificate, authority) =
            self.certify(Role::Front, &member.name, member.key, Validity::from_now())?;
        Ok(FrontCertificate { authority, certificate })
    }
}
