//! Ports for servers whose address must be known before they listen, or at which nobody shall. The system gives its own
//! range to every test that asks for any port, so one of those may have a new owner a moment later.

use std::{
    net::TcpListener,
    process,
    sync::atomic::{AtomicU16, Ordering},
};

/// A port below the system's range that nobody has had from here before.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let from = 10_000 + (process::id() % 100) as u16 * 200;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let next = || from + NEXT.fetch_add(1, Ordering::Relaxed);
    std::iter::repeat_with(next).find(is_free).unwrap()
}
