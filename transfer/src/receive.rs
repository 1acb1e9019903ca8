//! The node's side: takes packages from a controller, keeps them, makes one current.
//!
//! A [`Store`] is a directory; a [`Node`] answers the transfer protocol over it:
//! ```text
//! store/
//!   lock                      held while a process uses the store
//!   active.json               per model: the current release, the ones before, a pending one
//!   packages/<layout id>-<rank>/   verified packages, as the converter wrote them
//!   staging/<layout id>-<rank>/    a package being received: package/ and its journal
//!   scrub.json                when each package was read last
//! ```
//! No chunk counts before its value was checked, no package is listed before all of it was read
//! back and verified, and nothing is current before it is listed. Each of these steps is one
//! rename after an fsync, so a process that dies anywhere leaves the state before or after it.
//!
//! Knows files and frames; does not know what a tensor means. Connections are served by plain
//! threads: there are few, and what they do is read, hash and write.

mod acting;
mod active;
mod client;
mod connection;
mod documents;
mod event;
mod files;
mod find;
mod fsck;
mod gc;
mod give;
mod intake;
mod journal;
mod listing;
mod node;
mod operations;
mod releases;
mod reuse;
mod scrub;
mod serve_chunks;
mod stage;
mod store;
mod take;
#[cfg(test)]
mod tests;
mod usage;

pub(crate) use active::model_name;
pub use active::{Active, ActiveModel, ReleaseOrder, ReleaseRefusal, ReleaseState, StoredRelease};
pub use client::{ClientError, NodeClient};
pub(crate) use documents::{DOCUMENT, DocumentName, DocumentPiece, DocumentRequest};
pub use event::{Observer, ReceiveEvent};
pub(crate) use files::write_durably;
pub(crate) use find::MAX_WANTED;
pub use find::{FindAnswer, FindRequest, WantedChunk};
pub use fsck::{CheckedPackage, DamagedChunk, FsckOptions, FsckReport};
pub use gc::{GcEntry, GcOptions, GcReason, GcReport};
pub(crate) use intake::Intake;
pub use node::{
    Node, NodeOptions, OperateHook, ServeError, Shutdown, StartRankHook, bind, bind_guarded,
};
pub use operations::{
    FinishRequest, ModelState, PrepareRequest, ReleaseInfo, StateRequest, StoreState,
};
pub use scrub::{ScrubOptions, scrub};
pub use store::{PackageDir, Store, StoreError};
pub(crate) use take::{TAKE, TakeAnswer, TakeRequest};
pub use usage::InUse;
