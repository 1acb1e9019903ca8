//! Ports for servers whose address must be known before they listen, or at which nobody shall listen. Shared by path
//! with the tests of other crates; knows nothing of what is tested.
//!
//! A port that the system gives away is anybody's once it is closed. These lie below the range that the system gives
//! away, in blocks whose first port is a lock: whoever listens there has the rest of the block, until its process ends.
//! So no two processes and no two tests have the same port, whichever temporary folders they have.

use std::{
    net::TcpListener,
    sync::{Mutex, PoisonError},
};

/// The first block, and the end of the last one: below the range that Linux gives away, and far below that of macOS.
const FROM: u16 = 10_000;
const TO: u16 = 32_000;

/// Ports of a block, with the one that locks it.
const BLOCK: u16 = 20;

/// The block that this process has, and the next port of it.
static BLOCK_OF_THIS_PROCESS: Mutex<Option<(TcpListener, u16)>> = Mutex::new(None);

/// A port that no other test is given while this process runs.
pub(crate) fn free_port() -> u16 {
    let mut block = BLOCK_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let (_, next) = match &mut *block {
            Some(held) if held.1 % BLOCK != 0 => held,
            // The lock of a used block is kept too: its ports may still be in use.
            used => {
                std::mem::forget(used.take());
                used.insert(lock_block())
            }
        };
        *next += 1;
        let port = *next - 1;
        // Somebody who knows nothing of blocks may listen there, and a node that outlived its test.
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Locks a block that nobody has. Returns the lock and the first port after it.
fn lock_block() -> (TcpListener, u16) {
    let mut firsts = (FROM..TO).step_by(usize::from(BLOCK));
    let locked =
        firsts.find_map(|first| Some((TcpListener::bind(("127.0.0.1", first)).ok()?, first + 1)));
    locked.expect("most blocks are nobody's")
}
