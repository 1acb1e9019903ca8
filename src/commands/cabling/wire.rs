//! Addresses for cables: a /30 for each, so that every cable is a network of its own. Only proposed.

use std::net::Ipv4Addr;

use serde::Serialize;

use super::{
    facts::{Facts, Port},
    matrix::{Cable, Cabling, same_network},
    parse::Address,
};

/// The networks that are proposed: 10.42.0.0/16, four addresses each.
const FIRST: u32 = u32::from_be_bytes([10, 42, 0, 0]);
const LAST: u32 = u32::from_be_bytes([10, 42, 255, 252]);

/// Longest prefix that leaves both ends an address.
const PREFIX: u8 = 30;

/// What a node is to run.
#[derive(Debug, Serialize)]
pub(super) struct NodePlan {
    pub(super) name: String,
    /// Commands, in their order.
    pub(super) commands: Vec<String>,
    /// Cables that are right already.
    pub(super) kept: Vec<String>,
}

/// First address of a network.
pub(super) fn network((address, bits): Address) -> u32 {
    let mask = u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or(0);
    u32::from(address) & mask
}

/// Whether a cable has addresses of a network that no other port has.
fn is_right(cabling: &Cabling, cable: &Cable) -> bool {
    let [near, far] = &cable.ports;
    let (Some(near), Some(far)) = (near.addresses.first(), far.addresses.first()) else {
        return false;
    };
    let is_shared = |facts: &Facts| {
        facts.networks.iter().filter(|other| same_network(**other, *near)).count() > 1
    };
    same_network(*near, *far)
        && near.0 != far.0
        // Addresses that machines give themselves change.
        && !near.0.is_link_local()
        && !cable.nodes.iter().any(|node| is_shared(&cabling.nodes[*node].1))
}

/// The addresses of each cable: those that it has, or the next free network.
fn addresses(cabling: &Cabling) -> Vec<[Address; 2]> {
    let used: Vec<Address> =
        cabling.nodes.iter().flat_map(|(_, facts)| facts.networks.iter().copied()).collect();
    let mut next = FIRST;
    let mut found = Vec::new();
    for cable in &cabling.cables {
        if is_right(cabling, cable) {
            let own = |port: &Port| port.addresses[0];
            found.push([own(&cable.ports[0]), own(&cable.ports[1])]);
            continue;
        }
        let collides = |start: u32| {
            used.iter().any(|used| {
                let bits = used.1.min(PREFIX);
                network((Ipv4Addr::from(start), bits)) == network((used.0, bits))
            })
        };
        while collides(next) && next < LAST {
            next += 4;
        }
        found.push([1, 2].map(|end| (Ipv4Addr::from(next + end), PREFIX)));
        next = (next + 4).min(LAST);
    }
    found
}

/// The command that gives an interface an address.
pub(super) fn command(facts: &Facts, interface: &str, address: Ipv4Addr, bits: u8) -> String {
    if facts.system == "macos" {
        let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0));
        format!("sudo ifconfig {interface} inet {address} netmask {mask}")
    } else {
        format!("sudo ip address add {address}/{bits} dev {interface}")
    }
}

/// The command for one end of a cable, with what its other end is to have.
pub(super) fn command_for(cabling: &Cabling, cable: &Cable, end: usize) -> String {
    let index = cabling.cables.iter().position(|it| it == cable).unwrap_or(0);
    let ends = addresses(cabling)[index];
    let (address, bits) = ends[end];
    let facts = &cabling.nodes[cable.nodes[end]].1;
    let other = ends[1 - end].0;
    let own = command(facts, &cable.ports[end].interface, address, bits);
    format!("{own} (the other end: {other}; `shardpack cluster wire` has all)")
}

/// What each node is to run.
pub(super) fn plan(cabling: &Cabling) -> Vec<NodePlan> {
    let mut plans: Vec<NodePlan> = cabling
        .nodes
        .iter()
        .map(|(name, facts)| {
            let is_ours = |it: &&String| facts.ports.iter().any(|port| port.interface == **it);
            let bridged = facts.bridged.iter().filter(is_ours);
            let commands =
                bridged.map(|it| format!("sudo ifconfig bridge0 deletem {it}")).collect();
            NodePlan { name: name.clone(), commands, kept: Vec::new() }
        })
        .collect();
    for (number, (cable, ends)) in cabling.cables.iter().zip(addresses(cabling)).enumerate() {
        for (end, (address, bits)) in ends.into_iter().enumerate() {
            let (node, port) = (cable.nodes[end], &cable.ports[end]);
            let facts = &cabling.nodes[node].1;
            if is_right(cabling, cable) {
                plans[node].kept.push(format!("{} {address}/{bits}", port.interface));
                continue;
            }
            plans[node].commands.push(command(facts, &port.interface, address, bits));
            if facts.system == "macos" {
                let (mask, service) = ("255.255.255.252", format!("cable {}", number + 1));
                plans[node].commands.push(format!(
                    "# after a restart too: sudo networksetup -createnetworkservice \"{service}\" {} && sudo networksetup -setmanual \"{service}\" {address} {mask}",
                    port.interface
                ));
            }
        }
    }
    plans
}

/// The commands by node, and what is missing.
pub(super) fn shown(cabling: &Cabling, plans: &[NodePlan]) -> String {
    let mut lines = vec!["Nothing has been changed. Run these on each machine:".to_owned()];
    for NodePlan { name, commands, kept } in plans {
        lines.push(String::new());
        lines.push(format!("# {name}"));
        lines.extend(kept.iter().map(|kept| format!("# stays as it is: {kept}")));
        if commands.is_empty() {
            lines.push("# nothing to do".to_owned());
        }
        lines.extend(commands.iter().cloned());
    }
    for [a, b] in cabling.pairs().filter(|pair| cabling.between(*pair).next().is_none()) {
        let (a, b) = (cabling.name(a), cabling.name(b));
        lines.push(format!("\n# no cable was found between {a} and {b}"));
    }
    lines.join("\n")
}
