//! The transfer protocol: how a node gets its package, without sockets and without files.
//!
//! A connection carries frames ([`frame`]) with messages ([`Message`]). Two state machines take
//! messages and return the next action: [`Sender`] on the controller, [`Receiver`] on the node. The
//! bytes are moved by their driver: [`Wire`] reads and writes frames with deadlines on whatever
//! stream it is given.
//!
//! ```text
//! controller                              node
//! Hello                          →
//!                                ←        Hello
//! Offer (manifest, set.json)     →        looks for what it holds already
//!                                ←        Working … Status (chunks held, free space)
//! Chunk Chunk Chunk …            →        checks each against the manifest, then stores it
//!                                ←        ChunkStored … (or ChunkRefused)
//! Commit                         →        verifies the whole package, fsync, rename
//!                                ←        Working … Prepared
//! Activate                       →        (on a connection of its own, once all are prepared)
//!                                ←        Activated
//! ```
//!
//! Goals: no byte counts before it has been checked against the manifest; what has been stored is
//! not sent again, whatever ended the last attempt; a hostile peer can neither exhaust memory nor
//! leave a file outside its package.
//!
//! A chunk names its own place, and none depends on another, so they may be spread over several
//! streams. Once the offer was answered, further connections join it:
//!
//! ```text
//! Hello                          →
//!                                ←        Hello
//! Join (package, its manifest)   →        finds it under way on another connection
//!                                ←        Joined
//! Chunk Chunk Chunk …            →        as above
//! ```
//!
//! The two sides use the highest version of the protocol that both speak ([`Versions`]).
//!
//! All streams are equal from then on: any may end, and its chunks are sent on another; any may
//! say `Commit`, once every chunk on every stream was answered. A node that knows no `Join` is sent
//! all on one.
//!
//! In place of an offer, a controller may read single chunks of a stored package (`Fetch`) and replace
//! damaged ones (`Put`).
//!
//! Not goals here: secrecy and identity (mutual TLS goes around the stream), speed limits and
//! retries (the sender's). Frames carry no epoch: a push belongs to no rank group, and a package is named by its
//! digest.

mod failure;
pub mod frame;
mod held;
mod message;
mod payload;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;
mod version;
mod wire;

pub use failure::{Failure, FailureCode};
pub use frame::FrameError;
pub use held::{ChunkMap, SharedMap};
pub use message::{
    ChunkPlace, Intent, Join, MAX_JSON_BYTES, Message, Offer, Operation, PackageKey, PutOutcome,
    StartRank,
};
pub use receiver::{Incoming, Receiver, ReceiverAction};
pub use sender::{Heard, Outgoing, SendError, Sender};
pub use version::{Feature, Greeting, NoCommonVersion, SPOKEN, Versions};
pub use wire::{Timeouts, Wire, WireError};
