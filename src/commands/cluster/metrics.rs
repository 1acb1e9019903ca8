//! `shardpack cluster metrics`: one text for Prometheus of all nodes and a server over them.

mod exposition;

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{
    ask::{State, Target, states, targets},
    server::name,
};
use crate::{
    args::{ClusterArgs, ServerChoice},
    commands::{Outcome, server_client::ServerClient},
    progress::{result, say},
};
use exposition::Exposition;

/// Runs the command. What is not reached is in the metrics, and no error.
pub(super) fn run(args: &ClusterArgs, nodes: &[String], choice: &ServerChoice) -> Outcome {
    let targets = if nodes.is_empty() && choice.server.is_some() {
        // A server alone needs no cluster.
        targets(args, nodes).unwrap_or_default()
    } else {
        targets(args, nodes)?
    };
    let mut text = Exposition::default();
    for (target, state) in targets.iter().zip(states(&targets)) {
        add_node(&mut text, target, state);
    }
    if let Some(url) = &choice.server {
        let front = ServerClient::at(url, choice.key.as_deref(), super::ask::glance())?;
        add_front(&mut text, &front);
    }
    let text = text.text();
    if args.json {
        result(&json!({ "ok": true, "metrics": text }).to_string());
    } else {
        result(text.trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

fn add_node(text: &mut Exposition, target: &Target, state: Result<State, String>) {
    let node = [("node", target.name.as_str())];
    let is_up = f64::from(u8::from(state.is_ok()));
    text.gauge("shardpack_node_up", "1 if the node answered", &node, Some(is_up));
    if let Some(member) = &target.member {
        let help = "End of the node's certificate, in seconds since 1970";
        let expires = Some(member.expires as f64);
        text.gauge("shardpack_node_certificate_expiry_seconds", help, &node, expires);
    }
    let state = match state {
        Ok(state) => state,
        Err(problem) => return say(&format!("{}: not reached: {problem}", target.name)),
    };
    let stored = state.listing["stored_bytes"].as_u64();
    let Some(facts) = &state.facts else { return };
    let (machine, bytes) = (&facts.machine, |bytes: Option<u64>| bytes.map(|bytes| bytes as f64));
    let info = [node[0], ("version", facts.version.as_str()), ("build", facts.build.as_str())];
    text.gauge("shardpack_node_info", "Version and build of the node's program", &info, Some(1.0));
    let fault = facts.last_fault.as_ref().map(|fault| fault.time_ms() as f64 / 1000.0);
    let clock = state.clock_ahead_ms.map(|ms| ms as f64 / 1000.0);
    let gauges = [
        ("uptime_seconds", "Seconds since the node started", Some(facts.uptime_seconds as f64)),
        ("stored_bytes", "Bytes of the packages in the store", bytes(stored)),
        ("disk_free_bytes", "Free bytes of the store's file system", bytes(facts.disk_free_bytes)),
        ("disk_bytes", "Bytes of the store's file system", bytes(facts.disk_total_bytes)),
        ("memory_bytes", "Memory of the machine", bytes(machine.memory_total_bytes)),
        (
            "memory_available_bytes",
            "Memory that programs could still take",
            bytes(machine.memory_available_bytes),
        ),
        ("cores", "Processor cores that can be used", Some(machine.cores as f64)),
        ("load1", "Load average over a minute", machine.load.map(|[one, ..]| one)),
        ("power_watts", "Power that the machine draws", machine.power_watts),
        ("temperature_celsius", "Hottest processor of the machine", machine.temperature_celsius),
        ("clock_ahead_seconds", "How far the node's clock is ahead of the controller's", clock),
        ("ranks", "Ranks that run on the node", Some(facts.ranks.len() as f64)),
        ("last_fault_seconds", "When the last fault was, in seconds since 1970", fault),
    ];
    for (name, help, value) in gauges {
        text.gauge(&format!("shardpack_node_{name}"), help, &node, value);
    }
    for rank in &facts.ranks {
        let number = rank.package.rank.to_string();
        let layout = rank.package.layout.short();
        let labels = [node[0], ("rank", number.as_str()), ("layout", layout.as_str())];
        let since = Some(rank.since_ms as f64 / 1000.0);
        let (memory, name) = (bytes(rank.memory_bytes), "shardpack_node_rank_memory_bytes");
        text.gauge(name, "Memory of a rank's process", &labels, memory);
        let help = "When a rank's process was started, in seconds since 1970";
        text.gauge("shardpack_node_rank_start_seconds", help, &labels, since);
    }
}

/// The server's own metrics, each with the node that it is of.
fn add_front(text: &mut Exposition, front: &ServerClient) {
    let own = [("node", front.host())];
    let metrics = match front.metrics() {
        Ok(metrics) => metrics,
        Err(error) => {
            say(&format!("{error:#}"));
            return text.gauge("shardpack_front_up", UP, &own, Some(0.0));
        }
    };
    text.gauge("shardpack_front_up", UP, &own, Some(1.0));
    // Another key may be allowed to read metrics and not this; then ranks have no names.
    let stats = front.stats().unwrap_or(Value::Null);
    let names: Vec<String> =
        stats["nodes"].as_array().into_iter().flatten().map(|node| name(node).to_owned()).collect();
    text.add(&metrics, |rank| {
        let rank = rank.and_then(|rank| rank.parse::<usize>().ok());
        rank.and_then(|rank| names.get(rank)).map_or(front.host(), String::as_str)
    });
}

const UP: &str = "1 if the server answered";
