//! `shardpack cluster stats --network`: what a running server measured of its network.

use std::{fmt::Write as _, path::Path, process::ExitCode, time::Duration};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};
use shardpack_engine_api::{LinkReport, Transport};

use super::server::name;
use crate::{
    args::ClusterArgs,
    commands::{Outcome, server_client::ServerClient},
    progress::{printable, result, say, size, table},
};

/// For the server to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A rank whose own work takes this much longer than the mean holds the others up.
const SLOW_SHARE: f64 = 1.15;

/// What the network did.
#[derive(Debug, PartialEq, Serialize)]
struct Network {
    links: Vec<LinkReport>,
    ranks: Vec<RankNetwork>,
    /// Of rank 0, since it began: per token that was generated, prompts included.
    collectives_per_token: Option<f64>,
    bytes_per_token: Option<f64>,
    /// The longest own work of a rank by the mean of all; 1 where all work as long.
    imbalance: Option<f64>,
    /// Ranks that the others wait for.
    slow: Vec<u64>,
}

/// A rank.
#[derive(Debug, PartialEq, Serialize)]
struct RankNetwork {
    rank: u64,
    node: String,
    step_ms: Option<f64>,
    /// Of the step, in all-reduce: waiting for others included.
    allreduce_ms: Option<f64>,
    /// The rest of the step: the rank's own work.
    own_ms: Option<f64>,
    collectives_per_step: Option<f64>,
    bytes_per_step: Option<f64>,
}

/// Runs the command.
pub(super) fn run(args: &ClusterArgs, server: &str, key: Option<&Path>) -> Outcome {
    let stats = ServerClient::at(server, key, TIMEOUT)?.stats()?;
    let network = Network::of(&stats)?;
    if args.json {
        let mut json = json!({ "ok": true });
        json["network"] = json!(network);
        result(&json.to_string());
    } else {
        result(printable(&network.shown()).trim_end());
        network.hints().iter().for_each(|hint| say(hint));
    }
    Ok(ExitCode::SUCCESS)
}

impl Network {
    /// From what `/stats` answers.
    fn of(stats: &Value) -> anyhow::Result<Self> {
        let links: Vec<LinkReport> = serde_json::from_value(stats["links"].clone())
            .context("the server says nothing of its links; it may run an older version")?;
        let nodes = stats["nodes"].as_array().map_or(&[][..], Vec::as_slice);
        let ranks: Vec<RankNetwork> = nodes.iter().map(RankNetwork::of).collect();
        let rank0 = nodes.first().unwrap_or(&Value::Null);
        let per_token = |key: &str| ratio(rank0, key, "tokens");
        let own: Vec<f64> = ranks.iter().filter_map(|rank| rank.own_ms).collect();
        let mean = own.iter().sum::<f64>() / own.len().max(1) as f64;
        let is_comparable = own.len() > 1 && mean > 0.0;
        let longest = own.iter().copied().max_by(f64::total_cmp);
        let imbalance = longest.filter(|_| is_comparable).map(|longest| longest / mean);
        let slow = ranks
            .iter()
            .filter(|rank| is_comparable && rank.own_ms.is_some_and(|own| own > mean * SLOW_SHARE));
        let slow = slow.map(|rank| rank.rank).collect();
        Ok(Self {
            links,
            collectives_per_token: per_token("collectives"),
            bytes_per_token: per_token("collective_bytes"),
            imbalance,
            slow,
            ranks,
        })
    }

    fn shown(&self) -> String {
        let node = |rank: u32| {
            let found = self.ranks.iter().find(|it| it.rank == u64::from(rank));
            found.map_or_else(|| format!("rank {rank}"), |it| it.node.clone())
        };
        let header = ["between", "over", "latency", "bandwidth", "why not RDMA"];
        let mut links = vec![header.map(str::to_owned).to_vec()];
        for link in &self.links {
            let [a, b] = link.ranks.map(node);
            links.push(vec![
                format!("{a} – {b}"),
                link.transport.name().to_owned(),
                shown(link.latency_us, |us| format!("{us:.1} µs")),
                shown(link.bytes_per_second, |bytes| format!("{}/s", size(bytes as u64))),
                link.declined.clone().unwrap_or_default(),
            ]);
        }
        let header = ["rank", "node", "step", "all-reduce", "own work", "calls/step", "bytes/step"];
        let mut ranks = vec![header.map(str::to_owned).to_vec()];
        let ms = |ms: f64| format!("{ms:.2} ms");
        for rank in &self.ranks {
            ranks.push(vec![
                rank.rank.to_string(),
                rank.node.clone(),
                shown(rank.step_ms, ms),
                shown(rank.allreduce_ms, ms),
                shown(rank.own_ms, ms),
                shown(rank.collectives_per_step, |calls| format!("{calls:.1}")),
                shown(rank.bytes_per_step, |bytes| size(bytes as u64)),
            ]);
        }
        let mut text = String::new();
        if links.len() > 1 {
            text = table(&links) + "\n";
        }
        text += &table(&ranks);
        if let (Some(calls), Some(bytes)) = (self.collectives_per_token, self.bytes_per_token) {
            let bytes = size(bytes as u64);
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "\nper generated token, prompts included: {calls:.1} calls, {bytes}\n"
            );
        }
        text
    }

    /// What stands out.
    fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        for rank in &self.slow {
            hints.push(format!(
                "rank {rank} works longer than the others, which wait for it: see its load and \
                 temperature in `shardpack cluster status`, or convert with less of the model for it"
            ));
        }
        let slowest = |transport: Transport| {
            let links = self.links.iter().filter(move |link| link.transport == transport);
            links.filter_map(|link| Some((link.latency_us?, link.ranks)))
        };
        let rdma = slowest(Transport::Rdma).map(|(us, _)| us).max_by(f64::total_cmp);
        let others = slowest(Transport::Tls).chain(slowest(Transport::Tcp));
        let other = others.max_by(|a, b| a.0.total_cmp(&b.0));
        if let (Some(rdma), Some((us, [a, b]))) = (rdma, other)
            && us > rdma
        {
            hints.push(format!(
                "ranks {a} and {b} are not linked by RDMA ({us:.1} µs, others {rdma:.1} µs): see \
                 `shardpack cluster doctor`"
            ));
        }
        if self.ranks.iter().all(|rank| rank.step_ms.is_none()) {
            hints.push("no rank has made a step yet: ask the server something first".to_owned());
        }
        hints
    }
}

impl RankNetwork {
    fn of(node: &Value) -> Self {
        let (step_ms, allreduce_ms) = (node["step_ms"].as_f64(), node["allreduce_ms"].as_f64());
        let own_ms = step_ms.map(|step| (step - allreduce_ms.unwrap_or(0.0)).max(0.0));
        Self {
            rank: node["rank"].as_u64().unwrap_or_default(),
            node: name(node).to_owned(),
            step_ms,
            allreduce_ms,
            own_ms,
            collectives_per_step: ratio(node, "collectives", "steps"),
            bytes_per_step: ratio(node, "collective_bytes", "steps"),
        }
    }
}

/// One counter by another.
fn ratio(node: &Value, of: &str, by: &str) -> Option<f64> {
    let by = node[by].as_f64().filter(|by| *by > 0.0)?;
    Some(node[of].as_f64()? / by)
}

fn shown(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "—".to_owned(), show)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(rank: u64, step: f64, allreduce: f64) -> Value {
        json!({
            "rank": rank, "name": format!("node n{rank}"), "step_ms": step,
            "allreduce_ms": allreduce, "steps": 100, "collectives": 2000,
            "collective_bytes": 400_000, "tokens": 50,
        })
    }

    #[test]
    fn the_rank_that_the_others_wait_for_is_named() {
        let nodes = [node(0, 10.0, 4.0), node(1, 10.0, 4.0), node(2, 10.0, 1.0)];
        let link = |a, b, transport: &str, us| json!({ "ranks": [a, b], "transport": transport, "latency_us": us, "bytes_per_second": 1e9 });
        let links = [link(0, 1, "rdma", 9.0), link(0, 2, "tls", 60.0), link(1, 2, "rdma", 8.0)];
        let found = Network::of(&json!({ "nodes": nodes, "links": links })).unwrap();
        assert_eq!((found.slow.as_slice(), found.imbalance), (&[2][..], Some(9.0 / 7.0)));
        assert_eq!((found.collectives_per_token, found.bytes_per_token), (Some(40.0), Some(8e3)));
        assert_eq!(found.ranks[1].collectives_per_step, Some(20.0));
        let hints = found.hints();
        assert!(hints[0].starts_with("rank 2 works longer"), "{hints:?}");
        assert!(hints[1].starts_with("ranks 0 and 2 are not linked by RDMA (60.0 µs"), "{hints:?}");
        let text = found.shown();
        assert!(text.contains("n0 – n2  tls   60.0 µs"), "{text}");
        assert!(text.contains("40.0 calls, 7.81 KiB"), "{text}");
    }

    #[test]
    fn a_server_that_has_done_nothing_says_so() {
        let nodes = [json!({ "rank": 0, "name": "rank 0" })];
        let found = Network::of(&json!({ "nodes": nodes, "links": [] })).unwrap();
        assert_eq!((found.imbalance, found.slow.len()), (None, 0));
        assert_eq!(found.hints().len(), 1);
        assert!(Network::of(&json!({ "nodes": [] })).is_err());
    }
}
