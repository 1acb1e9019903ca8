//! Identity between machines: keys, certificates with a role, joining a cluster, and authenticated
//! connections.
//!
//! Reading order: [`PeerKey`] and [`Role`] (identities), [`Credentials`] (certificates and their
//! verification), [`Channel`] (a connection with or without TLS), [`Endpoint`] (how a node is
//! reached), [`Guard`] (authenticates a node's callers), [`ConnectionSlots`] (limits unauthenticated
//! connections), [`Home`] (a controller's folder).
//!
//! Knows keys, certificates and sockets; does not know the protocols on them.
#![forbid(unsafe_code)]

mod certificate;
mod channel;
mod connection_slots;
mod credentials;
mod endpoint;
mod files;
mod guard;
mod handshake;
mod home;
mod key;
mod message;
mod probe;
#[cfg(test)]
mod tests;
mod token;

pub use certificate::{Authority, CredentialsError, Role, Validity, date};
pub use channel::Channel;
pub use connection_slots::{ConnectionSlot, ConnectionSlots};
pub use credentials::{Credentials, ExpectedPeer, Peer, Service};
pub use endpoint::{ConnectError, Endpoint, TlsPeer, is_local};
pub use files::FileError;
pub use guard::{
    ConnectionOutcome, EnrollmentState, Guard, GuardError, Joined, credentials_of_node,
};
pub use handshake::{HandshakeDeadline, HandshakeError};
pub use home::{Home, HomeError, Member};
pub use key::PeerKey;
#[doc(hidden)]
pub use probe::probe_membership;
pub use token::{JoinToken, TokenError};
