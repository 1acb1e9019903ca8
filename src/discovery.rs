//! Finds nodes on the local network by multicast DNS (DNS-SD, `_shardpack._tcp`), and announces a
//! node. The addresses found are not authenticated: the token and the key in it decide whether the
//! node at an address is the right one.
//!
//! A node is announced only on request, and only until it has joined a cluster: every machine on
//! the network can read the announcement, and packets of every machine are parsed.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use shardpack_identity::PeerKey;

use crate::progress::say;

/// The DNS-SD service type of nodes.
const SERVICE: &str = "_shardpack._tcp.local.";

/// The property that holds the node's key.
const KEY: &str = "key";

/// Most nodes that are reported, more than any cluster has members.
const MAX_FOUND: usize = 256;

/// Most cached records, a few hundred bytes each. The library keeps every record for as long as its
/// sender asks; beyond this number, discovery stops.
const MAX_RECORDS: i64 = 20_000;

/// Interval between two checks of their number, and the timeout of a check.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Timeout for withdrawing an announcement.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(500);

/// A node that was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    /// The node's key, as announced.
    pub(crate) key: PeerKey,
    /// The node's address, as announced.
    pub(crate) address: SocketAddr,
}

/// Announces a node until it is dropped.
pub(crate) struct Announcer {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Announcer {
    /// Announces the node with this key at this address.
    pub(crate) fn start(address: SocketAddr, key: PeerKey) -> anyhow::Result<Self> {
        let service = service(address, key)?;
        let daemon = ServiceDaemon::new().context("multicast DNS is not available")?;
        let name = service.get_fullname().to_owned();
        daemon.register(service).context("the node cannot be announced")?;
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            while stopped.recv_timeout(LOOK_AGAIN) == Err(RecvTimeoutError::Timeout) {
                if is_flooded(&daemon) {
                    say(
                        "node: too many multicast DNS records on the network; not announced any more",
                    );
                    break;
                }
            }
            let left = daemon.unregister(&name).map(|done| done.recv_timeout(LEAVE_TIMEOUT));
            // Records on machines that missed it expire by themselves.
            drop(left);
            end(&daemon);
        };
        let thread = thread::Builder::new().name("announce".to_owned()).spawn(watch)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic there leaves nothing to clean up.
            let _ = thread.join();
        }
    }
}

fn service(address: SocketAddr, key: PeerKey) -> anyhow::Result<ServiceInfo> {
    let text = key.to_string();
    // Not the machine's own host name, which its system announces.
    let word: String = text.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    let (instance, host) = (format!("shardpack {word}"), format!("shardpack-{word}.local."));
    let properties = [(KEY, text.as_str())];
    let (ip, port) = (address.ip(), address.port());
    ServiceInfo::new(SERVICE, &instance, &host, ip, port, &properties[..])
        .context("the node cannot be announced")
}

/// Whether more records are cached than any network needs, or the daemon does not answer.
fn is_flooded(daemon: &ServiceDaemon) -> bool {
    let Ok(Ok(metrics)) = daemon.get_metrics().map(|answer| answer.recv_timeout(LOOK_AGAIN)) else {
        return true;
    };
    let cached = metrics.iter().filter(|(name, _)| name.starts_with("cached-"));
    cached.map(|(_, count)| *count).sum::<i64>() > MAX_RECORDS
}

fn end(daemon: &ServiceDaemon) {
    // It ends with the process otherwise.
    let _ = daemon.shutdown().map(|done| done.recv_timeout(LEAVE_TIMEOUT));
}

/// Listens for nodes for `timeout`, or until `is_enough`.
pub(crate) fn find(
    timeout: Duration,
    is_enough: impl Fn(&Found) -> bool,
) -> anyhow::Result<BTreeSet<Found>> {
    let deadline = Instant::now() + timeout;
    let daemon = ServiceDaemon::new().context("multicast DNS is not available")?;
    let events = daemon.browse(SERVICE).context("multicast DNS cannot search for nodes")?;
    let mut found = BTreeSet::new();
    let mut look = Instant::now() + LOOK_AGAIN;
    loop {
        let now = Instant::now();
        if now >= look {
            if is_flooded(&daemon) {
                end(&daemon);
                return Err(anyhow!("too many multicast DNS records on the network"));
            }
            look = now + LOOK_AGAIN;
        }
        let left = deadline.saturating_duration_since(now);
        if left.is_zero() || found.len() >= MAX_FOUND {
            break;
        }
        let Ok(event) = events.recv_timeout(left.min(LOOK_AGAIN)) else {
            if events.is_disconnected() {
                break;
            }
            continue;
        };
        let ServiceEvent::ServiceResolved(service) = event else { continue };
        let new = nodes(&service);
        let enough = new.iter().any(&is_enough);
        found.extend(new);
        if enough {
            break;
        }
    }
    end(&daemon);
    Ok(found)
}

/// The nodes in an announcement; none if it is not a node's.
fn nodes(service: &ResolvedService) -> Vec<Found> {
    let Some(key) = service.get_property_val_str(KEY).and_then(PeerKey::parse) else {
        return Vec::new();
    };
    let addresses = service.addresses.iter().map(|address| match address {
        mdns_sd::ScopedIp::V6(v6) if v6.addr().is_unicast_link_local() => {
            // A link-local address is valid on one of this machine's interfaces only.
            let scope = v6.scope_id().index;
            std::net::SocketAddrV6::new(*v6.addr(), service.port, 0, scope).into()
        }
        other => SocketAddr::new(other.to_ip_addr(), service.port),
    });
    let could_be =
        |it: &SocketAddr| it.port() != 0 && !it.ip().is_unspecified() && !it.ip().is_multicast();
    addresses.filter(could_be).take(MAX_FOUND).map(|address| Found { key, address }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> PeerKey {
        PeerKey::parse(&"A".repeat(43)).unwrap()
    }

    #[test]
    fn what_is_announced_is_what_is_found() {
        for address in ["192.168.1.11:7420", "[2001:db8::7]:7420"] {
            let node = Found { key: key(), address: address.parse().unwrap() };
            let service = service(node.address, node.key).unwrap();
            assert_eq!(nodes(&service.as_resolved_service()), [node]);
        }
    }

    #[test]
    fn announcements_that_lead_nowhere_are_none() {
        let resolve = |ip: &str, port, properties: &[(&str, &str)]| {
            let service = ServiceInfo::new(SERVICE, "x", "x.local.", ip, port, properties).unwrap();
            nodes(&service.as_resolved_service())
        };
        let text = key().to_string();
        assert_eq!(resolve("10.0.0.1", 7420, &[(KEY, &text)]).len(), 1);
        assert_eq!(resolve("10.0.0.1,10.0.0.2", 7420, &[(KEY, &text)]).len(), 2);
        for bad in [
            resolve("10.0.0.1", 7420, &[]),
            resolve("10.0.0.1", 7420, &[(KEY, &text[1..])]),
            resolve("10.0.0.1", 7420, &[(KEY, "\u{1b}[2J")]),
            resolve("10.0.0.1", 0, &[(KEY, &text)]),
            resolve("0.0.0.0", 7420, &[(KEY, &text)]),
            resolve("224.0.0.1", 7420, &[(KEY, &text)]),
        ] {
            assert_eq!(bad, []);
        }
    }
}
