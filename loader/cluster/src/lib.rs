//! The processes that serve one model together: one *front*, which serves HTTP, and one *rank*
//! process per package, which holds the weights.
//!
//! A rank announces its address and a one-time token on its standard output (`announce`). The
//! front connects to each ([`Supervisor`]), receives their identities and checks that they form one
//! group ([`Identity`]), watches them load, and tells them to form a group of an epoch; they connect
//! to each other (`mesh`), by RDMA where they can (`links`). Then rank 0 takes requests and returns events. The protocol is in
//! `message`. A rank ends when its front does, or keeps its weights a while for the next one; a front
//! outlives its ranks: a lost rank is started again, and all form the group of the next epoch.
//!
//! Plain threads and blocking sockets: a handful of connections, none of them in a hurry.
#![forbid(unsafe_code)]

mod acceptor;
mod announce;
mod identity;
mod links;
mod mesh;
mod message;
mod probe;
mod process;
mod rank;
mod supervisor;
mod token;
mod vitals;
mod wire;

pub use announce::{Announcement, AnnouncementError, FrontPresence};
pub use identity::{Identity, IdentityError};
pub use message::{LinkChoice, PROTOCOL, Progress};
#[doc(hidden)]
pub use probe::probe_messages;
pub use process::{FrontState, FrontWatch, LogSink, RankProcess, SpawnError};
pub use rank::{LoadError, RankError, RankOptions, run_rank};
pub use supervisor::{
    GroupEvent, GroupEventSink, Node, RecoveryOptions, Repair, Restart, RestartError, Restarted,
    ServeError, Supervisor, SupervisorOptions, Survivors, WEIGHT_STREAMS, WeightsSource,
};
pub use token::Token;
pub use wire::WireError;

#[cfg(test)]
mod tests;
