//! `system_profiler -json SPThunderboltDataType` and `networksetup -listallhardwareports`.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde_json::Value;

/// Slowest Thunderbolt 5 link, in Gb/s; RDMA needs it.
pub(in crate::commands) const THUNDERBOLT_5: u32 = 80;

/// A port of this Mac.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::commands) struct Port {
    /// The number in `Thunderbolt 2`, which names its network interface.
    pub receptacle: String,
    /// Gb/s: of the link, or what the port can do if nothing is connected.
    pub speed: Option<u32>,
    /// The domain of this port, and with it the end of a cable.
    pub domain: Option<String>,
    /// What is at the other end of the cable.
    pub peer: Option<Peer>,
}

/// The other end of a cable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::commands) struct Peer {
    /// A Mac's model (`Mac17,6`) or a device's name; not the name that its owner gave it.
    pub model: String,
    pub is_mac: bool,
    /// Its domain, which its own list of ports has too.
    pub domain: Option<String>,
}

/// The ports, in the order of their numbers.
pub(in crate::commands) fn ports(json: &str) -> anyhow::Result<Vec<Port>> {
    let json: Value = serde_json::from_str(json).context("system_profiler gave no JSON")?;
    let buses = json["SPThunderboltDataType"].as_array().context("no list of Thunderbolt buses")?;
    let mut ports: Vec<Port> = buses.iter().filter_map(port).collect();
    ports.sort_by(|a, b| a.receptacle.cmp(&b.receptacle));
    Ok(ports)
}

/// The one port of a bus; on Apple silicon each has a bus of its own.
fn port(bus: &Value) -> Option<Port> {
    let tag = &bus["receptacle_1_tag"];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let receptacle = text(&tag["receptacle_id_key"])?;
    let is_connected = tag["receptacle_status_key"] == "receptacle_connected";
    let peer = bus["_items"].get(0).filter(|_| is_connected).map(|item| Peer {
        model: text(&item["device_name_key"]).unwrap_or_else(|| "unknown".to_owned()),
        // Another host has a domain of its own; docks and disks are in this one's.
        is_mac: item["domain_uuid_key"].is_string(),
        domain: text(&item["domain_uuid_key"]),
    });
    let speed = tag["current_speed_key"].as_str().and_then(gigabits);
    Some(Port { receptacle, speed, domain: text(&bus["domain_uuid_key"]), peer })
}

/// The number in `80 Gb/s` and `Up to 120 Gb/s`.
fn gigabits(text: &str) -> Option<u32> {
    let number = text.strip_suffix("Gb/s")?.trim().rsplit(' ').next()?;
    number.parse().ok()
}

/// The network interface of each hardware port: `Thunderbolt 2` has `en6`.
pub(in crate::commands) fn interfaces(output: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut port = None;
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("Hardware Port: ") {
            port = Some(name.trim().to_owned());
        } else if let Some(device) = line.strip_prefix("Device: ")
            && let Some(port) = port.take()
        {
            found.insert(port, device.trim().to_owned());
        }
    }
    found
}

impl Port {
    /// One line: number, interface, speed and what is connected.
    pub(in crate::commands) fn shown(&self, interfaces: &BTreeMap<String, String>) -> String {
        let name = format!("Thunderbolt {}", self.receptacle);
        let interface = interfaces.get(&name).map_or("no interface", String::as_str);
        let speed = self.speed.map_or("unknown speed".to_owned(), |speed| format!("{speed} Gb/s"));
        match &self.peer {
            None => format!("port {} ({interface}): free, up to {speed}", self.receptacle),
            Some(Peer { model, is_mac: true, .. }) => {
                format!("port {} ({interface}): the Mac {model} at {speed}", self.receptacle)
            }
            Some(Peer { model, .. }) => {
                format!("port {} ({interface}): {model} at {speed}", self.receptacle)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sample, *};

    #[test]
    fn a_mac_a_dock_and_a_free_port_are_told_apart() {
        let found = ports(&sample("thunderbolt-rdma-off.json")).unwrap();
        let interfaces = interfaces(&sample("hardware-ports.txt"));
        let shown: Vec<String> = found.iter().map(|port| port.shown(&interfaces)).collect();
        assert_eq!(
            shown,
            [
                "port 1 (en1): free, up to 120 Gb/s",
                "port 2 (en6): the Mac Mac17,6 at 80 Gb/s",
                "port 3 (en2): SB-XTM5 at 80 Gb/s",
            ]
        );
    }

    #[test]
    fn thunderbolt_4_is_told_by_what_its_ports_can_do() {
        let found = ports(&sample("thunderbolt-idle-m4.json")).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|it| it.peer.is_none() && it.speed < Some(THUNDERBOLT_5)));
    }

    #[test]
    fn other_answers_are_errors_and_not_an_empty_list() {
        for bad in ["", "no thunderbolt hardware", "{}", "{\"SPThunderboltDataType\": 3}"] {
            ports(bad).unwrap_err();
        }
        assert_eq!(ports("{\"SPThunderboltDataType\": []}").unwrap(), []);
    }
}
