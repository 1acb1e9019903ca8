//! `shardpack cluster health`: one line and an exit code.

use std::{
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::anyhow;
use serde_json::json;

use super::{
    ask::{State, Target, states, targets},
    server::{self, ServerState},
    status::clock,
};
use crate::{
    args::{ClusterArgs, ServerChoice},
    commands::Outcome,
    failure::Failure,
    progress::{printable, result, size},
};

/// Share of a disk below which its free space is worth a word: pushes need room beside what is served.
const FREE_SHARE: u64 = 20;

/// Free space that is enough on any disk.
const ENOUGH_BYTES: u64 = 100 << 30;

/// Before the end of a certificate, when somebody should look why it was not renewed.
const EXPIRY_SECONDS: u64 = 14 * 24 * 60 * 60;

/// How a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Grade {
    Well,
    Degraded,
    Down,
}

impl Grade {
    const fn name(self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::Degraded => "degraded",
            Self::Down => "down",
        }
    }

    const fn exit_code(self) -> u8 {
        match self {
            Self::Well => 0,
            Self::Degraded => 1,
            Self::Down => 2,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &ClusterArgs, nodes: &[String], front: &ServerChoice) -> Outcome {
    let targets = targets(args, nodes)?;
    if targets.is_empty() && front.server.is_none() {
        return Err(Failure::from(anyhow!("the cluster has no members yet"))
            .hint("add one with `shardpack cluster add`, or give a server with --server"));
    }
    let asked = server::ask_beside(front)?;
    let states = states(&targets);
    let server = asked.map(server::Asked::answer);
    let (grade, reasons) = judge(&targets, &states, server.as_ref());
    if args.json {
        let reached = states.iter().filter(|state| state.is_ok()).count();
        let json = json!({
            "ok": grade == Grade::Well,
            "health": grade.name(),
            "exit_code": grade.exit_code(),
            "nodes": targets.len(),
            "reached": reached,
            "server": server.as_ref().map(ServerState::state),
            "reasons": reasons,
        });
        result(&json.to_string());
    } else {
        result(&printable(&line(grade, &reasons, targets.len(), server.as_ref())));
    }
    Ok(ExitCode::from(grade.exit_code()))
}

/// The one line.
fn line(grade: Grade, reasons: &[String], nodes: usize, server: Option<&ServerState>) -> String {
    let server = server.map(|server| format!(", server {}", server.state())).unwrap_or_default();
    let reasons = reasons.join("; ").replace('\n', " ");
    let reasons = if reasons.is_empty() { reasons } else { format!(": {reasons}") };
    format!("{} ({nodes} nodes{server}){reasons}", grade.name())
}

/// The worst that was found, and all that was.
fn judge(
    targets: &[Target],
    states: &[Result<State, String>],
    server: Option<&ServerState>,
) -> (Grade, Vec<String>) {
    let mut found: Vec<(Grade, String)> = Vec::new();
    if let Some(server) = server {
        let grade = match server.state() {
            "ready" => Grade::Well,
            // Requests are taken and wait.
            "recovering" => Grade::Degraded,
            _ => Grade::Down,
        };
        if grade > Grade::Well {
            let reason = server.reason().map(|reason| format!(": {reason}")).unwrap_or_default();
            found.push((grade, format!("server {}{reason}", server.state())));
        }
    }
    let none_reached = !states.is_empty() && states.iter().all(Result::is_err);
    for (target, state) in targets.iter().zip(states) {
        let name = &target.name;
        match state {
            Err(reason) => {
                let grade = if none_reached { Grade::Down } else { Grade::Degraded };
                found.push((grade, format!("{name}: not reached: {reason}")));
            }
            Ok(state) => {
                let worries = worries(target, state).into_iter();
                found.extend(worries.map(|text| (Grade::Degraded, format!("{name}: {text}"))));
            }
        }
    }
    let grade = found.iter().map(|(grade, _)| *grade).max().unwrap_or(Grade::Well);
    (grade, found.into_iter().map(|(_, text)| text).collect())
}

/// What is not well on a node that answers.
fn worries(target: &Target, state: &State) -> Vec<String> {
    let mut worries: Vec<String> = state.problem().map(str::to_owned).into_iter().collect();
    if let Some(member) = &target.member {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        if member.expires < now + EXPIRY_SECONDS {
            let days = member.expires.saturating_sub(now) / (24 * 60 * 60);
            worries.push(format!(
                "its certificate ends in {days} days; run `shardpack cluster renew {}`",
                target.name
            ));
        }
    }
    worries.extend(clock(state.clock_ahead_ms));
    let Some(facts) = &state.facts else { return worries };
    if let (Some(free), Some(total)) = (facts.disk_free_bytes, facts.disk_total_bytes)
        && free < (total / FREE_SHARE).min(ENOUGH_BYTES)
    {
        worries.push(format!(
            "{} of {} left on its disk; see `shardpack cluster gc --dry-run`",
            size(free),
            size(total)
        ));
    }
    worries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::node_facts::NodeFacts;
    use serde_json::Value;
    use shardpack_identity::Endpoint;

    fn target(name: &str) -> Target {
        let endpoint = Endpoint::plain("127.0.0.1:1");
        Target { name: name.to_owned(), endpoint, member: None }
    }

    fn state(free: u64, clock_ahead_ms: i64, listing: Value) -> State {
        let facts = NodeFacts {
            disk_free_bytes: Some(free),
            disk_total_bytes: Some(1000 << 30),
            ..NodeFacts::default()
        };
        let clock_ahead_ms = Some(clock_ahead_ms);
        State { program: "shardpack".to_owned(), facts: Some(facts), clock_ahead_ms, listing }
    }

    fn server(state: &str) -> ServerState {
        let health = Ok(json!({ "state": state, "reason": null }));
        ServerState { url: "http://a".to_owned(), health, stats: Ok(Value::Null) }
    }

    #[test]
    fn the_worst_that_is_found_is_the_exit_code() {
        let targets = [target("a"), target("b")];
        let well = || Ok(state(500 << 30, 10, Value::Null));
        let lost = || Err("gone".to_owned());
        let check = |states: [Result<State, String>; 2], server: Option<ServerState>| {
            judge(&targets, &states, server.as_ref())
        };
        assert_eq!(check([well(), well()], None), (Grade::Well, Vec::new()));
        assert_eq!(check([well(), well()], Some(server("ready"))).0, Grade::Well);
        assert_eq!(check([well(), well()], Some(server("recovering"))).0, Grade::Degraded);
        for state in ["starting", "failed", "draining"] {
            assert_eq!(check([well(), well()], Some(server(state))).0, Grade::Down, "{state}");
        }
        let (grade, reasons) = check([well(), lost()], None);
        assert_eq!((grade, reasons), (Grade::Degraded, vec!["b: not reached: gone".to_owned()]));
        assert_eq!(check([lost(), lost()], None).0, Grade::Down);
        // The server answers without them, or another one's nodes were asked.
        assert_eq!(check([lost(), lost()], Some(server("ready"))).0, Grade::Down);
        let full = check([Ok(state(5 << 30, 0, Value::Null)), well()], None);
        assert_eq!(full.0, Grade::Degraded);
        assert!(full.1[0].starts_with("a: 5.00 GiB of 1000.00 GiB left"), "{full:?}");
        let late = check([Ok(state(500 << 30, -5000, Value::Null)), well()], None);
        assert!(late.1[0].starts_with("a: its clock is 5.0 s behind"), "{late:?}");
        let broken = json!({ "problem": "active.json is damaged" });
        let broken = check([Ok(state(500 << 30, 0, broken)), well()], None);
        assert_eq!(broken, (Grade::Degraded, vec!["a: active.json is damaged".to_owned()]));
    }
}
