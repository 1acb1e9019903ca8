//! Which cables join which machines, as a table.

use serde::Serialize;

use super::{
    causes::Cause,
    facts::{Facts, Port},
    measured::Measured,
};
use crate::progress::table;

/// A cable: two nodes by index, the lower first, and a port of each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Cable {
    pub(super) nodes: [usize; 2],
    pub(super) ports: [Port; 2],
}

/// All machines and the cables between them.
pub(super) struct Cabling {
    pub(super) nodes: Vec<(String, Facts)>,
    pub(super) cables: Vec<Cable>,
    /// What a running server measured of pairs.
    pub(super) measured: Vec<Measured>,
}

impl Cabling {
    /// A Mac names the domain at the other end of each cable. Elsewhere two ports are on one cable if
    /// their addresses are of one network, which is of no other port.
    pub(super) fn of(nodes: Vec<(String, Facts)>) -> Self {
        let mut cables = Vec::new();
        for (a, (_, low)) in nodes.iter().enumerate() {
            for (b, (_, high)) in nodes.iter().enumerate().skip(a + 1) {
                for near in &low.ports {
                    for far in high.ports.iter().filter(|far| are_joined(near, far)) {
                        let ports = [near.clone(), far.clone()];
                        cables.push(Cable { nodes: [a, b], ports });
                    }
                }
            }
        }
        Self { nodes, cables, measured: Vec::new() }
    }

    /// The cables between two nodes.
    pub(super) fn between(&self, nodes: [usize; 2]) -> impl Iterator<Item = &Cable> {
        self.cables.iter().filter(move |cable| cable.nodes == nodes)
    }

    /// All pairs of nodes.
    pub(super) fn pairs(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let count = self.nodes.len();
        (0..count).flat_map(move |a| (a + 1..count).map(move |b| [a, b]))
    }

    pub(super) fn name(&self, node: usize) -> &str {
        &self.nodes[node].0
    }

    /// The table of pairs, and the causes with what mends them.
    pub(super) fn shown(&self, causes: &[Cause]) -> String {
        let titles = ["between", "from", "to", "Gb/s", "addresses", "RDMA"];
        let mut rows = vec![titles.map(str::to_owned).to_vec()];
        let numbers = |is_of: &dyn Fn(&Cause) -> bool| {
            let found = causes.iter().enumerate().filter(|(_, cause)| is_of(cause));
            let found: Vec<String> = found.map(|(index, _)| format!("[{}]", index + 1)).collect();
            found.join(" ")
        };
        for pair @ [a, b] in self.pairs() {
            let title = format!("{} – {}", self.name(a), self.name(b));
            let mut count = 0;
            for cable in self.between(pair) {
                count += 1;
                let speed = cable.ports.iter().filter_map(|port| port.speed).min();
                let address = |port: &Port| {
                    port.addresses
                        .first()
                        .map_or("—".to_owned(), |(it, bits)| format!("{it}/{bits}"))
                };
                let [near, far] = &cable.ports;
                let is_usable = cable.ports.iter().all(|port| port.usable().is_some());
                let own = numbers(&|cause| cause.concerns_cable(cable));
                let state = if is_usable { "yes" } else { "no" };
                rows.push(vec![
                    title.clone(),
                    near.shown(),
                    far.shown(),
                    speed.map_or("—".to_owned(), |speed| speed.to_string()),
                    format!("{} – {}", address(near), address(far)),
                    format!("{state} {own}").trim_end().to_owned(),
                ]);
            }
            if count == 0 {
                let own = numbers(&|cause| cause.pair == Some(pair));
                let state = format!("no cable {own}").trim_end().to_owned();
                let none = || "—".to_owned();
                rows.push(vec![title, none(), none(), none(), none(), state]);
            }
        }
        let mut text = table(&rows);
        if !self.measured.is_empty() {
            text += "\n";
            let titles = ["measured between", "over", "one way", "bandwidth", ""];
            let mut rows = vec![titles.map(str::to_owned).to_vec()];
            rows.extend(self.measured.iter().map(|measured| measured.row(self)));
            text += &table(&rows);
        }
        for (index, cause) in causes.iter().enumerate() {
            let Cause { node, problem, remedy, .. } = cause;
            let node = node.map_or_else(String::new, |node| format!("{}: ", self.name(node)));
            text += "\n";
            text +=
                &["[", &(index + 1).to_string(), "] ", &node, problem, "\n    ", remedy].concat();
        }
        text
    }
}

fn are_joined(near: &Port, far: &Port) -> bool {
    match (&near.peer_domain, &far.domain) {
        (Some(theirs), Some(own)) => theirs == own,
        _ => {
            near.domain.is_none()
                && far.domain.is_none()
                && near.addresses.iter().any(|near| {
                    far.addresses.iter().any(|far| near.0 != far.0 && same_network(*near, *far))
                })
        }
    }
}

/// Whether two addresses are of one network.
pub(super) fn same_network(a: super::parse::Address, b: super::parse::Address) -> bool {
    a.1 == b.1 && super::wire::network(a) == super::wire::network(b)
}
