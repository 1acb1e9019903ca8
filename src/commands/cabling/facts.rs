//! What a machine says of its ports, in a form that others understand.

use std::{collections::BTreeMap, fs, net::Ipv4Addr, path::Path};

use serde::{Deserialize, Serialize};

use super::parse::{self, Address};
use crate::commands::doctor::{
    apple::{
        rdma::{self, Switch},
        thunderbolt::{self, THUNDERBOLT_5},
    },
    ask,
};

/// One machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(in crate::commands) struct Facts {
    /// `macos` or `linux`.
    pub(super) system: String,
    /// Model of the machine (`Mac16,9`) and build of the system (`25C56`), where they are known.
    pub(super) model: String,
    pub(super) build: String,
    /// Whether RDMA is switched on; unknown without `rdma_ctl`.
    pub(super) is_enabled: Option<bool>,
    /// Whether some port can do Thunderbolt 5.
    pub(super) has_thunderbolt_5: Option<bool>,
    /// Interfaces that bridge0 owns.
    pub(super) bridged: Vec<String>,
    pub(super) sleeps: Option<bool>,
    pub(super) has_firewall: Option<bool>,
    pub(super) ports: Vec<Port>,
    /// Networks of all interfaces, so that none is proposed twice.
    pub(super) networks: Vec<Address>,
}

/// A port that a cable to another machine may be at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::commands) struct Port {
    /// Number of the receptacle.
    pub(super) receptacle: Option<String>,
    pub(super) interface: String,
    /// Gb/s.
    pub(super) speed: Option<u32>,
    /// The domain of this port, and that of the Mac at the other end of its cable.
    pub(super) domain: Option<String>,
    pub(super) peer_domain: Option<String>,
    /// The RDMA device.
    pub(super) device: Option<String>,
    pub(super) is_active: bool,
    pub(super) gids: Vec<Ipv4Addr>,
    pub(super) addresses: Vec<Address>,
}

impl Facts {
    /// Of this machine.
    pub(in crate::commands) fn gather() -> Self {
        if cfg!(target_os = "macos") { Self::of_macos() } else { Self::of_linux(Path::new("/sys")) }
    }

    fn of_macos() -> Self {
        let told = |program: &str, args: &[&str]| ask(program, args).unwrap_or_default();
        let firewall = "/usr/libexec/ApplicationFirewall/socketfilterfw";
        Self::of_outputs(&Outputs {
            thunderbolt: told("system_profiler", &["-json", "SPThunderboltDataType"]),
            hardware_ports: told("networksetup", &["-listallhardwareports"]),
            ifconfig: told("ifconfig", &["-a"]),
            rdma: ask("rdma_ctl", &["status"]).ok(),
            devices: told("ibv_devinfo", &["-v"]),
            model: told("sysctl", &["-n", "hw.model"]),
            build: told("sw_vers", &["-buildVersion"]),
            sleep: told("pmset", &["-g"]),
            firewall: told(firewall, &["--getglobalstate"]),
        })
    }

    pub(super) fn of_outputs(outputs: &Outputs) -> Self {
        let (addresses, bridged) = parse::ifconfig(&outputs.ifconfig);
        let interfaces = thunderbolt::interfaces(&outputs.hardware_ports);
        let devices = rdma::devices(&outputs.devices);
        let found = thunderbolt::ports(&outputs.thunderbolt);
        let has_thunderbolt_5 = found
            .as_ref()
            .ok()
            .map(|ports| ports.iter().any(|port| port.speed >= Some(THUNDERBOLT_5)));
        let port = |port: thunderbolt::Port| {
            let interface = interfaces.get(&format!("Thunderbolt {}", port.receptacle))?.clone();
            let device = devices.iter().find(|device| device.interface() == interface);
            let mapped = |gid: &String| parse::gid(gid);
            Some(Port {
                receptacle: Some(port.receptacle),
                speed: port.speed,
                domain: port.domain,
                peer_domain: port.peer.filter(|peer| peer.is_mac).and_then(|peer| peer.domain),
                device: device.map(|device| device.name.clone()),
                is_active: device.is_some_and(rdma::Device::is_active),
                gids: device
                    .map_or_else(Vec::new, |it| it.gids.iter().filter_map(mapped).collect()),
                addresses: addresses.get(&interface).cloned().unwrap_or_default(),
                interface,
            })
        };
        Self {
            system: "macos".to_owned(),
            model: outputs.model.trim().to_owned(),
            build: outputs.build.trim().to_owned(),
            is_enabled: outputs.rdma.as_ref().and_then(|text| match Switch::parse(text) {
                Switch::Enabled => Some(true),
                Switch::Disabled => Some(false),
                Switch::Unknown(_) => None,
            }),
            has_thunderbolt_5,
            bridged,
            sleeps: parse::sleeps(&outputs.sleep),
            has_firewall: parse::firewall(&outputs.firewall),
            ports: found.unwrap_or_default().into_iter().filter_map(port).collect(),
            networks: addresses.into_values().flatten().collect(),
        }
    }

    /// From a Linux machine's sysfs, whose root is `sys`.
    pub(super) fn of_linux(sys: &Path) -> Self {
        let addresses = ask("ip", &["-json", "address"]).map(|json| parse::ip(&json));
        Self::of_sysfs(sys, &addresses.unwrap_or_default())
    }

    pub(super) fn of_sysfs(sys: &Path, addresses: &BTreeMap<String, Vec<Address>>) -> Self {
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let mut names: Vec<String> =
                entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        let devices = sys.join("class/infiniband");
        let mut ports = Vec::new();
        for device in names(&devices) {
            let folder = devices.join(&device);
            let port = folder.join("ports/1");
            let told = |name: &str| fs::read_to_string(port.join(name)).unwrap_or_default();
            let gids = names(&port.join("gids")).into_iter();
            let gids = gids.filter_map(|index| parse::gid(&told(&format!("gids/{index}"))));
            let mut gids: Vec<Ipv4Addr> = gids.collect();
            gids.dedup();
            // Cards name their interfaces; Soft-RoCE's devices are upon one that has the GID's address.
            let of_card = names(&folder.join("device/net")).into_iter().next();
            let of_gid = || {
                let has = |found: &[Address]| found.iter().any(|(it, _)| gids.contains(it));
                addresses.iter().find(|(_, found)| has(found)).map(|(name, _)| name.clone())
            };
            let interface = of_card.or_else(of_gid).unwrap_or_default();
            ports.push(Port {
                addresses: addresses.get(&interface).cloned().unwrap_or_default(),
                interface,
                speed: parse::rate(&told("rate")),
                is_active: told("state").contains("ACTIVE"),
                gids,
                device: Some(device),
                ..Port::default()
            });
        }
        let build = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            system: "linux".to_owned(),
            build: build.trim().to_owned(),
            ports,
            networks: addresses.values().flatten().copied().collect(),
            ..Self::default()
        }
    }
}

/// What macOS's tools print.
#[derive(Default)]
pub(super) struct Outputs {
    pub(super) thunderbolt: String,
    pub(super) hardware_ports: String,
    pub(super) ifconfig: String,
    pub(super) rdma: Option<String>,
    pub(super) devices: String,
    pub(super) model: String,
    pub(super) build: String,
    pub(super) sleep: String,
    pub(super) firewall: String,
}

impl Port {
    /// As people find it: `Thunderbolt 2 (en6)`.
    pub(super) fn shown(&self) -> String {
        let name = self.device.as_deref().unwrap_or("no RDMA device");
        match &self.receptacle {
            Some(number) => format!("port {number} ({}, {name})", self.interface),
            None => format!("{} ({name})", self.interface),
        }
    }

    /// The address of its GID, if RDMA can use it.
    pub(super) fn usable(&self) -> Option<Ipv4Addr> {
        self.gids.first().copied().filter(|_| self.is_active)
    }
}
