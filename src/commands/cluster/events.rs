//! `shardpack cluster events`: the logs of all nodes and servers, by time.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};

use super::{
    ask::{self, Target, operate, targets},
    status::{CLOCK_TOLERANCE_MS, clock, duration},
};
use crate::{
    args::{Ago, ClusterArgs},
    cluster,
    commands::{
        Outcome,
        events::{self, EVENTS, Event, EventKind, EventsAnswer, EventsRequest, time},
    },
    failure::Failure,
    progress::{printable, result, say, table},
};

/// How long nodes have; a log has up to eight megabytes on a disk that may sleep.
const DEADLINE: Duration = Duration::from_secs(5);

/// What servers are called among the nodes.
const SERVER: &str = "server";

/// A log, with how far its clock is ahead of this machine's.
struct Log {
    node: String,
    answer: EventsAnswer,
    ahead_ms: i64,
}

/// An event of a log.
struct Told<'a> {
    node: &'a str,
    event: &'a Event,
    /// By this machine's clock, in milliseconds since 1970.
    at_ms: i64,
}

/// Runs the command.
pub(super) fn run(args: &ClusterArgs, nodes: &[String], since: Ago, kinds: &[String]) -> Outcome {
    check(kinds)?;
    let targets = targets(args, nodes)?;
    let ago = u64::try_from(since.0.as_millis()).unwrap_or(u64::MAX);
    let since_ms = time::now_ms().saturating_sub(ago);
    let request = EventsRequest { since_ms, kinds: kinds.to_vec() };
    let (mut logs, unread) = of_nodes(&targets, &request);
    if let Ok(folder) = cluster::folder(&args.cluster) {
        let answer = events::answer(&folder, &request);
        logs.push(Log { node: SERVER.to_owned(), answer, ahead_ms: 0 });
    }
    let told = merged(&logs);
    if args.json {
        let events: Vec<Value> = told.iter().map(as_json).collect();
        let unread: Vec<Value> =
            unread.iter().map(|(node, why)| json!({ "node": node, "problem": why })).collect();
        let left_out: usize = logs.iter().map(|log| log.answer.left_out).sum();
        let json = json!({
            "ok": unread.is_empty(), "events": events, "left_out": left_out, "unread": unread,
        });
        result(&json.to_string());
    } else {
        show(&told, &logs);
    }
    for (node, why) in &unread {
        say(&format!("error: {node}: its events were not read: {why}"));
    }
    Ok(if unread.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Refuses kinds that there are none of, since their events would be missed in silence.
fn check(kinds: &[String]) -> Result<(), Failure> {
    let known = EventKind::ALL.map(EventKind::name);
    let Some(unknown) = kinds.iter().find(|kind| !known.contains(&kind.as_str())) else {
        return Ok(());
    };
    let error = anyhow!("there are no events of the kind {unknown:?}");
    Err(Failure::from(error).hint(format!("kinds are {}", known.join(", "))))
}

/// The logs of nodes, and why some were not read.
fn of_nodes(targets: &[Target], request: &EventsRequest) -> (Vec<Log>, Vec<(String, String)>) {
    let parameters = json!(request);
    let answers = ask::ask(targets, DEADLINE, move |client, _| {
        let begun = time::now_ms();
        let answer = operate(client, EVENTS, &parameters)?
            .with_context(|| format!("{} keeps no events: upgrade it", client.program()))?;
        let answer: EventsAnswer =
            serde_json::from_value(answer).context("the node's answer cannot be read")?;
        let here = u64::midpoint(begun, time::now_ms());
        let ahead_ms = answer.clock_ms as i64 - here as i64;
        Ok((answer, ahead_ms))
    });
    let (mut logs, mut unread) = (Vec::new(), Vec::new());
    for (target, answer) in targets.iter().zip(answers) {
        let node = target.name.clone();
        match answer {
            Ok((answer, ahead_ms)) => logs.push(Log { node, answer, ahead_ms }),
            Err(why) => unread.push((node, why)),
        }
    }
    (logs, unread)
}

/// All events in the order in which they happened: by this machine's clock where a node's is off.
fn merged(logs: &[Log]) -> Vec<Told<'_>> {
    let mut all: Vec<Told<'_>> = Vec::new();
    for log in logs {
        let off = if log.ahead_ms.abs() > CLOCK_TOLERANCE_MS { log.ahead_ms } else { 0 };
        all.extend(log.answer.events.iter().map(|event| Told {
            node: &log.node,
            event,
            at_ms: event.time_ms() as i64 - off,
        }));
    }
    // Stable: events of one log and one millisecond stay in order.
    all.sort_by_key(|told| told.at_ms);
    all
}

fn as_json(told: &Told<'_>) -> Value {
    let mut json = json!({ "node": told.node });
    let Event { time, kind, text, fields } = told.event;
    json["time"] = time.as_str().into();
    json["kind"] = kind.as_str().into();
    json["text"] = text.as_str().into();
    json["fields"] = fields.clone();
    json["fault"] = told.event.is_fault().into();
    json
}

fn show(told: &[Told<'_>], logs: &[Log]) {
    let header = ["time (UTC)", "node", "", "what"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for Told { node, event, at_ms } in told {
        let time = time::rfc3339(u64::try_from(*at_ms).unwrap_or_default());
        let time = time.trim_end_matches('Z').replacen('T', " ", 1);
        let mark = if event.is_fault() { "!" } else { "" };
        let text = event.text.replace('\n', " ");
        rows.push(vec![time, (*node).to_owned(), mark.to_owned(), text]);
    }
    if told.is_empty() {
        result("nothing happened");
    } else {
        result(printable(&table(&rows)).trim_end());
        say(&summary(told));
    }
    for Log { node, answer, ahead_ms } in logs {
        if answer.left_out > 0 {
            let count = answer.left_out;
            say(&format!("{node}: {count} earlier events had no room; ask with a shorter --since"));
        }
        if let Some(line) = clock(Some(*ahead_ms)) {
            say(&format!("{node}: {line}; its events are shown by this machine's"));
        }
    }
}

/// What it comes to.
fn summary(told: &[Told<'_>]) -> String {
    let of_kind = |kind: EventKind| told.iter().filter(move |it| it.event.kind == kind.name());
    let crashes = of_kind(EventKind::Started).filter(|it| it.event.is_fault()).count();
    let recovered: Vec<f64> = of_kind(EventKind::GroupFormed)
        .filter_map(|it| it.event.fields["recovered_after_s"].as_f64())
        .collect();
    let longest = recovered.iter().copied().max_by(f64::total_cmp);
    let counts = [
        (of_kind(EventKind::RankFailed).count(), "ranks ended by themselves or did not start"),
        (of_kind(EventKind::GroupLost).count(), "times a group was interrupted"),
        (of_kind(EventKind::GroupFailed).count(), "groups given up"),
        (crashes, "starts after a crash"),
        (of_kind(EventKind::Damaged).count(), "damaged chunks"),
        (of_kind(EventKind::Refused).count(), "refused connections"),
    ];
    let counts = counts.into_iter().filter(|(count, _)| *count > 0);
    let mut parts: Vec<String> = counts.map(|(count, what)| format!("{count} {what}")).collect();
    if let Some(longest) = longest {
        let (times, longest) = (recovered.len(), duration(longest.ceil() as u64));
        parts.push(format!("recovered {times} times, after {longest} at the longest"));
    }
    let parts = if parts.is_empty() { "no faults".to_owned() } else { parts.join(", ") };
    format!("{} events: {parts}", told.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(node: &str, ahead_ms: i64, times: &[u64]) -> Log {
        let event = |ms: &u64| Event {
            time: time::rfc3339(*ms),
            kind: "started".to_owned(),
            text: format!("{node}{ms}"),
            fields: json!({}),
        };
        let events = times.iter().map(event).collect();
        let answer = EventsAnswer { events, left_out: 0, clock_ms: 0 };
        Log { node: node.to_owned(), answer, ahead_ms }
    }

    #[test]
    fn events_are_in_the_order_in_which_they_happened() {
        let logs = [
            log("a", 0, &[10_000, 20_000]),
            log("b", 400, &[9_999, 20_001]),
            log("c", 60_000, &[75_000]),
            log("d", -5_000, &[0]),
        ];
        let order: Vec<&str> = merged(&logs).iter().map(|told| told.event.text.as_str()).collect();
        assert_eq!(order, ["d0", "b9999", "a10000", "c75000", "a20000", "b20001"]);
    }

    #[test]
    fn unknown_kinds_are_refused() {
        assert!(check(&["rank_failed".to_owned()]).is_ok());
        assert!(check(&["rank_faild".to_owned()]).is_err());
    }
}
