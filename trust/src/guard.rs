//! A node's door: who may come in, and the membership that decides it.
//!
//! ```text
//! identity/node.key         the node's private key (PKCS #8), made at the first start
//! identity/membership.json  its cluster's id, authority and certificate, once it has joined
//! ```
//! Without a membership the door takes nothing but a cluster, from whoever shows the token; with
//! one it takes the cluster's controllers alone.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustls::ServerConfig;
use serde::{Deserialize, Serialize};

use crate::{
    Channel, Credentials, CredentialsError, FileError, HandshakeError, JoinToken, Patience,
    PeerKey, Role, Service,
    certificate::{generate_key, parse_key},
    credentials::server_of_stranger,
    files,
    message::{self, Grant, Reply, Request},
    token::Invitation,
};

const KEY_FILE: &str = "node.key";
const MEMBERSHIP_FILE: &str = "membership.json";

/// Version of the membership's file.
const FORMAT: u32 = 1;

/// How long a caller may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a caller may take to say what it wants of the membership.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

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
    #[error("{}: of format {found}, this program knows {FORMAT}", folder.display())]
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
    /// What its controller calls the node.
    pub name: String,
    /// Last second of the node's certificate, since 1970.
    pub expires: u64,
}

/// How the door stands.
#[derive(Clone, Debug)]
pub enum Door {
    /// Whoever shows the token may give the node a cluster, for as long as is left.
    Inviting {
        /// To be told to the person at the terminal.
        token: JoinToken,
        /// Until the token ends.
        left: Duration,
    },
    /// The node is in a cluster.
    Joined(Joined),
}

/// What became of a caller that was let in.
pub enum Visit {
    /// A controller, for the transfer protocol.
    Controller(Channel),
    /// The node has joined.
    Joined(Joined),
    /// The membership has a new certificate.
    Renewed(Joined),
    /// The membership has ended; how the door stands now.
    Left(Door),
    /// It was refused, and has been told this.
    Refused(String),
}

enum State {
    Inviting(Invitation, Arc<ServerConfig>),
    Joined(Joined, Arc<ServerConfig>),
}

/// A node's door.
pub struct Guard {
    folder: PathBuf,
    key: Vec<u8>,
    public: PeerKey,
    invitation_timeout: Duration,
    state: Mutex<State>,
}

/// A node's certificate and key, for the ranks that it runs.
pub fn credentials_of_node(folder: &Path) -> Result<Option<Credentials>, GuardError> {
    Ok(read_membership(folder)?.map(|(_, credentials)| credentials))
}

fn read_membership(folder: &Path) -> Result<Option<(Joined, Credentials)>, GuardError> {
    let path = folder.join(MEMBERSHIP_FILE);
    let Some(Membership { format, grant }) = files::read_json(&path)? else { return Ok(None) };
    if format != FORMAT {
        return Err(GuardError::Format { folder: folder.to_owned(), found: format });
    }
    let key = files::read_private(&folder.join(KEY_FILE))?;
    let credentials = Credentials::new(&grant.authority.0, &grant.certificate.0, &key);
    let unusable = |source| GuardError::Credentials { folder: folder.to_owned(), source };
    Ok(Some((joined(&grant), credentials.map_err(unusable)?)))
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
        Ok(files::remove(&folder.join(KEY_FILE))?)
    }

    /// The door of the node whose identity is in `folder`; makes a key where there is none. A
    /// token holds for `invitation_timeout`.
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
            Some((joined, credentials)) => {
                State::Joined(joined, member_config(&credentials).map_err(unusable)?)
            }
            None => invite(&key, public, invitation_timeout).map_err(unusable)?,
        };
        let (folder, state) = (folder.to_owned(), Mutex::new(state));
        Ok(Self { folder, key, public, invitation_timeout, state })
    }

    /// Where the identity is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How the door stands.
    #[must_use]
    pub fn door(&self) -> Door {
        match &*self.lock() {
            State::Inviting(invitation, _) => Door::Inviting {
                token: invitation.token.clone(),
                left: invitation.left(Instant::now()),
            },
            State::Joined(joined, _) => Door::Joined(joined.clone()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out who has connected and, but for the transfer protocol, does what they want.
    pub fn receive(&self, socket: TcpStream) -> Result<Visit, HandshakeError> {
        let config = match &*self.lock() {
            State::Inviting(_, config) | State::Joined(_, config) => Arc::clone(config),
        };
        let patience = Patience::of(HANDSHAKE_TIMEOUT);
        let channel = Channel::answer_with(socket, config, patience)?;
        match channel.service() {
            Some(Service::Transfer) => Ok(Visit::Controller(channel)),
            // Its certificate, or the lack of one, was judged in the handshake.
            Some(Service::Join | Service::Member) => Ok(self.attend(&channel)),
            Some(Service::Rank) | None => {
                Ok(Visit::Refused("it did not say what it wants".to_owned()))
            }
        }
    }

    /// Reads a request about the membership, carries it out and answers.
    fn attend(&self, channel: &Channel) -> Visit {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        let done = match message::read(channel, deadline) {
            Ok(request) => self.carry_out(request, channel.service()),
            Err(error) => Err(format!("it sent no request: {error}")),
        };
        let reply = match &done {
            Ok(_) => Reply::Done,
            Err(reason) => Reply::Refused(reason.clone()),
        };
        // What is done is done; a controller that did not hear it asks again.
        let _ = message::write(channel, &reply, deadline);
        done.unwrap_or_else(Visit::Refused)
    }

    fn carry_out(&self, request: Request, service: Option<Service>) -> Result<Visit, String> {
        let mut state = self.lock();
        match (&mut *state, request, service) {
            (
                State::Inviting(invitation, _),
                Request::Join { secret, grant },
                Some(Service::Join),
            ) => {
                invitation.check(&secret, Instant::now())?;
                let (joined, config) = self.take(grant)?;
                *state = State::Joined(joined.clone(), config);
                Ok(Visit::Joined(joined))
            }
            (State::Joined(known, _), Request::Renew(grant), Some(Service::Member)) => {
                if grant.cluster != known.cluster {
                    return Err(format!("it is in cluster {}", known.cluster));
                }
                let (joined, config) = self.take(grant)?;
                *state = State::Joined(joined.clone(), config);
                Ok(Visit::Renewed(joined))
            }
            (State::Joined(..), Request::Leave, Some(Service::Member)) => {
                files::remove(&self.folder.join(MEMBERSHIP_FILE))
                    .map_err(|error| error.to_string())?;
                *state = invite(&self.key, self.public, self.invitation_timeout)
                    .map_err(|error| error.to_string())?;
                drop(state);
                Ok(Visit::Left(self.door()))
            }
            (State::Joined(..), Request::Join { .. }, _) => {
                Err("it has joined a cluster meanwhile".to_owned())
            }
            _ => Err("the request does not fit the connection".to_owned()),
        }
    }

    /// Checks a membership and keeps it.
    fn take(&self, grant: Grant) -> Result<(Joined, Arc<ServerConfig>), String> {
        let credentials = Credentials::new(&grant.authority.0, &grant.certificate.0, &self.key);
        let checked = credentials.and_then(|credentials| {
            credentials.check_own(Role::Node)?;
            Ok((member_config(&credentials)?, joined(&grant)))
        });
        let (config, joined) = checked.map_err(|error| {
            let reason = std::error::Error::source(&error).map(|it| format!(": {it}"));
            format!(
                "it cannot use the certificate that it was given{}; do the clocks of the two machines agree?",
                reason.unwrap_or_default()
            )
        })?;
        let path = self.folder.join(MEMBERSHIP_FILE);
        files::write_json(&path, &Membership { format: FORMAT, grant })
            .map_err(|error| error.to_string())?;
        Ok((joined, config))
    }
}

fn member_config(credentials: &Credentials) -> Result<Arc<ServerConfig>, CredentialsError> {
    credentials.server(&[Service::Transfer, Service::Member], &[Role::Controller])
}

fn invite(key: &[u8], public: PeerKey, timeout: Duration) -> Result<State, CredentialsError> {
    let token = JoinToken::generate(public).map_err(CredentialsError::Random)?;
    let invitation = Invitation::new(token, Instant::now() + timeout);
    Ok(State::Inviting(invitation, server_of_stranger(key)?))
}
