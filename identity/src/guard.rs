//! Admission to a node: which callers are accepted, and the membership that decides it.
//!
//! ```text
//! identity/node.key         the node's private key (PKCS #8), made at the first start
//! identity/membership.json  its cluster's id, authority and certificate, once it has joined
//! identity/controller.json  the mandate of the controller that acts, after a handover
//! ```
//! Without a membership, the node accepts only a request to join a cluster, authenticated by the
//! token; with one, it accepts only the cluster's controllers and fronts, and other nodes for a relay.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustls::ServerConfig;
use serde::{Deserialize, Serialize};

use crate::{
    Channel, Credentials, CredentialsError, FileError, HandshakeDeadline, HandshakeError,
    JoinToken, PeerKey, Role, Service,
    certificate::{generate_key, parse_key},
    credentials::server_of_stranger,
    files,
    mandate::{Acting, FENCE_FILE, Fence, MandateError, Presented, Replaced, SignedMandate},
    message::{self, Bytes, Grant, Reply, Request},
    token::{Invitation, NotInvited},
};

pub(crate) const KEY_FILE: &str = "node.key";
const MEMBERSHIP_FILE: &str = "membership.json";

/// Version of the membership's file.
const FORMAT: u32 = 1;

/// Timeout for a caller's handshake and, if it concerns the membership, its request. A slow machine
/// over a bad wireless link needs one second.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before a caller with a wrong token gets its answer. It keeps its connection slot
/// meanwhile, so the rate of guesses is limited to the number of slots per delay.
pub(crate) const WRONG_TOKEN_DELAY: Duration = Duration::from_millis(500);

/// Interval between two checks whether a waiting caller has lost its connection slot.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Timeout for sending an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A node's identity cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// What stands in it.
    #[error("{}: the identity cannot be used; --reset makes a new one", folder.display())]
    Credentials {
        /// The identity's folder.
        folder: PathBuf,
        /// Why.
        source: CredentialsError,
    },
    /// Written by a later version.
    #[error("{}: unsupported format {found}, expected {FORMAT}", folder.display())]
    Format {
        /// The identity's folder.
        folder: PathBuf,
        /// What stands there.
        found: u32,
    },
}

#[derive(Serialize, Deserialize)]
struct Membership {
    format: u32,
    #[serde(flatten)]
    grant: Grant,
}

/// The cluster that a node is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its id.
    pub cluster: String,
    /// The node's name in the cluster.
    pub name: String,
    /// Last second of the node's certificate, since 1970.
    pub expires: u64,
}

/// Whether a node is in a cluster.
#[derive(Clone, Debug)]
pub enum EnrollmentState {
    /// Not yet: a caller that has the token may add it to a cluster.
    Inviting {
        /// The token, to be shown at the node's terminal.
        token: JoinToken,
        /// Time until the token expires.
        left: Duration,
    },
    /// The node is in a cluster.
    Joined(Joined),
}

/// The outcome of an accepted connection.
pub enum ConnectionOutcome {
    /// A controller, or a front that may start ranks, for the transfer protocol.
    Controller(Channel),
    /// Another node that fetches files of a push, for the transfer protocol.
    Relay(Channel),
    /// The node has joined.
    Joined(Joined),
    /// The membership has a new certificate.
    Renewed(Joined),
    /// The node has left its cluster; its state now.
    Left(EnrollmentState),
    /// The request was refused; the reason, which the caller has been sent.
    Refused(String),
}

enum State {
    Inviting(Invitation, Arc<ServerConfig>),
    Joined(Membered),
}

/// A membership in use.
struct Membered {
    joined: Joined,
    /// The certificate authority that callers are verified against.
    authority: Arc<Bytes>,
    /// The node's own.
    credentials: Credentials,
    configs: Configs,
}

/// How a member answers, by whom it is called.
#[derive(Clone)]
struct Configs {
    /// Controllers and fronts.
    controllers: Arc<ServerConfig>,
    /// Other nodes.
    nodes: Arc<ServerConfig>,
}

/// Why a request is not carried out.
enum Denied {
    /// After a delay.
    WrongToken(String),
    /// At once.
    Now(String),
}

impl From<String> for Denied {
    fn from(reason: String) -> Self {
        Self::Now(reason)
    }
}

impl From<NotInvited> for Denied {
    fn from(problem: NotInvited) -> Self {
        let reason = problem.to_string();
        match problem {
            NotInvited::Wrong => Self::WrongToken(reason),
            NotInvited::Expired => Self::Now(reason),
        }
    }
}

/// Authenticates the callers of a node.
pub struct Guard {
    folder: PathBuf,
    key: Vec<u8>,
    public: PeerKey,
    invitation_timeout: Duration,
    state: Mutex<State>,
    fence: Fence,
}

/// A node's certificate and key, for the ranks that it runs.
pub fn credentials_of_node(folder: &Path) -> Result<Option<Credentials>, GuardError> {
    Ok(read_membership(folder)?.map(|stored| stored.credentials))
}

/// A membership on disk, and the credentials that it gives.
struct StoredMembership {
    grant: Grant,
    credentials: Credentials,
}

fn read_membership(folder: &Path) -> Result<Option<StoredMembership>, GuardError> {
    let path = folder.join(MEMBERSHIP_FILE);
    let Some(Membership { format, grant }) = files::read_json(&path)? else { return Ok(None) };
    if format != FORMAT {
        return Err(GuardError::Format { folder: folder.to_owned(), found: format });
    }
    let key = files::read_private(&folder.join(KEY_FILE))?;
    let credentials = Credentials::new(&grant.authority.0, &grant.certificate.0, &key);
    let unusable = |source| GuardError::Credentials { folder: folder.to_owned(), source };
    let credentials = credentials.map_err(unusable)?;
    Ok(Some(StoredMembership { grant, credentials }))
}

fn joined(grant: &Grant) -> Joined {
    let Grant { cluster, name, expires, .. } = grant;
    Joined { cluster: cluster.clone(), name: name.clone(), expires: *expires }
}

impl Guard {
    /// Whether a node with this identity's folder is in a cluster.
    #[must_use]
    pub fn has_joined(folder: &Path) -> bool {
        folder.join(MEMBERSHIP_FILE).exists()
    }

    /// Forgets cluster and key.
    pub fn reset(folder: &Path) -> Result<(), GuardError> {
        // The membership first: a key without one is a fresh start.
        files::remove(&folder.join(MEMBERSHIP_FILE))?;
        files::remove(&folder.join(FENCE_FILE))?;
        Ok(files::remove(&folder.join(KEY_FILE))?)
    }

    /// Opens the identity in `folder`; creates a key if there is none. A token is valid for
    /// `invitation_timeout`.
    pub fn open(folder: &Path, invitation_timeout: Duration) -> Result<Self, GuardError> {
        let unusable = |source| GuardError::Credentials { folder: folder.to_owned(), source };
        files::create_folder(folder)?;
        let path = folder.join(KEY_FILE);
        if !path.exists() {
            files::write(&path, generate_key().map_err(unusable)?.serialized_der())?;
        }
        let key = files::read_private(&path)?;
        let public = PeerKey::of_pair(&parse_key(&key).map_err(unusable)?);
        let state = match read_membership(folder)? {
            Some(StoredMembership { grant, credentials }) => {
                State::Joined(Membered::new(grant, &credentials).map_err(unusable)?)
            }
            None => invite(&key, public, invitation_timeout).map_err(unusable)?,
        };
        let fence = Fence::open(folder)?;
        let (folder, state) = (folder.to_owned(), Mutex::new(state));
        Ok(Self { folder, key, public, invitation_timeout, state, fence })
    }

    /// Where the identity is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The node's key.
    #[must_use]
    pub const fn key(&self) -> PeerKey {
        self.public
    }

    /// Whether the node is in a cluster.
    #[must_use]
    pub fn enrollment(&self) -> EnrollmentState {
        match &*self.lock() {
            State::Inviting(invitation, _) => EnrollmentState::Inviting {
                token: invitation.token.clone(),
                left: invitation.left(Instant::now()),
            },
            State::Joined(membered) => EnrollmentState::Joined(membered.joined.clone()),
        }
    }

    /// The node's certificate and key in its cluster, if it has joined one.
    #[must_use]
    pub fn credentials(&self) -> Option<Credentials> {
        match &*self.lock() {
            State::Inviting(..) => None,
            State::Joined(membered) => Some(membered.credentials.clone()),
        }
    }

    /// The mandate of the controller that acts; none before the first handover.
    #[must_use]
    pub fn mandate(&self) -> Option<SignedMandate> {
        self.fence.known()
    }

    /// Takes a controller's mandate, if it is higher than the one that is known. Changes that are under
    /// way end first.
    pub fn present(&self, mandate: SignedMandate) -> Result<Presented, MandateError> {
        let (Some(credentials), Some(cluster)) = (self.credentials(), self.cluster()) else {
            return Err(MandateError::NoCluster);
        };
        self.fence.present(mandate, &credentials, &cluster)
    }

    /// Lets the controller with this key change the node; no other takes over while what is returned is
    /// held.
    pub fn acting(&self, controller: Option<PeerKey>) -> Result<Acting<'_>, Replaced> {
        // No lock of the state is held while the fence's is waited for.
        let cluster = self.cluster();
        self.fence.acting(controller, cluster.as_deref())
    }

    fn cluster(&self) -> Option<String> {
        match &*self.lock() {
            State::Inviting(..) => None,
            State::Joined(membered) => Some(membered.joined.cluster.clone()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Authenticates a caller and carries out its request, except for the transfer protocol.
    /// Drops the caller as soon as it has `lost` its connection slot.
    pub fn receive(
        &self,
        socket: TcpStream,
        lost: &dyn Fn() -> bool,
    ) -> Result<ConnectionOutcome, HandshakeError> {
        let (configs, authority) = match &*self.lock() {
            State::Inviting(_, config) => {
                let (controllers, nodes) = (Arc::clone(config), Arc::clone(config));
                (Configs { controllers, nodes }, None)
            }
            State::Joined(membered) => {
                (membered.configs.clone(), Some(Arc::clone(&membered.authority)))
            }
        };
        let choose = |service| {
            let is_relay = service == Some(Service::Relay);
            Arc::clone(if is_relay { &configs.nodes } else { &configs.controllers })
        };
        let limit = HandshakeDeadline { at: Instant::now() + PROOF_TIMEOUT, is_cancelled: lost };
        let channel = Channel::answer_with(socket, &choose, limit)?;
        match channel.service() {
            Some(Service::Transfer) => Ok(ConnectionOutcome::Controller(channel)),
            Some(Service::Relay) => Ok(ConnectionOutcome::Relay(channel)),
            Some(Service::Member) if has_role(&channel, Role::Front) => {
                let reason = "a front has no say in memberships".to_owned();
                Ok(ConnectionOutcome::Refused(reason))
            }
            // Its certificate, or the lack of one, was verified in the handshake.
            Some(Service::Join | Service::Member) => {
                Ok(self.attend(&channel, authority.as_deref(), limit))
            }
            Some(Service::Rank) | None => {
                Ok(ConnectionOutcome::Refused("it requested no service".to_owned()))
            }
        }
    }

    /// Reads a request about the membership, carries it out and answers.
    fn attend(
        &self,
        channel: &Channel,
        authority: Option<&Bytes>,
        limit: HandshakeDeadline<'_>,
    ) -> ConnectionOutcome {
        let done = match message::read(channel, limit.at) {
            Ok(request) => self.carry_out(request, channel, authority),
            Err(error) => Err(Denied::Now(format!("it sent no valid request: {error}"))),
        };
        let done = done.map_err(|denied| match denied {
            Denied::Now(reason) => reason,
            Denied::WrongToken(reason) => {
                delay(limit.is_cancelled);
                reason
            }
        });
        let reply = match &done {
            Ok(_) => Reply::Done,
            Err(reason) => Reply::Refused(reason.clone()),
        };
        // What is done is done; a controller that did not hear it asks again.
        let _ = message::write(channel, &reply, Instant::now() + ANSWER_TIMEOUT);
        done.unwrap_or_else(ConnectionOutcome::Refused)
    }

    /// Carries out a request of a caller that was verified against `authority`; `None` if the node
    /// had not joined when the connection began.
    fn carry_out(
        &self,
        request: Request,
        channel: &Channel,
        authority: Option<&Bytes>,
    ) -> Result<ConnectionOutcome, Denied> {
        let acting = self.acting(channel.peer().map(|peer| peer.key)).map(drop);
        let mut state = self.lock();
        match (&*state, request, channel.service()) {
            (
                State::Inviting(invitation, _),
                Request::Join { secret, grant },
                Some(Service::Join),
            ) => {
                invitation.check(&secret, Instant::now())?;
                let membered = self.take(grant)?;
                let joined = membered.joined.clone();
                *state = State::Joined(membered);
                Ok(ConnectionOutcome::Joined(joined))
            }
            (State::Joined(known), Request::Renew(grant), Some(Service::Member)) => {
                known.check_authority(authority)?;
                acting.map_err(|replaced| replaced.to_string())?;
                if grant.cluster != known.joined.cluster || grant.authority != *known.authority {
                    let cluster = &known.joined.cluster;
                    let reason = format!(
                        "it is in cluster {cluster} and does not accept another cluster's certificate"
                    );
                    return Err(reason.into());
                }
                let membered = self.take(grant)?;
                let joined = membered.joined.clone();
                *state = State::Joined(membered);
                Ok(ConnectionOutcome::Renewed(joined))
            }
            (State::Joined(known), Request::Leave, Some(Service::Member)) => {
                known.check_authority(authority)?;
                acting.map_err(|replaced| replaced.to_string())?;
                files::remove(&self.folder.join(MEMBERSHIP_FILE))
                    .map_err(|error| error.to_string())?;
                *state = invite(&self.key, self.public, self.invitation_timeout)
                    .map_err(|error| error.to_string())?;
                drop(state);
                // One that stays is of another cluster than the next, and fences nobody there.
                let _ = self.fence.forget();
                Ok(ConnectionOutcome::Left(self.enrollment()))
            }
            (State::Joined(_), Request::Join { .. }, _) => {
                Err("it has joined a cluster since this connection began".to_owned().into())
            }
            (State::Inviting(..), Request::Renew(_) | Request::Leave, Some(Service::Member)) => {
                Err("it has left its cluster since this connection began".to_owned().into())
            }
            _ => Err("the request does not fit the connection".to_owned().into()),
        }
    }

    /// Checks a membership and keeps it.
    fn take(&self, grant: Grant) -> Result<Membered, String> {
        let credentials = Credentials::new(&grant.authority.0, &grant.certificate.0, &self.key);
        let checked = credentials.and_then(|credentials| {
            credentials.check_own(Role::Node)?;
            Membered::new(grant.clone(), &credentials)
        });
        let membered = checked.map_err(|error| {
            let reason = std::error::Error::source(&error).map(|it| format!(": {it}"));
            format!(
                "it cannot use the certificate that it was given{}; do the clocks of the two machines agree?",
                reason.unwrap_or_default()
            )
        })?;
        let path = self.folder.join(MEMBERSHIP_FILE);
        files::write_json(&path, &Membership { format: FORMAT, grant })
            .map_err(|error| error.to_string())?;
        Ok(membered)
    }
}

impl Membered {
    fn new(grant: Grant, credentials: &Credentials) -> Result<Self, CredentialsError> {
        let services = [Service::Transfer, Service::Member];
        let configs = Configs {
            controllers: credentials.server(&services, &[Role::Controller, Role::Front])?,
            nodes: credentials.server(&[Service::Relay], &[Role::Node])?,
        };
        let joined = joined(&grant);
        let (authority, credentials) = (Arc::new(grant.authority), credentials.clone());
        Ok(Self { joined, authority, credentials, configs })
    }

    /// Whether a caller was verified against this cluster's authority: the connection may have begun
    /// when the node was in another cluster.
    fn check_authority(&self, authority: Option<&Bytes>) -> Result<(), String> {
        if authority == Some(&*self.authority) {
            return Ok(());
        }
        let cluster = &self.joined.cluster;
        Err(format!("it has joined cluster {cluster} since this connection began; try again"))
    }
}

/// Whether the peer of a verified connection has this role.
fn has_role(channel: &Channel, role: Role) -> bool {
    channel.peer().is_some_and(|peer| peer.role == Some(role))
}

/// Delays an answer while the caller keeps its connection slot.
fn delay(lost: &dyn Fn() -> bool) {
    let end = Instant::now() + WRONG_TOKEN_DELAY;
    while !lost() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(POLL_INTERVAL));
    }
}

fn invite(key: &[u8], public: PeerKey, timeout: Duration) -> Result<State, CredentialsError> {
    let token = JoinToken::generate(public).map_err(CredentialsError::Random)?;
    let invitation = Invitation::new(token, Instant::now() + timeout);
    Ok(State::Inviting(invitation, server_of_stranger(key)?))
}
