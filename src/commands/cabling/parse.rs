//! What tools of macOS and Linux print about networks.

use std::{collections::BTreeMap, net::Ipv4Addr};

use serde_json::Value;

/// An address and the length of its network's prefix.
pub(super) type Address = (Ipv4Addr, u8);

/// `ifconfig`: the IPv4 addresses of each interface, and the members of `bridge0`.
pub(super) fn ifconfig(output: &str) -> (BTreeMap<String, Vec<Address>>, Vec<String>) {
    let (mut addresses, mut bridged) = (BTreeMap::<String, Vec<Address>>::new(), Vec::new());
    let mut interface = String::new();
    for line in output.lines() {
        if !line.starts_with([' ', '\t'])
            && let Some((name, _)) = line.split_once(": ")
        {
            name.clone_into(&mut interface);
            continue;
        }
        let mut words = line.split_whitespace();
        match words.next() {
            Some("inet") => {
                let address = words.next().and_then(|word| word.parse().ok());
                let mask = words.nth(1).and_then(|word| word.strip_prefix("0x"));
                let mask = mask.and_then(|mask| u32::from_str_radix(mask, 16).ok());
                if let (Some(address), Some(mask)) = (address, mask) {
                    let prefix = mask.leading_ones() as u8;
                    addresses.entry(interface.clone()).or_default().push((address, prefix));
                }
            }
            Some("member:") if interface == "bridge0" => {
                bridged.extend(words.next().map(str::to_owned));
            }
            _ => {}
        }
    }
    (addresses, bridged)
}

/// `ip -json address`: the IPv4 addresses of each interface.
pub(super) fn ip(json: &str) -> BTreeMap<String, Vec<Address>> {
    let parsed: Value = serde_json::from_str(json).unwrap_or_default();
    let mut addresses = BTreeMap::<String, Vec<Address>>::new();
    for link in parsed.as_array().into_iter().flatten() {
        let Some(name) = link["ifname"].as_str() else { continue };
        for found in link["addr_info"].as_array().into_iter().flatten() {
            let address = found["local"].as_str().and_then(|text| text.parse().ok());
            let prefix = found["prefixlen"].as_u64().and_then(|bits| u8::try_from(bits).ok());
            if let (Some(address), Some(prefix)) = (address, prefix.filter(|bits| *bits <= 32)) {
                addresses.entry(name.to_owned()).or_default().push((address, prefix));
            }
        }
    }
    addresses
}

/// `pmset -g`: whether the machine sleeps when nobody uses it.
pub(super) fn sleeps(output: &str) -> Option<bool> {
    let line = output.lines().find_map(|line| line.trim().strip_prefix("sleep "))?;
    line.split_whitespace().next()?.parse::<u32>().ok().map(|minutes| minutes > 0)
}

/// `socketfilterfw --getglobalstate`: whether the firewall is on.
pub(super) fn firewall(output: &str) -> Option<bool> {
    let state = output.rsplit("State = ").next()?.split(')').next()?.trim();
    state.parse::<u32>().ok().map(|state| state > 0)
}

/// The IPv4 address that a GID in sysfs stands for, if any.
pub(super) fn gid(text: &str) -> Option<Ipv4Addr> {
    text.trim().parse::<std::net::Ipv6Addr>().ok()?.to_ipv4_mapped()
}

/// `100 Gb/sec (4X EDR)`.
pub(super) fn rate(text: &str) -> Option<u32> {
    let number = text.split_whitespace().next()?.parse::<f64>().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number as u32)
}
