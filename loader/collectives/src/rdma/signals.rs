//! Queue pairs are destroyed when a signal ends the process. Apple's driver keeps those of a process
//! that was killed, sometimes until the machine is switched off.

use std::{io, sync::OnceLock, thread, time::Duration};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

use super::device::release_all;

/// How long the end of the process may wait for calls of the library that are under way.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Destroys every queue pair of this process when SIGTERM, SIGINT or SIGHUP arrives, and then ends
/// the process as the signal would have. On a thread of its own: a signal handler may not call the
/// library. Calls after the first do nothing. For a process that ends by these signals, as a rank's
/// does; one that ends in order drops its links instead.
pub fn release_on_signals() -> io::Result<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    if STARTED.set(()).is_err() {
        return Ok(());
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let wait = move || {
        for signal in signals.forever() {
            release_all(RELEASE_TIMEOUT);
            // It ends the process, or does not know the signal, which cannot be.
            let _ = emulate_default_handler(signal);
        }
    };
    thread::Builder::new().name("rdma-signals".to_owned()).spawn(wait)?;
    Ok(())
}

#[cfg(test)]
mod tests;
