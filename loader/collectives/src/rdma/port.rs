//! A device's port: what it says of itself, and what it lacks so that a link can use it.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Most GIDs of a port that are looked at: Apple's have 3, Soft-RoCE's as many as addresses.
pub(super) const MAX_GIDS: usize = 32;

/// A port as the device describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    /// `IBV_PORT_ACTIVE` is 4.
    pub(super) state: u32,
    /// `enum ibv_mtu`: 1 for 256 bytes to 5 for 4096.
    pub(super) mtu: u32,
    pub(super) width: u8,
    pub(super) speed: u8,
    pub(super) lid: u16,
    /// By index; zeros where there is none.
    pub(super) gids: Vec<[u8; 16]>,
}

impl Port {
    pub(super) const fn unknown() -> Self {
        Self { state: 0, mtu: 0, width: 0, speed: 0, lid: 0, gids: Vec::new() }
    }
}

/// What a port says of itself, and what it lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct PortReport {
    /// The device.
    pub device: String,
    /// Whether the port is active: the cable is in, and RDMA is enabled on both sides.
    pub is_active: bool,
    /// The port's state as the library numbers it.
    pub state: u32,
    /// Largest packet of the path, in bytes.
    pub mtu_bytes: u32,
    /// Speed of the port in Gbit/s, if its numbers are known.
    pub gbit_per_s: Option<f32>,
    /// The port's addresses, empty ones left out.
    pub gids: Vec<Ipv6Addr>,
    /// Index and address of the GID that a link would use.
    pub usable: Option<(u8, Ipv4Addr)>,
    /// What to do so that a link can use the port.
    pub remedy: Option<String>,
}

/// The GID of a port that has an IPv4 address: the only form that both Apple's and RoCE's devices
/// take. Its index is not the same on all machines and changes with the addresses.
pub(super) fn usable_gid(port: &Port) -> Option<(u8, Ipv4Addr)> {
    (0..=u8::MAX).zip(&port.gids).find_map(|(index, gid)| {
        let address = Ipv6Addr::from(*gid).to_ipv4_mapped()?;
        (!address.is_unspecified()).then_some((index, address))
    })
}

/// Lanes times the speed of one, of the numbers that the specification of InfiniBand gives them.
fn gbit_per_s(port: &Port) -> Option<f32> {
    let lanes = match port.width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => return None,
    };
    let lane = match port.speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.0,
        32 => 25.0,
        64 => 50.0,
        128 => 100.0,
        _ => return None,
    };
    Some(lanes * lane)
}

/// `IBV_PORT_ACTIVE`.
const PORT_ACTIVE: u32 = 4;

impl PortReport {
    pub(super) fn of(device: &str, port: &Port) -> Self {
        let usable = usable_gid(port);
        let is_active = port.state == PORT_ACTIVE;
        // Apple names a device after the network interface of its cable.
        let interface = device.strip_prefix("rdma_").unwrap_or(device);
        let remedy = if !is_active {
            Some(format!(
                "connect the cable of {device}, and enable RDMA on both machines (on macOS: \
                 `rdma_ctl enable` in Recovery)"
            ))
        } else if usable.is_none() {
            Some(format!(
                "give the cable an IPv4 address, on both machines in the same subnet of 24 bits \
                 and in no other cable's: `sudo ifconfig {interface} inet 10.77.1.1/24`"
            ))
        } else {
            None
        };
        Self {
            device: device.to_owned(),
            is_active,
            state: port.state,
            mtu_bytes: if (1..=5).contains(&port.mtu) { 128 << port.mtu } else { 0 },
            gbit_per_s: gbit_per_s(port),
            gids: port
                .gids
                .iter()
                .filter(|gid| **gid != [0; 16])
                .map(|gid| (*gid).into())
                .collect(),
            usable,
            remedy,
        }
    }
}
