//! Identity between machines: keys, certificates with a role, joining a cluster, and authenticated
//! connections.
//!
//! Reading order: [`PeerKey`] and [`Role`] (identities), [`Credentials`] (certificates and their
//! verification), [`Channel`] (a connection with or without TLS), [`Endpoint`] (how a node is
//! reached), [`Guard`] (authenticates a node's callers), [`ConnectionSlots`] (limits unauthenticated
//! connections), [`Home`] (a controller's folder), [`Signature`] (documents that a controller signs), [`Mandate`] (which
//! controller acts).
//!
//! Knows keys, certificates and sockets; does not know the protocols on them.
#![forbid(unsafe_code)]

mod address;
mod certificate;
mod channel;
mod connection_slots;
mod controller;
mod credentials;
mod endpoint;
mod files;
mod front;
mod guard;
mod handshake;
mod key;
mod mandate;
mod message;
mod probe;
mod signature;
#[cfg(test)]
mod tests;
mod token;

pub use address::{HostAddress, on_link_of, parse_socket_address, resolve_address};
pub use certificate::{Authority, CredentialsError, Role, Validity, date};
pub use channel::Channel;
pub use connection_slots::{ConnectionSlot, ConnectionSlots};
pub use controller::{
    Candidate, ExportError, Home, HomeError, MIN_PASSPHRASE_BYTES, Member, export_controller,
    import_controller,
};
pub use credentials::{Credentials, ExpectedPeer, Peer, Service};
pub use endpoint::{ConnectError, Endpoint, TlsPeer, is_local};
pub use files::FileError;
pub use front::FrontCertificate;
pub use guard::{
    ConnectionOutcome, EnrollmentState, Guard, GuardError, Joined, credentials_of_node,
};
pub use handshake::{HandshakeDeadline, HandshakeError};
pub use key::PeerKey;
pub use mandate::{Acting, Mandate, MandateError, Presented, Replaced, SignedMandate};
#[doc(hidden)]
pub use probe::probe_membership;
pub use signature::{Signature, SignatureError};
pub use token::{JoinToken, TokenError};
