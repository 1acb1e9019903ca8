//! `ibv_devices`, `ibv_devinfo -v` and `rdma_ctl status`.

/// Whether macOS has RDMA switched on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::commands) enum Switch {
    Enabled,
    Disabled,
    /// An answer that is neither.
    Unknown(String),
}

/// A port's RDMA device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::commands) struct Device {
    pub name: String,
    /// `PORT_ACTIVE`, `PORT_DOWN`; empty if it was not said.
    pub state: String,
    pub gids: Vec<String>,
}

impl Switch {
    pub(in crate::commands) fn parse(output: &str) -> Self {
        match output.trim().to_ascii_lowercase().as_str() {
            "enabled" => Self::Enabled,
            "disabled" => Self::Disabled,
            other => Self::Unknown(other.to_owned()),
        }
    }
}

impl Device {
    /// The network interface of the same port: `rdma_en2` is that of `en2`.
    pub(in crate::commands) fn interface(&self) -> &str {
        self.name.strip_prefix("rdma_").unwrap_or(&self.name)
    }

    /// Whether both ends of its cable are ready.
    pub(in crate::commands) fn is_active(&self) -> bool {
        self.state == "PORT_ACTIVE"
    }

    /// The GID that JACCL takes: the first that is an IPv4 address.
    pub(in crate::commands) fn usable_gid(&self) -> Option<&str> {
        self.gids.iter().map(String::as_str).find(|gid| {
            gid.parse::<std::net::Ipv6Addr>().is_ok_and(|ip| ip.to_ipv4_mapped().is_some())
        })
    }

    /// What gives it a GID that JACCL takes. Both ends need an address of the same network;
    /// `number` keeps the addresses of one machine apart.
    pub(in crate::commands) fn remedy(&self, number: usize) -> String {
        let interface = self.interface();
        format!(
            "sudo ifconfig {interface} inet 169.254.{number}.1 netmask 255.255.255.0 alias (at the \
             other end of the cable 169.254.{number}.2)"
        )
    }
}

/// The names that `ibv_devices` lists.
pub(in crate::commands) fn names(output: &str) -> Vec<String> {
    let names = output.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| name.starts_with("rdma_")).map(str::to_owned).collect()
}

/// The devices that `ibv_devinfo -v` describes.
pub(in crate::commands) fn devices(output: &str) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for line in output.lines().map(str::trim) {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match (key, devices.last_mut()) {
            ("hca_id", _) => {
                devices.push(Device { name: value.to_owned(), ..Device::default() });
            }
            ("state", Some(device)) => {
                value.split_whitespace().next().unwrap_or_default().clone_into(&mut device.state);
            }
            (key, Some(device)) if key.starts_with("GID[") => {
                // rdma-core puts the GID's type behind a comma.
                let gid = value.split([',', ' ']).next().unwrap_or_default();
                device.gids.push(gid.to_owned());
            }
            _ => {}
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::{super::sample, *};

    #[test]
    fn devices_are_listed_and_none_is_none() {
        assert_eq!(names(&sample("ibv_devices.txt")), ["rdma_en1", "rdma_en6", "rdma_en2"]);
        assert_eq!(names(&sample("ibv_devices-empty.txt")), [""; 0]);
        assert_eq!(names("No IB devices found\n"), [""; 0]);
    }

    #[test]
    fn a_peer_without_rdma_leaves_all_ports_down() {
        let found = devices(&sample("ibv_devinfo-down.txt"));
        assert_eq!(found.len(), 3);
        for device in &found {
            assert_eq!(device.state, "PORT_DOWN", "{device:?}");
            assert!(device.gids.is_empty() && !device.is_active());
        }
        assert_eq!(found[1].interface(), "en6");
    }

    #[test]
    fn a_port_without_an_address_has_no_usable_gid_and_a_remedy() {
        let found = devices(&sample("ibv_devinfo-gids.txt"));
        let usable: Vec<_> = found.iter().map(Device::usable_gid).collect();
        assert_eq!(usable, [None, Some("::ffff:169.254.10.1"), None]);
        assert_eq!(found.iter().filter(|it| it.is_active()).count(), 2);
        let remedy = found[0].remedy(3);
        assert!(remedy.starts_with("sudo ifconfig en3 inet 169.254.3.1 "), "{remedy}");
    }

    #[test]
    fn the_switch_is_read_as_the_tool_writes_it() {
        assert_eq!(Switch::parse("enabled\n"), Switch::Enabled);
        assert_eq!(Switch::parse("disabled\n"), Switch::Disabled);
        assert_eq!(Switch::parse("?"), Switch::Unknown("?".to_owned()));
    }
}
