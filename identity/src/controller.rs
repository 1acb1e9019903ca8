//! A controller's folder: the cluster's authority, the controller's own key, the members.
//!
//! ```text
//! authority.key   signs members; anyone who has it controls the cluster
//! controller.key  this controller's own; controller-EPOCH.key after a handover
//! cluster.json    the cluster's id, both certificates, the members with their keys; the mandate
//! ```

mod exported;
mod handover;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base64ct::{Base64UrlUnpadded, Encoding as _};
use serde::{Deserialize, Serialize};

use crate::{
    Authority, Channel, ConnectError, Credentials, CredentialsError, Endpoint, ExpectedPeer,
    FileError, HandshakeDeadline, HandshakeError, JoinToken, PeerKey, Role, Service, Validity,
    certificate::{generate_key, now, parse_key},
    endpoint::{reach, resolve},
    files,
    mandate::SignedMandate,
    message::{self, Bytes, Grant, MessageError, Reply, Request},
};

pub use exported::{ExportError, MIN_PASSPHRASE_BYTES, export_controller, import_controller};
pub use handover::Candidate;

const AUTHORITY_FILE: &str = "authority.key";
const CONTROLLER_FILE: &str = "controller.key";
const DOCUMENT_FILE: &str = "cluster.json";
/// Locked while the document is read and written.
const LOCK_FILE: &str = "lock";
/// Locked while a member is added or moved: its name and address must stay free until the node has
/// answered.
const JOIN_LOCK_FILE: &str = "join.lock";

/// Version of the document of a cluster without a handover.
const FORMAT: u32 = 1;

/// With a mandate, or of a controller that was imported: earlier programs would use the wrong key.
const FORMAT_OF_MANDATES: u32 = 2;

/// Timeout for connecting to a node, for its handshake and for its answer.
const NODE_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for the join lock: several other commands may hold it, each waiting for a node that does
/// not answer.
const JOIN_LOCK_TIMEOUT: Duration = Duration::from_mins(1);

/// Certificates that expire within this time are renewed. It is half of their lifetime, so a server
/// that runs for months never sees one expire.
const RENEW_SECONDS: u64 = 365 * 24 * 60 * 60;

/// Longest name of a node, which is also a host's longest.
const MAX_NAME_BYTES: usize = 63;

/// Most members: beyond any group of ranks; bounds the document.
const MAX_MEMBERS: usize = 256;

/// A cluster's folder cannot be used, or a request to a node failed.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// There is no cluster.
    #[error("{}: there is no cluster here", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// There is one.
    #[error("{}: there is a cluster here already, {cluster}", folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
        /// Its id.
        cluster: String,
    },
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A key or certificate.
    #[error("{}: cannot be used", folder.display())]
    Credentials {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: CredentialsError,
    },
    /// Written by a later version.
    #[error("{}: unsupported format {found}, this program reads {FORMAT} and {FORMAT_OF_MANDATES}", folder.display())]
    Format {
        /// The folder.
        folder: PathBuf,
        /// What stands there.
        found: u32,
    },
    /// It was imported and has not taken over.
    #[error("{}: this controller was imported and does not act", folder.display())]
    Standby {
        /// The folder.
        folder: PathBuf,
    },
    /// An invalid name.
    #[error(
        "{name:?} is not a valid node name: use letters, digits, `-`, `_` and `.`, at most {MAX_NAME_BYTES}"
    )]
    Name {
        /// As given.
        name: String,
    },
    /// A name or address that another member has.
    #[error("{taken} is in the cluster already, with another key")]
    Taken {
        /// The name or address.
        taken: String,
    },
    /// A member that is to be added again under another name.
    #[error("this node is in the cluster already, as {known}: {name} would be a second name")]
    Known {
        /// Its name.
        known: String,
        /// As given.
        name: String,
    },
    /// No such member.
    #[error("{name} is not in the cluster")]
    Unknown {
        /// As given.
        name: String,
    },
    /// Too many members.
    #[error("a cluster has at most {MAX_MEMBERS} members")]
    Full,
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The node refused.
    #[error("{node}: {reason}")]
    Refused {
        /// The node.
        node: String,
        /// Its reason.
        reason: String,
    },
    /// The node did not answer.
    #[error("{node}: did not answer: {problem}")]
    Silent {
        /// The node.
        node: String,
        /// What failed.
        problem: String,
    },
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name in the cluster.
    pub name: String,
    /// Host and port.
    pub address: String,
    /// The key that it must show.
    pub key: PeerKey,
    /// Last second of its certificate, since 1970.
    pub expires: u64,
}

impl Member {
    /// Whether its certificate is due for renewal.
    #[must_use]
    pub fn wants_renewal(&self) -> bool {
        wants_renewal(self.expires)
    }
}

/// Whether a certificate that holds until `expires` ends soon, or later than one that is made now:
/// then the clock that it was made by was ahead, and it may not hold yet.
fn wants_renewal(expires: u64) -> bool {
    expires < now() + RENEW_SECONDS || expires > Validity::from_now().until
}

#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    cluster: String,
    authority: Bytes,
    controller: Bytes,
    expires: u64,
    #[serde(default)]
    members: Vec<Member>,
    /// Of the last handover to this folder; of an imported one, the one that the exporter had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mandate: Option<SignedMandate>,
    /// The file of the controller's key, if it is another one than at first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key_file: Option<String>,
    /// Whether it was imported and has not taken over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    standby: bool,
}

impl Document {
    fn key_file(&self) -> &str {
        self.key_file.as_deref().unwrap_or(CONTROLLER_FILE)
    }
}

/// A controller's folder.
pub struct Home {
    folder: PathBuf,
    document: Document,
    authority: Authority,
    credentials: Credentials,
}

impl Home {
    /// Creates a cluster without members.
    pub fn init(folder: &Path) -> Result<Self, HomeError> {
        files::create_folder(folder)?;
        let lock = files::lock(&folder.join(LOCK_FILE), files::LOCK_TIMEOUT)?;
        if let Some(Document { cluster, .. }) = files::read_json(&folder.join(DOCUMENT_FILE))? {
            return Err(HomeError::Exists { folder: folder.to_owned(), cluster });
        }
        let document = Self::make(folder)?;
        // Written last: a folder is a cluster once it has this file.
        files::write_json(&folder.join(DOCUMENT_FILE), &document)?;
        drop(lock);
        Self::open(folder)
    }

    fn make(folder: &Path) -> Result<Document, HomeError> {
        let unusable = |source| HomeError::Credentials { folder: folder.to_owned(), source };
        let mut id = [0; 9];
        getrandom::fill(&mut id).map_err(|error| unusable(CredentialsError::Random(error)))?;
        let cluster = Base64UrlUnpadded::encode_string(&id);
        let authority_key = generate_key().map_err(unusable)?;
        let controller_key = generate_key().map_err(unusable)?;
        let of_controller = PeerKey::of_pair(&controller_key);
        files::write(&folder.join(AUTHORITY_FILE), authority_key.serialized_der())?;
        files::write(&folder.join(CONTROLLER_FILE), controller_key.serialized_der())?;
        let authority = Authority::new(cluster.clone(), authority_key);
        let validity = Validity::from_now();
        let controller = authority.sign(Role::Controller, "controller", of_controller, validity);
        Ok(Document {
            format: FORMAT,
            cluster,
            authority: Bytes(authority.certificate().map_err(unusable)?.to_vec()),
            controller: Bytes(controller.map_err(unusable)?.to_vec()),
            expires: validity.until,
            members: Vec::new(),
            mandate: None,
            key_file: None,
            standby: false,
        })
    }

    /// Opens a cluster.
    pub fn open(folder: &Path) -> Result<Self, HomeError> {
        let mut document = Self::read(folder)?;
        if document.standby {
            return Err(HomeError::Standby { folder: folder.to_owned() });
        }
        let unusable = |source| HomeError::Credentials { folder: folder.to_owned(), source };
        let authority_key = files::read_private(&folder.join(AUTHORITY_FILE))?;
        let key = files::read_private(&folder.join(document.key_file()))?;
        let authority_key = parse_key(&authority_key).map_err(unusable)?;
        let authority = Authority::new(document.cluster.clone(), authority_key);
        if wants_renewal(document.expires) {
            let _lock = files::lock(&folder.join(LOCK_FILE), files::LOCK_TIMEOUT)?;
            document = Self::read(folder)?;
            let validity = Validity::from_now();
            let own = PeerKey::of_pair(&parse_key(&key).map_err(unusable)?);
            let certificate = authority.sign(Role::Controller, "controller", own, validity);
            document.controller = Bytes(certificate.map_err(unusable)?.to_vec());
            document.expires = validity.until;
            if let Some(mandate) = &mut document.mandate {
                // Nodes verify it with the certificate that came with it.
                let signer = Credentials::new(&document.authority.0, &document.controller.0, &key);
                let again = signer.and_then(|signer| mandate.sign_again(&signer));
                *mandate = again.map_err(unusable)?;
            }
            files::write_json(&folder.join(DOCUMENT_FILE), &document)?;
        }
        let credentials = Credentials::new(&document.authority.0, &document.controller.0, &key)
            .map_err(unusable)?;
        let credentials = match &document.mandate {
            Some(mandate) => {
                let text = serde_json::to_string(mandate).expect("a mandate is JSON");
                credentials.presenting(&text)
            }
            None => credentials,
        };
        Ok(Self { folder: folder.to_owned(), document, authority, credentials })
    }

    fn read(folder: &Path) -> Result<Document, HomeError> {
        let document: Document = files::read_json(&folder.join(DOCUMENT_FILE))?
            .ok_or_else(|| HomeError::Missing { folder: folder.to_owned() })?;
        if ![FORMAT, FORMAT_OF_MANDATES].contains(&document.format) {
            let found = document.format;
            return Err(HomeError::Format { folder: folder.to_owned(), found });
        }
        Ok(document)
    }

    /// The cluster's id.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.document.cluster
    }

    /// The controller's certificate and key.
    #[must_use]
    pub const fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The members, in the order in which they were added.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.document.members
    }

    /// The member of this name or address.
    #[must_use]
    pub fn member(&self, text: &str) -> Option<&Member> {
        let members = self.members();
        let named = members.iter().find(|member| member.name == text);
        named.or_else(|| members.iter().find(|member| member.address == text))
    }

    /// How a member is reached.
    #[must_use]
    pub fn endpoint(&self, member: &Member) -> Endpoint {
        let Member { name, address, key, .. } = member.clone();
        Endpoint::member(name, address, self.credentials.clone(), key)
    }

    /// Adds the node at `address`, which printed `token`.
    pub fn add(
        &mut self,
        address: &str,
        token: &JoinToken,
        name: Option<&str>,
    ) -> Result<Member, HomeError> {
        let resolved = resolve(address)?;
        let _joining = self.lock_for_joining()?;
        let is_named = name.is_some();
        let name = match name {
            Some(name) => name.to_owned(),
            None => self.free_name(address),
        };
        if !is_name(&name) {
            return Err(HomeError::Name { name });
        }
        let expires = Validity::from_now().until;
        let mut member = Member { name, address: address.to_owned(), key: token.key, expires };
        check_free(self.members(), &member)?;
        let deadline = HandshakeDeadline::after(NODE_TIMEOUT);
        let socket = reach(address, &resolved, deadline.at)?;
        match Channel::call_stranger(socket, token.key, deadline) {
            Ok(channel) => {
                let secret = token.secret.clone();
                let grant = self.grant(&member)?;
                ask(address, &channel, &Request::Join { secret, grant })?;
            }
            // It was added before, and this machine did not receive the answer or lost the entry.
            Err(HandshakeError::AlreadyJoined) if self.is_ours(&member, &resolved) => {
                let known = self.members().iter().find(|known| known.key == member.key);
                if let Some(known) = known.filter(|known| known.name != member.name) {
                    let known = known.name.clone();
                    if is_named {
                        return Err(HomeError::Known { known, name: member.name });
                    }
                    member.name = known;
                }
                // Its certificate's end is unknown: it is renewed at the next use.
                member.expires = Validity::from_now().from;
            }
            Err(source) => {
                return Err(ConnectError::Handshake { node: address.to_owned(), source }.into());
            }
        }
        self.change(|document| {
            document.members.retain(|it| it.key != member.key);
            // Checked again: an earlier version of this program does not take the join lock.
            check_free(&document.members, &member)?;
            document.members.push(member.clone());
            Ok(())
        })?;
        Ok(member)
    }

    /// Waits for other commands that add or move members, and reads the document again.
    fn lock_for_joining(&mut self) -> Result<File, HomeError> {
        let lock = files::lock(&self.folder.join(JOIN_LOCK_FILE), JOIN_LOCK_TIMEOUT)?;
        self.document = Self::read(&self.folder)?;
        Ok(lock)
    }

    fn is_ours(&self, member: &Member, resolved: &[std::net::SocketAddr]) -> bool {
        let deadline = HandshakeDeadline::after(NODE_TIMEOUT);
        let expected = ExpectedPeer { role: Role::Node, key: Some(member.key) };
        reach(&member.address, resolved, deadline.at).is_ok_and(|socket| {
            let service = Service::Transfer;
            Channel::call(socket, &self.credentials, service, expected, deadline).is_ok()
        })
    }

    /// A free name: the host's first label, or `node`, with a number if that is taken.
    fn free_name(&self, address: &str) -> String {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let word = host.split('.').next().unwrap_or(host);
        let is_word = is_name(word) && word.parse::<u32>().is_err();
        let word = if is_word { word } else { "node" };
        let taken = |name: &str| self.members().iter().any(|it| it.name == name);
        if is_word && !taken(word) {
            return word.to_owned();
        }
        let numbered = (1..=MAX_MEMBERS + 1).map(|number| format!("{word}-{number}"));
        let mut free = numbered.filter(|name| !taken(name));
        free.next().unwrap_or_else(|| word.to_owned())
    }

    pub(crate) fn grant(&self, member: &Member) -> Result<Grant, HomeError> {
        let validity = Validity { until: member.expires, ..Validity::from_now() };
        let (certificate, authority) =
            self.certify(Role::Node, &member.name, member.key, validity)?;
        Ok(Grant {
            cluster: self.cluster().to_owned(),
            name: member.name.clone(),
            authority,
            certificate,
            expires: member.expires,
        })
    }

    /// A certificate for the holder of `key`, and the authority's own.
    pub(crate) fn certify(
        &self,
        role: Role,
        name: &str,
        key: PeerKey,
        validity: Validity,
    ) -> Result<(Bytes, Bytes), HomeError> {
        let unusable = |source| HomeError::Credentials { folder: self.folder.clone(), source };
        let certificate = self.authority.sign(role, name, key, validity).map_err(unusable)?;
        Ok((Bytes(certificate.to_vec()), self.document.authority.clone()))
    }

    /// Renews a member's certificate; returns the member with its new expiry.
    pub fn renew(&mut self, name: &str) -> Result<Member, HomeError> {
        let mut member = self.known(name)?;
        member.expires = Validity::from_now().until;
        let channel = self.endpoint(&member).connect(Service::Member, NODE_TIMEOUT)?;
        ask(&member.name, &channel, &Request::Renew(self.grant(&member)?))?;
        self.change(|document| {
            document.members.iter_mut().filter(|it| it.key == member.key).for_each(|it| {
                it.expires = member.expires;
            });
            Ok(())
        })?;
        Ok(member)
    }

    /// Changes a member's address, if it answers there with its key.
    pub fn relocate(&mut self, name: &str, address: &str) -> Result<Member, HomeError> {
        let _joining = self.lock_for_joining()?;
        let mut member = self.known(name)?;
        address.clone_into(&mut member.address);
        check_free(self.members(), &member)?;
        self.endpoint(&member).connect(Service::Transfer, NODE_TIMEOUT)?;
        self.change(|document| {
            check_free(&document.members, &member)?;
            document.members.iter_mut().filter(|it| it.key == member.key).for_each(|it| {
                it.address.clone_from(&member.address);
            });
            Ok(())
        })?;
        Ok(member)
    }

    /// Tells a member to leave the cluster.
    pub fn dismiss(&self, name: &str) -> Result<(), HomeError> {
        let member = self.known(name)?;
        let channel = self.endpoint(&member).connect(Service::Member, NODE_TIMEOUT)?;
        ask(&member.name, &channel, &Request::Leave)
    }

    /// Removes a member from the document: it is never connected to again, and no group accepts it.
    pub fn forget(&mut self, name: &str) -> Result<(), HomeError> {
        let member = self.known(name)?;
        self.change(|document| {
            document.members.retain(|it| it.key != member.key);
            Ok(())
        })
    }

    pub(crate) fn known(&self, name: &str) -> Result<Member, HomeError> {
        let unknown = || HomeError::Unknown { name: name.to_owned() };
        self.member(name).cloned().ok_or_else(unknown)
    }

    /// Changes the document as it is on disk now.
    fn change(
        &mut self,
        change: impl FnOnce(&mut Document) -> Result<(), HomeError>,
    ) -> Result<(), HomeError> {
        let _lock: File = files::lock(&self.folder.join(LOCK_FILE), files::LOCK_TIMEOUT)?;
        let mut document = Self::read(&self.folder)?;
        change(&mut document)?;
        files::write_json(&self.folder.join(DOCUMENT_FILE), &document)?;
        self.document = document;
        Ok(())
    }
}

/// Checks that a member fits the limit, and that its name and address are free.
fn check_free(members: &[Member], member: &Member) -> Result<(), HomeError> {
    let others: Vec<&Member> = members.iter().filter(|it| it.key != member.key).collect();
    if others.len() >= MAX_MEMBERS {
        return Err(HomeError::Full);
    }
    for other in others {
        if other.name == member.name {
            return Err(HomeError::Taken { taken: member.name.clone() });
        }
        if other.address == member.address {
            return Err(HomeError::Taken { taken: member.address.clone() });
        }
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && !name.starts_with(['-', '.'])
        && name.bytes().all(allowed)
}

/// Sends a request to a node and waits for its answer.
fn ask(node: &str, channel: &Channel, request: &Request) -> Result<(), HomeError> {
    let deadline = Instant::now() + NODE_TIMEOUT;
    let silent = |error: MessageError| HomeError::Silent {
        node: node.to_owned(),
        problem: error.to_string(),
    };
    message::write(channel, request, deadline).map_err(silent)?;
    match message::read(channel, deadline).map_err(silent)? {
        Reply::Done => Ok(()),
        Reply::Refused(reason) => Err(HomeError::Refused { node: node.to_owned(), reason }),
    }
}
