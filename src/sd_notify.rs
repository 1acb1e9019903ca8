//! What systemd is told of a service of `Type=notify` (`sd_notify(3)`): a datagram to the
//! socket that it names. Without such a socket nothing is said, and launchd needs none.

use std::{env, time::Duration};

/// Names the socket.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Variables that belong to this process alone: children must not speak for it.
pub(crate) const VARIABLES: [&str; 3] = [SOCKET, "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Sends lines such as `READY=1`. That nobody hears them ends no service.
#[cfg(unix)]
pub(crate) fn notify(state: &str) {
    use std::os::unix::net::UnixDatagram;
    let Some(name) = env::var_os(SOCKET) else { return };
    let Ok(socket) = UnixDatagram::unbound() else { return };
    // Whoever listens may be slow, and nothing here waits for it.
    let _ = socket.set_nonblocking(true);
    #[cfg(target_os = "linux")]
    if let Some(name) = std::os::unix::ffi::OsStrExt::as_bytes(&*name).strip_prefix(b"@") {
        use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};
        if let Ok(address) = SocketAddr::from_abstract_name(name) {
            let _ = socket.send_to_addr(state.as_bytes(), &address);
        }
        return;
    }
    let _ = socket.send_to(state.as_bytes(), name);
}

#[cfg(not(unix))]
pub(crate) fn notify(_: &str) {}

/// How often systemd is to hear `WATCHDOG=1`: twice in the time after which it ends the service.
pub(crate) fn watchdog_interval() -> Option<Duration> {
    let number = |name: &str| env::var(name).ok()?.parse::<u64>().ok();
    let is_for_this = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    let micros = number("WATCHDOG_USEC").filter(|micros| is_for_this && *micros > 0)?;
    Some(Duration::from_micros(micros / 2).max(Duration::from_millis(1)))
}
