//! Known reasons why a cable carries no RDMA, each with what mends it. Sources: Apple's TN3205, and
//! reports of users of exo, MLX and llama.cpp.

use serde::Serialize;

use super::{
    facts::Facts,
    matrix::{Cable, Cabling, same_network},
};
use crate::commands::doctor::apple::thunderbolt::THUNDERBOLT_5;

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Cause {
    /// The node, by index.
    pub(super) node: Option<usize>,
    /// Its port's interface, if one port is concerned.
    pub(super) interface: Option<String>,
    /// The two nodes, if a pair is concerned.
    pub(super) pair: Option<[usize; 2]>,
    pub(super) problem: String,
    /// A command, or what is to be done by hand.
    pub(super) remedy: String,
}

impl Cause {
    /// Whether a cable suffers from it.
    pub(super) fn concerns_cable(&self, cable: &Cable) -> bool {
        if let Some(pair) = self.pair {
            return pair == cable.nodes;
        }
        cable.nodes.iter().zip(&cable.ports).any(|(node, port)| {
            self.node == Some(*node)
                && self.interface.as_ref().is_none_or(|interface| *interface == port.interface)
        })
    }
}

/// Macs whose Thunderbolt port next to Ethernet (en2) has no RDMA: Mac Studio of 2025.
const STUDIOS: [&str; 2] = ["Mac15,14", "Mac16,9"];

/// All that is known to be wrong, machines first.
pub(super) fn of(cabling: &Cabling) -> Vec<Cause> {
    let mut causes = Vec::new();
    for (node, (_, facts)) in cabling.nodes.iter().enumerate() {
        of_machine(node, facts, &mut causes);
    }
    builds(cabling, &mut causes);
    for cable in &cabling.cables {
        for end in 0..2 {
            of_port(cabling, cable, end, &mut causes);
        }
    }
    for pair in cabling.pairs() {
        crossed(cabling, pair, &mut causes);
    }
    incomplete(cabling, &mut causes);
    causes
}

fn of_machine(node: usize, facts: &Facts, causes: &mut Vec<Cause>) {
    let mut add = |problem: &str, remedy: &str| {
        let (problem, remedy) = (problem.to_owned(), remedy.to_owned());
        causes.push(Cause { node: Some(node), interface: None, pair: None, problem, remedy });
    };
    let has_device = facts.ports.iter().any(|port| port.device.is_some());
    if facts.system == "macos" {
        match facts.is_enabled {
            _ if facts.has_thunderbolt_5 == Some(false) => add(
                "it has no Thunderbolt 5 port, and RDMA needs one",
                "it is linked over the network; nothing mends it",
            ),
            None => add("this macOS has no rdma_ctl", "install macOS 26.2 or later"),
            Some(false) => add(
                "RDMA is off",
                "shut down, hold the power button, open Options, then Terminal: rdma_ctl enable",
            ),
            Some(true) if !has_device => add(
                "RDMA is on and there is no device",
                "a restart after rdma_ctl enable; Thunderbolt 4 ports have none",
            ),
            Some(true) => {}
        }
        if facts.ports.iter().any(|port| facts.bridged.contains(&port.interface)) {
            let out: Vec<String> = facts
                .bridged
                .iter()
                .map(|it| format!("sudo ifconfig bridge0 deletem {it}"))
                .collect();
            let all = format!(
                "{}; for good: sudo networksetup -setnetworkserviceenabled \"Thunderbolt Bridge\" off",
                out.join("; ")
            );
            add("bridge0 owns its Thunderbolt ports", &all);
        }
        if facts.sleeps == Some(true) {
            add(
                "it sleeps when nobody uses it, and a sleeping Mac is a lost rank",
                "sudo pmset -a sleep 0",
            );
        }
        if facts.has_firewall == Some(true) {
            add(
                "its firewall is on, and filters by program",
                "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $(which shardpack) --unblockapp $(which shardpack)",
            );
        }
    }
    for (index, port) in facts.ports.iter().enumerate() {
        for other in &facts.ports[index + 1..] {
            let shared = port
                .addresses
                .iter()
                .find(|near| other.addresses.iter().any(|far| same_network(**near, *far)));
            if let Some((address, bits)) = shared {
                let problem = format!(
                    "{} and {} are in one network ({address}/{bits}), so packets take either",
                    port.interface, other.interface
                );
                add(&problem, "give each cable a network of its own: shardpack cluster wire");
            }
        }
    }
}

fn builds(cabling: &Cabling, causes: &mut Vec<Cause>) {
    let macs = || cabling.nodes.iter().filter(|(_, facts)| facts.system == "macos");
    let mut builds: Vec<&str> = macs().map(|(_, facts)| facts.build.as_str()).collect();
    builds.sort_unstable();
    builds.dedup();
    if builds.len() > 1 {
        let of = |(name, facts): &(String, Facts)| format!("{name} {}", facts.build);
        let shown: Vec<String> = macs().map(of).collect();
        causes.push(Cause {
            node: None,
            interface: None,
            pair: None,
            problem: format!("builds of macOS differ: {}", shown.join(", ")),
            remedy: "bring all to the same one; RDMA between different ones was seen to fail"
                .to_owned(),
        });
    }
}

fn of_port(cabling: &Cabling, cable: &Cable, end: usize, causes: &mut Vec<Cause>) {
    let (node, port) = (cable.nodes[end], &cable.ports[end]);
    let (other, peer) = (cable.nodes[1 - end], &cable.ports[1 - end]);
    let facts = &cabling.nodes[node].1;
    let mut add = |problem: String, remedy: String| {
        let interface = Some(port.interface.clone());
        let cause = Cause { node: Some(node), interface, pair: None, problem, remedy };
        if !causes.contains(&cause) {
            causes.push(cause);
        }
    };
    if facts.system == "macos" && port.speed < Some(THUNDERBOLT_5) {
        if end == 0 || peer.speed >= Some(THUNDERBOLT_5) {
            let speed = port.speed.map_or("an unknown speed".to_owned(), |it| format!("{it} Gb/s"));
            add(
                format!("{} runs at {speed}, and RDMA needs {THUNDERBOLT_5}", port.shown()),
                "a Thunderbolt 5 cable between two Thunderbolt 5 ports".to_owned(),
            );
        }
        return;
    }
    if STUDIOS.contains(&facts.model.as_str()) && port.interface == "en2" {
        add(
            format!("{} is the port next to Ethernet, which has no RDMA on this Mac", port.shown()),
            "move the cable to another port".to_owned(),
        );
        return;
    }
    if port.device.is_none() {
        return;
    }
    let is_off = |node: usize| cabling.nodes[node].1.is_enabled == Some(false);
    if !port.is_active {
        if !is_off(node) && !is_off(other) {
            add(
                format!("the port of {} is down", port.device.as_deref().unwrap_or_default()),
                format!(
                    "enable RDMA at the other end too ({}), and reseat the cable",
                    cabling.name(other)
                ),
            );
        }
        return;
    }
    if port.addresses.is_empty() {
        add(
            format!("{} has no IPv4 address, so it has no GID that is used", port.interface),
            super::wire::command_for(cabling, cable, end),
        );
    } else if port.gids.is_empty() {
        let (address, bits) = port.addresses[0];
        add(
            format!("{} has the address {address} and no GID for it yet", port.interface),
            format!(
                "wait a minute, or set it again: {}",
                super::wire::command(facts, &port.interface, address, bits)
            ),
        );
    }
}

/// JACCL pairs the devices of two machines by their order.
fn crossed(cabling: &Cabling, pair: [usize; 2], causes: &mut Vec<Cause>) {
    let mut cables: Vec<&Cable> = cabling.between(pair).collect();
    cables.sort_by(|a, b| a.ports[0].interface.cmp(&b.ports[0].interface));
    if !cables.is_sorted_by(|a, b| a.ports[1].interface <= b.ports[1].interface) {
        let shown: Vec<String> = cables
            .iter()
            .map(|it| format!("{}–{}", it.ports[0].interface, it.ports[1].interface))
            .collect();
        causes.push(Cause {
            node: None,
            interface: None,
            pair: Some(pair),
            problem: format!("cables are crossed: {}", shown.join(", ")),
            remedy: "only JACCL needs them in order: swap two ends, or order the host file"
                .to_owned(),
        });
    }
}

/// Pairs without a cable, and what the collectives make of it.
fn incomplete(cabling: &Cabling, causes: &mut Vec<Cause>) {
    let missing: Vec<[usize; 2]> =
        cabling.pairs().filter(|pair| cabling.between(*pair).next().is_none()).collect();
    let count = cabling.nodes.len();
    let is_chain = count > 2 && (1..count).all(|b| cabling.between([b - 1, b]).next().is_some());
    for pair in missing {
        let remedy = if cabling.cables.is_empty() {
            "a Thunderbolt 5 cable between the two".to_owned()
        } else if is_chain {
            "a cable between the two; until then all-reduces go along the chain of neighbours"
                .to_owned()
        } else {
            "a cable between the two; until then this pair goes over the network".to_owned()
        };
        let problem =
            format!("no cable between {} and {}", cabling.name(pair[0]), cabling.name(pair[1]));
        causes.push(Cause { node: None, interface: None, pair: Some(pair), problem, remedy });
    }
}
