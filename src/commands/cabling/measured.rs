//! What a running server measured of the links between its ranks, when its group was formed.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde_json::Value;
use shardpack_engine_api::LinkReport;

use super::{facts::Facts, matrix::Cabling};
use crate::{commands::server_client::ServerClient, progress::size};

/// For the server to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A pair of nodes, by index, and its link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Measured {
    pub(super) nodes: [usize; 2],
    pub(super) link: LinkReport,
}

impl Measured {
    /// Between, over, latency, bandwidth, why not RDMA.
    pub(super) fn row(&self, cabling: &Cabling) -> Vec<String> {
        let [a, b] = self.nodes.map(|node| cabling.name(node).to_owned());
        let link = &self.link;
        let unknown = || "—".to_owned();
        vec![
            format!("{a} – {b}"),
            link.transport.name().to_owned(),
            link.latency_us.map_or_else(unknown, |latency| format!("{latency:.1} µs")),
            link.bytes_per_second.map_or_else(unknown, |bytes| format!("{}/s", size(bytes as u64))),
            link.declined.clone().unwrap_or_default(),
        ]
    }
}

/// Asks the server at `url`, whose nodes are among `nodes`.
pub(super) fn of_server(
    url: &str,
    key: Option<&Path>,
    nodes: &[(String, Facts)],
) -> anyhow::Result<Vec<Measured>> {
    let stats = ServerClient::at(url, key, TIMEOUT)?.stats()?;
    of_stats(&stats, nodes)
}

/// From what `/stats` answers.
pub(super) fn of_stats(stats: &Value, nodes: &[(String, Facts)]) -> anyhow::Result<Vec<Measured>> {
    let links: Vec<LinkReport> = serde_json::from_value(stats["links"].clone())
        .context("the server says nothing of its links; it may run an older version")?;
    // The index of each rank's node.
    let index = |rank: u32| {
        let name = stats["nodes"][rank as usize]["name"].as_str().unwrap_or_default();
        let name = name.strip_prefix("node ").unwrap_or(name);
        nodes.iter().position(|(node, _)| node == name)
    };
    let mut measured = Vec::new();
    for link in links {
        let (Some(a), Some(b)) = (index(link.ranks[0]), index(link.ranks[1])) else { continue };
        measured.push(Measured { nodes: [a, b], link });
    }
    if measured.is_empty() {
        bail!("the server at hand serves no two of these nodes");
    }
    Ok(measured)
}
