//! What a node's log keeps of the events of its port: packages, membership, refusals.

use serde_json::json;
use shardpack_identity::{Joined, date};
use shardpack_transfer::protocol::PackageKey;
use shardpack_transfer::receive::ReceiveEvent;

use super::events::{EventKind, EventLog};
use crate::progress::size;

/// Logs an event, if it is one that somebody asks for the morning after.
pub(crate) fn log(log: &EventLog, event: &ReceiveEvent) {
    let key = |package: &PackageKey| json!({ "rank": package.rank, "layout": package.layout });
    let shown = |package: &PackageKey| {
        format!("rank {} of layout {}", package.rank, package.layout.short())
    };
    match event {
        ReceiveEvent::Prepared { package } => {
            let text = format!("{} was received and verified", shown(package));
            log.add(EventKind::PackageReceived, text, key(package));
        }
        ReceiveEvent::Activated { package, release, restores, .. } => {
            let mut fields = key(package);
            (fields["release"], fields["restores"]) = (json!(release), json!(restores));
            let number = release.map(|number| format!(" as release {number}")).unwrap_or_default();
            let (kind, text) = match restores {
                None => {
                    (EventKind::PackageActivated, format!("{} is current{number}", shown(package)))
                }
                Some(restored) => (
                    EventKind::PackageRolledBack,
                    format!("{} of release {restored} is current again{number}", shown(package)),
                ),
            };
            log.add(kind, text, fields);
        }
        ReceiveEvent::Removed { package, size_bytes } => {
            let text = format!("{} was removed ({})", shown(package), size(*size_bytes));
            log.add(EventKind::PackageRemoved, text, key(package));
        }
        ReceiveEvent::ChunkRefused { package, file, chunk } => {
            let text = format!("chunk {chunk} of {file} arrived damaged and was refused");
            log.add(EventKind::Damaged, text, key(package));
        }
        ReceiveEvent::ChunkRepaired { package, file, chunk, .. } => {
            let text = format!("chunk {chunk} of {file} was damaged and is repaired");
            log.add(EventKind::Damaged, text, key(package));
        }
        ReceiveEvent::Scrubbed { package, findings, .. } if !findings.is_empty() => {
            log.add(EventKind::Damaged, scrubbed(package, findings), key(package));
        }
        ReceiveEvent::JoinedCluster(joined) => membership(log, EventKind::Joined, "joined", joined),
        ReceiveEvent::Renewed(joined) => {
            membership(log, EventKind::Renewed, "renewed its membership of", joined);
        }
        ReceiveEvent::ControllerChanged { epoch, name } => {
            let text = format!("the controller on {name} has taken over (epoch {epoch})");
            log.add(EventKind::Handover, text, json!({ "epoch": epoch, "controller": name }));
        }
        ReceiveEvent::LeftCluster => log.add(EventKind::Left, "left its cluster", json!({})),
        _ => {}
    }
}

/// What is wrong with a package that was read again, and what to do.
pub(crate) fn scrubbed(package: &PackageKey, findings: &[String]) -> String {
    let layout = package.layout.short();
    let (count, first) = (findings.len(), findings.first().map_or("", String::as_str));
    let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
    format!(
        "rank {} of layout {layout} is damaged on the disk: {first}{more}; `shardpack cluster repair` \
         replaces what is damaged",
        package.rank
    )
}

fn membership(log: &EventLog, kind: EventKind, done: &str, joined: &Joined) {
    let Joined { cluster, name, expires } = joined;
    let text = format!("{done} cluster {cluster} as {name}, member until {}", date(*expires));
    log.add(kind, text, json!({ "cluster": cluster, "name": name, "expires": expires }));
}

/// Logs a connection that was refused; whoever calls limits how many.
pub(crate) fn refused(log: &EventLog, line: &str) {
    log.add(EventKind::Refused, line.strip_prefix("node: ").unwrap_or(line), json!({}));
}
