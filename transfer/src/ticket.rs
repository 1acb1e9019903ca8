//! Tickets: a controller lets one node fetch files of a push from another.
//!
//! The fetching node shows the ticket; the other one serves nothing without it, and nothing that it
//! does not name. Knows the document and its signature; does not know how chunks are moved.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use shardpack_identity::{Credentials, CredentialsError, PeerKey, Signature, SignatureError};
use shardpack_manifests::{Digest, canonical};

use crate::protocol::PackageKey;

/// Version of the document.
const FORMAT: u32 = 1;

/// What is signed; see [`Signature`].
const PURPOSE: &str = "relay ticket";

/// How long a ticket may be shown, in seconds: a day, since the clocks of the machines may be hours apart.
/// It is good for nothing but the files that it names, for the node that it names.
const VALID_SECONDS: u64 = 24 * 60 * 60;

/// Most files of a ticket, so that it stays far below the longest message; a package has tens.
pub const MAX_TICKET_FILES: usize = 1000;

/// Longest text: a file takes some 120 bytes.
const MAX_TEXT_BYTES: usize = 256 << 10;

/// A ticket that is not accepted, or cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TicketError {
    /// The document is not one.
    #[error("the relay ticket cannot be read: {0}")]
    Document(String),
    /// The node is in a cluster and the ticket is of nobody.
    #[error("the relay ticket is not signed: this node serves files only for its controllers")]
    Unsigned,
    /// A signature of somebody else, or of another document.
    #[error("the relay ticket's signature is refused")]
    Signature(#[source] SignatureError),
    /// For other nodes.
    #[error(
        "the relay ticket is for other nodes: it names {expected} as the node that {role}, found {found}"
    )]
    OtherNode {
        /// `serves` or `fetches`.
        role: &'static str,
        /// The key in the ticket.
        expected: String,
        /// The node's key.
        found: String,
    },
    /// Too old.
    #[error("the relay ticket ended {0} s ago; compare the clocks of the machines")]
    Ended(u64),
    /// The controller's key cannot sign.
    #[error("the relay ticket could not be signed")]
    Sign(#[source] CredentialsError),
}

/// A file that may be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketFile {
    /// Its index in the manifest of the serving node's package.
    pub file: u32,
    /// Its BLAKE3.
    pub blake3: Digest,
    /// Its bytes.
    pub size: u64,
}

/// Which files one node may fetch from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    format: u32,
    /// The serving node's package that has the files.
    pub package: PackageKey,
    /// The files.
    pub files: Vec<TicketFile>,
    /// Key of the serving node; none outside a cluster.
    pub from: Option<PeerKey>,
    /// Key of the fetching node; none outside a cluster.
    pub to: Option<PeerKey>,
    /// Last second in which it is accepted, since 1970.
    pub expires: u64,
}

impl Ticket {
    /// A ticket that is accepted for a day from now.
    #[must_use]
    pub fn new(
        package: PackageKey,
        files: Vec<TicketFile>,
        from: Option<PeerKey>,
        to: Option<PeerKey>,
    ) -> Self {
        Self { format: FORMAT, package, files, from, to, expires: now() + VALID_SECONDS }
    }
}

/// A ticket as it is sent: its text, and the controller's signature of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Sent", into = "Sent")]
pub struct SignedTicket {
    ticket: Ticket,
    text: String,
    signature: Option<Signature>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Sent {
    ticket: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<Signature>,
}

impl TryFrom<Sent> for SignedTicket {
    type Error = TicketError;

    fn try_from(sent: Sent) -> Result<Self, TicketError> {
        let Sent { ticket: text, signature } = sent;
        if text.len() > MAX_TEXT_BYTES {
            let problem = format!("{} bytes, at most {MAX_TEXT_BYTES} are read", text.len());
            return Err(TicketError::Document(problem));
        }
        let ticket: Ticket = serde_json::from_str(&text)
            .map_err(|error| TicketError::Document(error.to_string()))?;
        if ticket.format != FORMAT {
            let problem = format!("format {}, this program reads {FORMAT}", ticket.format);
            return Err(TicketError::Document(problem));
        }
        Ok(Self { ticket, text, signature })
    }
}

impl From<SignedTicket> for Sent {
    fn from(signed: SignedTicket) -> Self {
        Self { ticket: signed.text, signature: signed.signature }
    }
}

impl SignedTicket {
    /// Signs a ticket as the controller with these credentials; without any, for nodes of this machine
    /// that are in no cluster, it stays unsigned.
    pub fn sign(ticket: Ticket, signer: Option<&Credentials>) -> Result<Self, TicketError> {
        let text = canonical::to_string(&ticket)
            .map_err(|error| TicketError::Document(error.to_string()))?;
        let sign = |signer| Signature::sign(signer, PURPOSE, text.as_bytes());
        let signature = signer.map(sign).transpose().map_err(TicketError::Sign)?;
        Ok(Self { ticket, text, signature })
    }

    /// What it says; not whether that is to be believed.
    #[must_use]
    pub const fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Whether the node with these credentials may serve the node with the key `caller` now.
    pub fn verify(&self, credentials: &Credentials, caller: PeerKey) -> Result<(), TicketError> {
        let signature = self.signature.as_ref().ok_or(TicketError::Unsigned)?;
        signature
            .verify(credentials, PURPOSE, self.text.as_bytes(), now())
            .map_err(TicketError::Signature)?;
        let parties =
            [("serves", self.ticket.from, credentials.key()), ("fetches", self.ticket.to, caller)];
        for (role, named, found) in parties {
            if named != Some(found) {
                let expected = named.map_or("nobody".to_owned(), |key| key.to_string());
                return Err(TicketError::OtherNode { role, expected, found: found.to_string() });
            }
        }
        self.check_time()
    }

    /// Whether the ticket has not ended.
    pub fn check_time(&self) -> Result<(), TicketError> {
        match now().checked_sub(self.ticket.expires) {
            None | Some(0) => Ok(()),
            Some(since) => Err(TicketError::Ended(since)),
        }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use shardpack_identity::{Authority, Role, Validity};

    use super::*;

    fn ticket(from: &Credentials, to: &Credentials) -> Ticket {
        let package = PackageKey { layout: Digest::of(b"layout"), rank: 1 };
        let files = vec![TicketFile { file: 3, blake3: Digest::of(b"file"), size: 4 }];
        Ticket::new(package, files, Some(from.key()), Some(to.key()))
    }

    #[test]
    fn ticket_is_good_for_the_two_nodes_that_a_controller_named_and_until_it_ends() {
        let authority = Authority::generate("a").unwrap();
        let issue = |role| authority.issue(role, Validity::from_now()).unwrap();
        let (controller, from, to) =
            (issue(Role::Controller), issue(Role::Node), issue(Role::Node));
        let signed = SignedTicket::sign(ticket(&from, &to), Some(&controller)).unwrap();
        let json = serde_json::to_string(&signed).unwrap();
        let signed: SignedTicket = serde_json::from_str(&json).unwrap();
        signed.verify(&from, to.key()).unwrap();
        let refused = |signed: &SignedTicket, from: &Credentials, to: PeerKey| {
            signed.verify(from, to).unwrap_err().to_string()
        };
        assert!(refused(&signed, &to, from.key()).contains("node that serves"));
        assert!(refused(&signed, &from, controller.key()).contains("node that fetches"));
        let changed: SignedTicket =
            serde_json::from_str(&json.replace(r#"\"file\":3"#, r#"\"file\":4"#)).unwrap();
        assert_eq!(changed.ticket().files[0].file, 4, "the text was changed");
        assert!(refused(&changed, &from, to.key()).contains("signature is refused"));
        let of_node = SignedTicket::sign(ticket(&from, &to), Some(&to)).unwrap();
        assert!(refused(&of_node, &from, to.key()).contains("signature is refused"));
        let of_nobody = SignedTicket::sign(ticket(&from, &to), None).unwrap();
        assert!(refused(&of_nobody, &from, to.key()).contains("not signed"));
        let ended = Ticket { expires: now() - 10, ..ticket(&from, &to) };
        let ended = SignedTicket::sign(ended, Some(&controller)).unwrap();
        assert!(refused(&ended, &from, to.key()).contains("ended 10 s ago"));
    }
}
