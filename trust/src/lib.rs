//! Who is who between machines: keys, certificates with a role, joining a cluster, and the
//! connections over which one knows who is at the other end.
//!
//! Reading order: [`PeerKey`] and [`Role`] (who), [`Credentials`] (how it is proven and checked),
//! [`Channel`] (a connection in the clear or inside TLS), [`Endpoint`] (how a node is reached),
//! [`Guard`] (a node's door), [`Places`] (room before it), [`Home`] (a controller's folder).
//!
//! Knows keys, certificates and sockets; does not know what is said over them.
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

pub use certificate::{Authority, Role, Validity, date};
pub use channel::{Channel, Peer};
pub use connection_slots::{Place, Places};
pub use credentials::{Credentials, CredentialsError, Service};
pub use endpoint::{ConnectError, Endpoint, is_local};
pub use files::FileError;
pub use guard::{Door, Guard, GuardError, Joined, Visit, credentials_of_node};
pub use handshake::{HandshakeError, Patience};
pub use home::{Home, HomeError, Member};
pub use key::PeerKey;
#[doc(hidden)]
pub use probe::try_membership;
pub use token::{JoinToken, TokenError};
