//! Links over RDMA: queue pairs of UC with SEND and RECV, which is what Apple's RDMA over
//! Thunderbolt has, and RDMA devices of Linux have too.
//!
//! Reading order: [`connect`] (how two ranks come to a link: `offer`, what they tell each other, and
//! `pairing`, which ports are a cable's), `link` (frames in messages), `lane` (one queue pair with its
//! slots and credits), `slot` (a message's header), `device` (devices and memory, under `rules`,
//! Apple's), `real` over `verbs` (the library, opened at run time).

mod buffer;
mod connect;
mod device;
mod devices;
mod lane;
mod link;
mod offer;
mod pairing;
mod port;
mod real;
mod rules;
mod signals;
mod slot;
mod verbs;

#[cfg(test)]
mod fabric;
#[cfg(test)]
mod tests;

pub use connect::{Cables, Connected, Pair, RdmaError, connect};
pub use device::DeviceError;
pub use devices::Devices;
pub use link::RdmaLink;
pub use offer::Shape;
pub use port::PortReport;
pub use rules::RuleError;
pub use signals::release_on_signals;

/// Reads what the other side of a pair may send, for fuzzing: any answer will do, but for a panic.
#[doc(hidden)]
pub fn probe_messages(bytes: &[u8]) {
    if let Ok(turn) = offer::Turn::parse(bytes) {
        let written = turn.encode();
        assert_eq!(offer::Turn::parse(&written[4..]), Ok(turn), "what is written is read");
    }
    if let Some((header, payload)) = bytes.split_first_chunk() {
        let _ = slot::SlotHeader::parse(header, payload.len());
    }
}
