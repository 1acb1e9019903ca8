//! How many files and sockets this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More than any command needs.
const ENOUGH: u64 = 65_536;

/// Asks the system for as many descriptors as it gives without privileges: its first limit is 256 on a
/// Mac, a server has one for every client, and a checkpoint has hundreds of files.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(ENOUGH).min(ENOUGH);
    if current.is_some_and(|current| current < wanted) {
        // One that is refused stays as it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    }
}
