//! `shardpack cluster status`: every node at a glance, and a server over them.

use std::{
    io::{IsTerminal as _, stdout},
    process::ExitCode,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_cluster::FrontState;
use shardpack_identity::date;
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::push::finish_activations;

use super::{
    ask::{State, Target, states, targets},
    server::{self, ServerState},
    tell_finished,
};
use crate::{
    args::{ClusterArgs, ServerChoice},
    commands::{
        Outcome,
        node_facts::{MachineFacts, NodeFacts, RankFacts},
    },
    progress::{is_unread, printable, result, say, size, table},
};

/// A clock that differs by more is told: times in logs mislead, and certificates may not hold.
pub(super) const CLOCK_TOLERANCE_MS: i64 = 1000;

/// Name that nodes report for a model without a name.
const UNNAMED: &str = "default";

/// How a model without a name is shown.
const NO_NAME: &str = "(no name)";

/// Clears a terminal and goes to its upper left corner.
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

/// Runs the command.
pub(super) fn run(
    args: &ClusterArgs,
    nodes: &[String],
    watch: Option<u64>,
    front: &ServerChoice,
) -> Outcome {
    loop {
        let targets = targets(args, nodes)?;
        let asked = server::ask_beside(front)?;
        let mut states = states(&targets);
        if finish(&targets, &states) {
            states = self::states(&targets);
        }
        let server = asked.map(server::Asked::answer);
        let well = states.iter().all(|state| state.as_ref().is_ok_and(|it| it.problem().is_none()))
            && server.as_ref().is_none_or(ServerState::is_well);
        let text = if args.json {
            as_json(args, &targets, &states, server.as_ref(), well)?.to_string()
        } else {
            shown(&targets, &states, server.as_ref())
        };
        let Some(seconds) = watch else {
            result(text.trim_end());
            hints(&targets, &states);
            return Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(1) });
        };
        let clear = if stdout().is_terminal() && !args.json { CLEAR } else { "" };
        result(&format!("{clear}{}", text.trim_end()));
        if !args.json {
            hints(&targets, &states);
        }
        if is_unread() {
            return Ok(ExitCode::SUCCESS);
        }
        thread::sleep(Duration::from_secs(seconds));
    }
}

/// Finishes activations that were interrupted, among the nodes that were reached, where some node waits
/// for it; whether it did.
fn finish(targets: &[Target], states: &[Result<State, String>]) -> bool {
    let is_pending = |state: &State| !pending(state).is_empty();
    if !states.iter().flatten().any(is_pending) {
        return false;
    }
    let reached = targets.iter().zip(states).filter(|(_, state)| state.is_ok());
    let nodes: Vec<_> = reached.map(|(target, _)| target.endpoint.clone()).collect();
    let finished = finish_activations(&nodes, Timeouts::default());
    tell_finished(&finished);
    !finished.is_empty()
}

fn pending(state: &State) -> &[Value] {
    state.listing["pending"].as_array().map_or(&[], Vec::as_slice)
}

/// What `--json` prints.
fn as_json(
    args: &ClusterArgs,
    targets: &[Target],
    states: &[Result<State, String>],
    server: Option<&ServerState>,
    well: bool,
) -> anyhow::Result<Value> {
    let members = targets.iter().zip(states).map(|(target, state)| {
        let mut json = target.json();
        json["reachable"] = state.is_ok().into();
        match state {
            Ok(State { program, facts, clock_ahead_ms, listing }) => {
                json["program"] = program.as_str().into();
                for key in ["packages", "active", "pending", "stored_bytes", "free_bytes"] {
                    json[key] = listing[key].clone();
                }
                json["facts"] = serde_json::to_value(facts)?;
                json["clock_ahead_ms"] = json!(clock_ahead_ms);
                if !listing["problem"].is_null() {
                    json["problem"] = listing["problem"].clone();
                }
            }
            Err(problem) => json["problem"] = problem.as_str().into(),
        }
        Ok(json)
    });
    let members: Vec<Value> = members.collect::<anyhow::Result<_>>()?;
    let home = crate::cluster::open(&args.cluster).ok();
    let mut json = json!({ "ok": well, "members": members });
    if let Some(home) = home {
        json["cluster"] = home.cluster().into();
    }
    if let Some(server) = server {
        json["server"] = server.json();
    }
    Ok(json)
}

/// The tables.
fn shown(
    targets: &[Target],
    states: &[Result<State, String>],
    server: Option<&ServerState>,
) -> String {
    if targets.is_empty() {
        return "the cluster has no members yet".to_owned();
    }
    let header = ["node", "address", "program", "package", "stored", "free", "member until"];
    let mut nodes = vec![header.map(str::to_owned).to_vec()];
    let header = ["node", "up", "memory free", "load", "power", "temperature", "build", "ranks"];
    let mut machines = vec![header.map(str::to_owned).to_vec()];
    let header = ["node", "rank", "package", "process", "memory", "server", "for"];
    let mut ranks = vec![header.map(str::to_owned).to_vec()];
    for (target, state) in targets.iter().zip(states) {
        nodes.push(node_row(target, state));
        let Ok(state) = state else { continue };
        let Some(facts) = &state.facts else { continue };
        machines.push(machine_row(target, facts));
        for rank in &facts.ranks {
            ranks.push(rank_row(target, state, facts, rank));
        }
    }
    let mut text = table(&nodes);
    for more in [machines, ranks] {
        if more.len() > 1 {
            text.push('\n');
            text.push_str(&table(&more));
        }
    }
    if let Some(server) = server {
        text.push('\n');
        text.push_str(&server.shown());
    }
    printable(&text)
}

fn node_row(target: &Target, state: &Result<State, String>) -> Vec<String> {
    let (program, active, listing) = match state {
        Ok(State { program, listing, .. }) => (program.clone(), active(listing), listing),
        Err(_) => ("not reached".to_owned(), String::new(), &Value::Null),
    };
    // Nodes of earlier versions do not tell.
    let bytes = |name: &str| listing[name].as_u64().map(size).unwrap_or_default();
    let until = target.member.as_ref().map(|member| date(member.expires)).unwrap_or_default();
    let address = target.endpoint.address().to_owned();
    let (stored, free) = (bytes("stored_bytes"), bytes("free_bytes"));
    vec![target.name.clone(), address, program, active, stored, free, until]
}

fn machine_row(target: &Target, facts: &NodeFacts) -> Vec<String> {
    let MachineFacts { cores, load, power_watts, temperature_celsius, .. } = &facts.machine;
    let MachineFacts { memory_total_bytes, memory_available_bytes, .. } = &facts.machine;
    let unknown = || "—".to_owned();
    let memory = match (memory_available_bytes, memory_total_bytes) {
        (Some(available), Some(total)) => format!("{} of {}", size(*available), size(*total)),
        _ => unknown(),
    };
    let load = load.map_or_else(unknown, |[load, ..]| format!("{load:.1} of {cores}"));
    let power = power_watts.map_or_else(unknown, |watts| format!("{watts:.0} W"));
    let degrees = temperature_celsius.map_or_else(unknown, |degrees| format!("{degrees:.0} °C"));
    let build: String = facts.build.chars().take(8).collect();
    let (up, ranks) = (duration(facts.uptime_seconds), facts.ranks.len().to_string());
    vec![target.name.clone(), up, memory, load, power, degrees, build, ranks]
}

fn rank_row(target: &Target, state: &State, facts: &NodeFacts, rank: &RankFacts) -> Vec<String> {
    let layout = rank.package.layout.short();
    let model = model_of(&state.listing, rank);
    let package = model.map_or_else(|| format!("layout {layout}"), str::to_owned);
    let by = rank.served_by.as_deref().unwrap_or("unknown");
    let server = match rank.front {
        FrontState::Present => by.to_owned(),
        FrontState::Awaited => format!("awaits {by}"),
        FrontState::Gone => "gone; the weights are kept for the next one".to_owned(),
    };
    let memory = rank.memory_bytes.map_or_else(|| "—".to_owned(), size);
    let since = duration(facts.clock_ms.saturating_sub(rank.since_ms) / 1000);
    let number = rank.package.rank.to_string();
    vec![target.name.clone(), number, package, rank.pid.to_string(), memory, server, since]
}

/// The model whose current release has the rank's package.
fn model_of<'a>(listing: &'a Value, rank: &RankFacts) -> Option<&'a str> {
    let (layout, number) = (json!(rank.package.layout), json!(rank.package.rank));
    let is_current =
        |entry: &Value| entry["current"]["layout"] == layout && entry["current"]["rank"] == number;
    let models = listing["active"].as_object()?;
    let (name, _) = models.iter().find(|(_, entry)| is_current(entry))?;
    Some(if name == UNNAMED { NO_NAME } else { name })
}

/// Lines for people beside the tables.
fn hints(targets: &[Target], states: &[Result<State, String>]) {
    let listings = states.iter().flatten().map(|state| &state.listing);
    let mut models = listings.filter_map(|listing| listing["active"].as_object());
    if models.any(|models| models.contains_key(UNNAMED)) {
        say(&format!("{NO_NAME}: set a name with convert --name"));
    }
    for (Target { name, .. }, state) in targets.iter().zip(states) {
        let state = match state {
            Ok(state) => state,
            Err(problem) => {
                say(&format!("{name}: not reached: {problem}"));
                continue;
            }
        };
        if let Some(problem) = state.problem() {
            say(&format!("{name}: {problem}"));
        }
        for release in pending(state) {
            say(&format!(
                "{name}: release {} of {} is pending: push its set again to finish it, or another one",
                release["release"], release["model"]
            ));
        }
        let Some(facts) = &state.facts else {
            say(&format!("{name}: {} is older than this question: upgrade it", state.program));
            continue;
        };
        if let Some(fault) = &facts.last_fault {
            let ago = duration(facts.clock_ms.saturating_sub(fault.time_ms()) / 1000);
            say(&format!("{name}: last fault {ago} ago: {}", fault.text));
        }
        if let Some(line) = clock(state.clock_ahead_ms) {
            say(&format!("{name}: {line}"));
        }
    }
    if targets.is_empty() {
        say("hint: see `shardpack cluster --help` for how to add a node");
    }
}

/// A sentence about a clock that differs.
pub(super) fn clock(ahead_ms: Option<i64>) -> Option<String> {
    let ahead = ahead_ms.filter(|ahead| ahead.abs() > CLOCK_TOLERANCE_MS)?;
    let which = if ahead > 0 { "ahead of" } else { "behind" };
    let seconds = ahead.unsigned_abs() as f64 / 1000.0;
    Some(format!("its clock is {seconds:.1} s {which} this machine's; set the time by NTP on both"))
}

/// A duration in its two largest units.
pub(super) fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// The active packages as one line.
fn active(listing: &Value) -> String {
    let models = listing["active"].as_object().into_iter().flatten();
    let word = |(model, entry): (&String, &Value)| {
        let layout: String =
            entry["current"]["layout"].as_str().unwrap_or("?").chars().take(12).collect();
        let model = if model == UNNAMED { NO_NAME } else { model };
        // Nodes of earlier versions number no releases.
        let release = entry["release"].as_u64().map(|number| format!(" (release {number})"));
        let release = release.unwrap_or_default();
        format!("{model}: rank {} of layout {layout}{release}", entry["current"]["rank"])
    };
    let words = models.map(word).collect::<Vec<_>>();
    if words.is_empty() { "none yet".to_owned() } else { words.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_their_two_largest_units() {
        let cases = [(7, "7 s"), (61, "1 min 1 s"), (7_260, "2 h 1 min"), (90_000, "1 d 1 h")];
        for (seconds, shown) in cases {
            assert_eq!(duration(seconds), shown);
        }
    }

    #[test]
    fn current_packages_are_told_by_name_and_rank() {
        let layout = "0123456789abcdef";
        let entry = |rank| json!({"current": {"layout": layout, "rank": rank}, "previous": null});
        assert_eq!(active(&json!({"active": {}})), "none yet");
        let listing = json!({"active": {"default": entry(0), "tiny": entry(1)}});
        assert_eq!(
            active(&listing),
            "(no name): rank 0 of layout 0123456789ab; tiny: rank 1 of layout 0123456789ab"
        );
    }
}
