//! The node's side: takes packages from a controller, keeps them, makes one current.
//!
//! A [`Store`] is a directory; a [`Node`] answers the transfer protocol over it:
//! ```text
//! store/
//!   lock                      held while a process uses the store
//!   active.json               per model: the current package and the one before
//!   packages/<layout id>-<rank>/   verified packages, as the converter wrote them
//!   staging/<layout id>-<rank>/    a package being received: package/ and its journal
//! ```
//! No chunk counts before its value was checked, no package is listed before all of it was read
//! back and verified, and nothing is current before it is listed. Each of these steps is one
//! rename after an fsync, so a process that dies anywhere leaves the state before or after it.
//!
//! Knows files and frames; does not know what a tensor means. Connections are served by plain
//! threads: there are few, and what they do is read, hash and write.

mod active;
mod client;
mod connection;
mod event;
mod files;
mod journal;
mod node;
mod reuse;
mod stage;
mod store;
#[cfg(test)]
mod tests;

pub use active::{Active, ActiveModel};
pub use client::{ClientError, NodeClient};
pub use event::{Observer, ReceiveEvent};
pub use node::{Node, NodeOptions, ServeError, Shutdown, StartRankHook, bind, bind_guarded};
pub use store::{PackageDir, Store, StoreError};
