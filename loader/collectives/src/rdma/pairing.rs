//! Which ports of two machines are the two ends of a cable. Knows ports and addresses, not queue pairs.

use std::{net::Ipv4Addr, sync::Arc};

use super::{
    device::Device,
    devices::Devices,
    link::with_sources,
    offer::{MAX_CABLES, MAX_PORTS, OfferedPort},
    port::{Port, PortReport},
};

/// A port that a link can use, and what the peer is told of it.
pub(super) type UsablePort = (Arc<Device>, Port, OfferedPort);

#[derive(Default)]
pub(super) struct Ports {
    pub(super) usable: Vec<UsablePort>,
    /// What the others lack.
    pub(super) remedies: Vec<String>,
    /// Whether an active one has no IPv4 address, which may still come.
    pub(super) lack_an_address: bool,
}

pub(super) fn usable_ports(devices: &Devices) -> Ports {
    let mut ports = Ports::default();
    for device in devices.0.iter() {
        let port = match device.port() {
            Ok(port) => port,
            Err(error) => {
                ports.remedies.push(with_sources(&error));
                continue;
            }
        };
        let report = PortReport::of(device.name(), &port);
        ports.lack_an_address |= report.is_active && report.usable.is_none();
        match (report.remedy, report.usable) {
            (None, Some((index, _))) => {
                let gid = port.gids[usize::from(index)];
                let mtu = port.mtu.clamp(1, 5) as u8;
                let offered = OfferedPort { name: report.device, gid, mtu };
                ports.usable.push((Arc::clone(device), port, offered));
            }
            (remedy, _) => ports.remedies.extend(remedy),
        }
    }
    ports.usable.truncate(MAX_PORTS);
    ports
}

pub(super) fn address(port: &OfferedPort) -> Option<Ipv4Addr> {
    std::net::Ipv6Addr::from(port.gid).to_ipv4_mapped()
}

/// Whether a port reaches itself, for ranks of one machine. Soft-RoCE's do; a cable does not, and to
/// try it costs an Apple device what only a reboot gives back.
const LEADS_BACK: bool = !cfg!(target_os = "macos");

/// Cables by the first three bytes of their ends' addresses. Self-assigned addresses say nothing
/// about the cable, so such ports pair up only where each side has a single one.
pub(super) fn paired(low: &[OfferedPort], high: &[OfferedPort]) -> Vec<(usize, usize)> {
    let subnet = |port: &OfferedPort| {
        let address = address(port)?;
        let [a, b, c, _] = address.octets();
        (!address.is_link_local()).then_some([a, b, c])
    };
    let is_local = |port: &OfferedPort| address(port).is_some_and(|it| it.is_link_local());
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for (index, port) in low.iter().enumerate() {
        let Some(wanted) = subnet(port) else { continue };
        let found = (0..high.len()).find(|other| {
            subnet(&high[*other]) == Some(wanted)
                && pairs.iter().all(|(_, taken)| taken != other)
                && (LEADS_BACK || high[*other].gid != port.gid)
        });
        pairs.extend(found.map(|other| (index, other)));
    }
    let single = |ports: &[OfferedPort]| {
        let mut local = (0..ports.len()).filter(|index| is_local(&ports[*index]));
        local.next().filter(|_| local.next().is_none())
    };
    pairs.extend(single(low).zip(single(high)));
    pairs.truncate(MAX_CABLES);
    pairs
}

/// Why no port of one side belongs to one of the other.
pub(super) fn apart(theirs: &[OfferedPort]) -> String {
    let port = |port: &OfferedPort| match address(port) {
        Some(address) => format!("{} {address}", port.name),
        None => port.name.clone(),
    };
    format!(
        "no cable has both ends in one subnet of 24 bits; the other side has {}. Give both ends of \
         each cable addresses of a subnet of its own, such as `sudo ifconfig en2 inet 10.77.1.1/24` \
         and `10.77.1.2/24`",
        theirs.iter().map(port).collect::<Vec<_>>().join(", ")
    )
}
