//! Kill points: named places at which a test can stop the program in order to kill it.
//!
//! `SHARDPACK_PAUSE_AT=NAME` makes the program print `paused at NAME` on standard error when it
//! first gets there, and wait to be killed.

use std::{sync::OnceLock, thread};

use crate::progress::say;

fn wanted() -> Option<&'static str> {
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    WANTED
        .get_or_init(|| std::env::var("SHARDPACK_PAUSE_AT").ok().filter(|name| !name.is_empty()))
        .as_deref()
}

/// Waits here for ever if `SHARDPACK_PAUSE_AT` names this point.
pub(crate) fn at(name: impl FnOnce() -> String) {
    if let Some(wanted) = wanted()
        && name() == wanted
    {
        say(&format!("paused at {wanted}"));
        loop {
            thread::park();
        }
    }
}
