//! Addresses as people write them: `HOST:PORT`, `[IPv6]:PORT`, and link-local addresses of IPv6 with their
//! zone, the interface at which they are (`[fe80::1%en5]:7420`). Two machines on a cable have no others.
//!
//! Knows texts and what the system resolves; opens nothing.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, SocketAddrV6, ToSocketAddrs},
    str::FromStr,
};

/// An IP address, with its zone where it is link-local.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAddress(SocketAddr);

impl HostAddress {
    /// An address that needs no zone.
    #[must_use]
    pub const fn new(ip: IpAddr) -> Self {
        Self(SocketAddr::new(ip, 0))
    }

    /// The host of an address.
    #[must_use]
    pub fn of(address: SocketAddr) -> Self {
        Self(with_port(address, 0))
    }

    /// The address without its zone.
    #[must_use]
    pub const fn ip(&self) -> IpAddr {
        self.0.ip()
    }

    /// The address of a port.
    #[must_use]
    pub fn at(&self, port: u16) -> SocketAddr {
        with_port(self.0, port)
    }
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

impl fmt::Display for HostAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            SocketAddr::V6(address) if address.scope_id() != 0 => {
                write!(formatter, "{}%{}", address.ip(), address.scope_id())
            }
            address => address.ip().fmt(formatter),
        }
    }
}

impl FromStr for HostAddress {
    type Err = String;

    /// `192.168.1.10`, `fd00::1`, `fe80::1%en5`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = plain.parse() {
            return Ok(Self::new(ip));
        }
        if let Some(zoned) = zoned(plain, 0)? {
            return Ok(Self(zoned));
        }
        Err(format!("expected an IP address such as 192.168.1.10 or fe80::1%en5, found {text:?}"))
    }
}

/// Parses an IP address with a port; no name is looked up but that of a zone.
pub fn parse_socket_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let expected = || {
        format!(
            "expected an IP address with a port, such as 192.168.1.10:7420 or [fe80::1%en5]:7420, found {text:?}"
        )
    };
    let (host, port) = bracketed(text).ok_or_else(expected)?;
    zoned(host, port)?.ok_or_else(expected)
}

/// The socket addresses of `HOST:PORT`, where a host is a name or an address.
pub fn resolve_address(text: &str) -> io::Result<Vec<SocketAddr>> {
    match bracketed(text) {
        // The system knows the names of its interfaces.
        Some((host, port)) if host.contains('%') => Ok((host, port).to_socket_addrs()?.collect()),
        _ => Ok(text.to_socket_addrs()?.collect()),
    }
}

/// Gives a link-local address the zone of another one: machines on a link have the same addresses for one
/// another but different names for the link. Any other address stays.
#[must_use]
pub fn on_link_of(address: SocketAddr, other: SocketAddr) -> SocketAddr {
    match (address, other) {
        (SocketAddr::V6(address), SocketAddr::V6(other)) if is_link_local(&address) => {
            let zone = if is_link_local(&other) { other.scope_id() } else { address.scope_id() };
            SocketAddrV6::new(*address.ip(), address.port(), address.flowinfo(), zone).into()
        }
        _ => address,
    }
}

const fn is_link_local(address: &SocketAddrV6) -> bool {
    address.ip().is_unicast_link_local()
}

/// Host and port of `[HOST]:PORT`.
fn bracketed(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.strip_prefix('[')?.rsplit_once("]:")?;
    Some((host, port.parse().ok()?))
}

/// The address of `IPv6%ZONE`; `None` if the text is no such address.
fn zoned(host: &str, port: u16) -> Result<Option<SocketAddr>, String> {
    let Some((ip, zone)) = host.split_once('%') else { return Ok(None) };
    if ip.parse::<IpAddr>().is_err() || zone.is_empty() {
        return Ok(None);
    }
    let found = (host, port).to_socket_addrs().ok().and_then(|mut found| found.next());
    found.map(Some).ok_or_else(|| {
        format!("{host}: expected the address with an interface of this machine behind %, found {zone:?}; `ip link` or `ifconfig` lists them")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface that every machine has.
    const LOOPBACK: &str = if cfg!(target_os = "linux") { "lo" } else { "lo0" };

    #[test]
    fn link_local_addresses_have_the_zone_of_their_interface() {
        let text = format!("[fe80::1%{LOOPBACK}]:7420");
        let parsed = parse_socket_address(&text).unwrap();
        let SocketAddr::V6(v6) = parsed else { panic!("{parsed}") };
        assert!(v6.scope_id() != 0 && v6.port() == 7420, "{parsed}");
        assert_eq!(resolve_address(&text).unwrap(), [parsed]);
        // As it is printed, and as a rank is told.
        assert_eq!(parse_socket_address(&parsed.to_string()), Ok(parsed));
        assert_eq!(resolve_address(&parsed.to_string()).unwrap(), [parsed]);
        let host: HostAddress = format!("fe80::1%{LOOPBACK}").parse().unwrap();
        assert_eq!((host.at(7420), HostAddress::of(parsed)), (parsed, host));
        assert_eq!(host.to_string().parse(), Ok(host));
    }

    #[test]
    fn other_addresses_are_what_they_were() {
        for text in ["127.0.0.1:0", "[::1]:7420", "[fe80::1]:1"] {
            assert_eq!(parse_socket_address(text).unwrap().to_string(), text);
            assert_eq!(resolve_address(text).unwrap(), [text.parse().unwrap()]);
        }
        for text in ["10.0.0.1", "fd00::1"] {
            assert_eq!(text.parse::<HostAddress>().unwrap().to_string(), text);
        }
        for wrong in ["localhost", "localhost:80", "[fe80::1%lo]", "fe80::1%lo:80", "[x%lo]:80", ""]
        {
            let error = parse_socket_address(wrong).unwrap_err();
            assert!(error.contains(&format!("found {wrong:?}")), "{error}");
        }
        let error = parse_socket_address("[fe80::1%no-such-port]:80").unwrap_err();
        assert!(error.contains("no-such-port"), "{error}");
    }

    #[test]
    fn a_machine_on_the_link_is_reached_over_the_own_end_of_it() {
        let check = |address: &str, other: &str, expected: &str| {
            let [address, other] = [address, other].map(|text| text.parse().unwrap());
            assert_eq!(on_link_of(address, other).to_string(), expected);
        };
        check("[fe80::2%7]:80", "[fe80::1%3]:7420", "[fe80::2%3]:80");
        check("[fe80::2]:80", "[fe80::1%3]:7420", "[fe80::2%3]:80");
        check("[fe80::2%7]:80", "10.0.0.1:7420", "[fe80::2%7]:80");
        check("[fd00::2]:80", "[fe80::1%3]:7420", "[fd00::2]:80");
        check("10.0.0.2:80", "[fe80::1%3]:7420", "10.0.0.2:80");
    }
}
