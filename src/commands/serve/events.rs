//! What the server's log keeps: its life, and that of its group. It stands in the cluster's folder, or in
//! the store of the node that runs the server: there `cluster events` finds it.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use serde_json::{Value, json};
use shardpack_cluster::{GroupEvent, GroupEventSink};
use shardpack_server::ServerEvents;

use crate::{
    args::ServeArgs,
    cluster,
    commands::events::{EventKind, EventLog, FILE},
    progress::say,
};

/// The log of a server.
pub(super) struct ServerLog {
    /// What it is called in the log.
    name: String,
    lines: mpsc::Sender<Line>,
    writer: Option<thread::JoinHandle<()>>,
}

impl Drop for ServerLog {
    fn drop(&mut self) {
        self.add(Line::Stopped);
        // It ends once all is written; a panic there has been printed.
        let _ = self.writer.take().map(thread::JoinHandle::join);
    }
}

enum Line {
    Started(Value),
    Event(EventKind, String, Value),
    Stopped,
}

impl ServerLog {
    /// The log of the server of `model` in `folder`. That it cannot be written ends no server.
    pub(super) fn open(folder: &Path, model: &str) -> Option<Self> {
        let name = format!("serve {model}");
        let opened = EventLog::open(folder).and_then(|log| {
            let (lines, received) = mpsc::channel();
            let what = name.clone();
            let write = move || {
                for line in received {
                    match line {
                        Line::Started(fields) => log.started(&what, fields),
                        Line::Event(kind, text, fields) => log.add(kind, text, fields),
                        Line::Stopped => return log.stopped(&what),
                    }
                }
            };
            // The supervisor does not wait for a disk.
            let writer = thread::Builder::new().name("events".to_owned()).spawn(write)?;
            Ok(Self { name: name.clone(), lines, writer: Some(writer) })
        });
        opened
            .map_err(|error| {
                say(&format!("warning: {}: no log of events: {error}", folder.display()));
            })
            .ok()
    }

    /// The server has started; it will take requests at `url`.
    pub(super) fn started(&self, url: &str) {
        self.add(Line::Started(json!({ "url": url })));
    }

    fn add(&self, line: Line) {
        // A writer that is gone has panicked, which ends no server.
        let _ = self.lines.send(line);
    }
}

/// Takes the events of a model's group, for `/events` and for the log, where there is one.
pub(super) fn sink(events: &ServerEvents, model: &str, log: Option<&ServerLog>) -> GroupEventSink {
    let (events, model) = (events.clone(), model.to_owned());
    let log = log.map(|log| (log.lines.clone(), log.name.clone()));
    GroupEventSink::new(move |event| {
        let (kind, text, mut fields) = line(event);
        events.add(kind.name(), Some(&model), &text, fields.clone());
        if let Some((lines, name)) = &log {
            fields["of"] = name.as_str().into();
            // The writer ends with the server.
            let _ = lines.send(Line::Event(kind, text, fields));
        }
    })
}

/// Where the log of a front stands that a node runs: in the node's own, whose store has its package.
pub(super) fn folder_of_node(args: &ServeArgs) -> Option<PathBuf> {
    let store = args.set.ancestors().nth(2)?;
    store.join(FILE).is_file().then(|| store.to_owned())
}

/// Where the log stands; nowhere if neither nodes nor a cluster are served.
pub(super) fn folder(args: &ServeArgs) -> Option<PathBuf> {
    let folder = cluster::folder(&args.nodes.cluster).ok()?;
    let is_named = args.nodes.cluster.folder.is_some() || !args.nodes.names.is_empty();
    (is_named || folder.is_dir()).then_some(folder)
}

fn line(event: &GroupEvent) -> (EventKind, String, Value) {
    match event {
        GroupEvent::Formed { epoch, ranks, after, resumed } => {
            let seconds = after.map(|after| after.as_secs_f64());
            let text = match seconds {
                Some(seconds) => format!(
                    "{ranks} ranks serve again after {seconds:.1} s (epoch {epoch}); requests that go on: \
                     {resumed}"
                ),
                None => format!("{ranks} ranks serve (epoch {epoch})"),
            };
            let fields = json!({
                "epoch": epoch, "ranks": ranks, "recovered_after_s": seconds, "resumed": resumed,
            });
            (EventKind::GroupFormed, text, fields)
        }
        GroupEvent::Lost { epoch, rank, node, reason, doing, waiting } => {
            let which = match (rank, node) {
                // Ranks of this machine have no other name.
                (Some(rank), Some(node)) if *node != format!("rank {rank}") => {
                    format!("rank {rank} ({node}) was lost: ")
                }
                (Some(rank), _) => format!("rank {rank} was lost: "),
                (None, Some(node)) => format!("{node} was lost: "),
                (None, None) => String::new(),
            };
            let text = format!("{which}{reason}; {doing}; requests that wait: {waiting}");
            let fields = json!({
                "epoch": epoch, "rank": rank, "node": node, "reason": reason, "waiting": waiting,
            });
            (EventKind::GroupLost, text, fields)
        }
        GroupEvent::Failed { reason } => {
            (EventKind::GroupFailed, format!("given up: {reason}"), json!({ "reason": reason }))
        }
    }
}
