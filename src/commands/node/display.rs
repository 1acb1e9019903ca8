//! What a node says on its terminal, and keeps in its log, of the events of its port.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use serde_json::json;
use shardpack_identity::{EnrollmentState, Guard, Joined, date};
use shardpack_transfer::receive::ReceiveEvent;

use super::Running;
use crate::{
    args::NodeArgs,
    commands::{events::EventLog, node_events, refusals::Refusals},
    discovery::Announcer,
    kill_points,
    progress::{result, say, size},
};

/// Messages on the node's terminal.
pub(super) struct NodeDisplay {
    pub guard: Option<Arc<Guard>>,
    pub running: Running,
    /// The node's address for other machines.
    pub address: SocketAddr,
    pub refusals: Mutex<Refusals>,
    /// Whether it is announced on the local network until it has joined a cluster.
    pub announces: bool,
    pub announcer: Mutex<Option<Announcer>>,
    pub log: Arc<EventLog>,
}

impl NodeDisplay {
    /// Starts or stops the announcement on the local network.
    fn update_announcement(&self) {
        let waiting = match &self.guard {
            Some(guard) if self.announces => {
                matches!(guard.enrollment(), EnrollmentState::Inviting { .. }).then(|| guard.key())
            }
            _ => None,
        };
        let mut announcer = self.announcer.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(key) = waiting else {
            *announcer = None;
            return;
        };
        if announcer.is_none() {
            match Announcer::start(self.address, key) {
                Ok(started) => *announcer = Some(started),
                Err(error) => say(&format!("node: {error:#}; the node is not announced")),
            }
        }
    }

    /// Prints the address, and how the node joins a cluster if it has none.
    pub(super) fn announce(&self, args: &NodeArgs, listening: SocketAddr) {
        self.update_announcement();
        let enrollment = self.guard.as_ref().map(|guard| guard.enrollment());
        if args.json {
            let mut json =
                json!({ "listening": listening, "store": args.store, "tls": enrollment.is_some() });
            match &enrollment {
                Some(EnrollmentState::Joined(joined)) => {
                    json["cluster"] = joined.cluster.as_str().into();
                    json["name"] = joined.name.as_str().into();
                }
                Some(EnrollmentState::Inviting { token, left }) => {
                    json["join"] = json!({
                        "token": token.to_string(),
                        "seconds": left.as_secs(),
                        "command": self.command(),
                    });
                }
                None => {}
            }
            result(&json.to_string());
            return;
        }
        say(&format!(
            "node: listening on {listening}, packages in {}",
            args.store.as_deref().unwrap_or(Path::new("")).display()
        ));
        match &enrollment {
            Some(EnrollmentState::Joined(Joined { cluster, name, expires })) => {
                say(&format!("node: {name} of cluster {cluster}, member until {}", date(*expires)));
            }
            Some(EnrollmentState::Inviting { .. }) => self.invite(),
            None => {}
        }
    }

    /// The command that adds this node; the token is not part of it.
    fn command(&self) -> String {
        format!("shardpack cluster add {}", self.address)
    }

    /// Prints what to run on the controlling machine.
    fn invite(&self) {
        let Some(EnrollmentState::Inviting { token, left }) =
            self.guard.as_ref().map(|guard| guard.enrollment())
        else {
            return;
        };
        say("node: in no cluster yet. On the machine that pushes and serves, run:");
        say("");
        say(&format!("  {}", self.command()));
        say("");
        say("node: and enter this token when it asks:");
        say("");
        say(&format!("  {token}"));
        say("");
        say(&format!(
            "node: the token works once, for {} minutes (create a cluster there first with `shardpack cluster init`)",
            left.as_secs().div_ceil(60)
        ));
    }

    pub(super) fn show(&self, event: &ReceiveEvent) {
        node_events::log(&self.log, event);
        match event {
            ReceiveEvent::JoinedCluster(Joined { cluster, name, expires }) => {
                say(&format!(
                    "node: joined cluster {cluster} as {name}, member until {}",
                    date(*expires)
                ));
                self.update_announcement();
            }
            ReceiveEvent::Renewed(joined) => {
                say(&format!("node: renewed, member until {}", date(joined.expires)));
            }
            ReceiveEvent::ControllerChanged { epoch, name } => {
                say(&format!("node: the controller on {name} acts from now on (epoch {epoch})"));
            }
            ReceiveEvent::LeftCluster => {
                // Ranks end when the node leaves its cluster.
                self.running.lock().unwrap_or_else(PoisonError::into_inner).clear();
                say("node: left its cluster");
                self.update_announcement();
                self.invite();
            }
            ReceiveEvent::Disconnected { peer, problem: Some(problem) } if self.guard.is_some() => {
                let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
                let line = format!("node: {peer}: {problem}");
                for line in refusals.lines(line, Instant::now()) {
                    say(&line);
                    node_events::refused(&self.log, &line);
                }
            }
            other => show(other),
        }
    }
}

fn show(event: &ReceiveEvent) {
    match event {
        ReceiveEvent::Offered { package, held_bytes, missing_bytes, .. } => say(&format!(
            "node: rank {} of layout {}: {} held, {} to come",
            package.rank,
            package.layout.short(),
            size(*held_bytes),
            size(*missing_bytes)
        )),
        ReceiveEvent::ChunkStored { file, chunk, .. } => {
            kill_points::at(|| format!("node:stored:{file}:{chunk}"));
        }
        ReceiveEvent::ChunkRepaired { package, file, chunk, .. } => {
            say(&format!("package {package}: {file}: chunk {chunk} was damaged and is repaired"));
        }
        ReceiveEvent::Verifying { .. } => kill_points::at(|| "node:verifying".to_owned()),
        ReceiveEvent::Prepared { .. } => kill_points::at(|| "node:prepared".to_owned()),
        ReceiveEvent::PreparingRelease { .. } => {
            kill_points::at(|| "node:release-preparing".to_owned());
        }
        ReceiveEvent::ReleasePending { .. } => {
            kill_points::at(|| "node:release-pending".to_owned());
        }
        ReceiveEvent::Activating { .. } => kill_points::at(|| "node:activating".to_owned()),
        ReceiveEvent::Activated { package, .. } => {
            kill_points::at(|| "node:activated".to_owned());
            say(&format!(
                "node: rank {} of layout {} is active",
                package.rank,
                package.layout.short()
            ));
        }
        ReceiveEvent::ChunkRefused { file, chunk, .. } => {
            say(&format!("node: chunk {chunk} of {file} arrived damaged and was refused"));
        }
        ReceiveEvent::Disconnected { problem: Some(problem), .. } => {
            say(&format!("node: {problem}"));
        }
        ReceiveEvent::Scrubbed { package, findings, .. } if !findings.is_empty() => {
            say(&format!("node: {}", node_events::scrubbed(package, findings)));
        }
        ReceiveEvent::Connected { .. }
        | ReceiveEvent::Scrubbed { .. }
        | ReceiveEvent::StreamJoined { .. }
        | ReceiveEvent::Disconnected { .. }
        | ReceiveEvent::Removed { .. }
        | ReceiveEvent::JoinedCluster(_)
        | ReceiveEvent::Renewed(_)
        | ReceiveEvent::LeftCluster
        | ReceiveEvent::ControllerChanged { .. } => {}
    }
}
