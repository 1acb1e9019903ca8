//! The state of one node in its supervisor.

use std::{
    process::ExitStatus,
    sync::Arc,
    time::{Duration, Instant},
};

use shardpack_engine_api::LinkReport;

use super::{Attempts, Identity, Node, Progress};
use crate::wire::Sender;

/// A node and its state.
pub(super) struct Member {
    pub(super) node: Node,
    /// How often its rank was started again; distinguishes old events from new ones.
    pub(super) incarnation: u32,
    /// None until connected, and once gone.
    pub(super) sender: Option<Arc<Sender>>,
    pub(super) identity: Option<Identity>,
    /// Its last known rank.
    pub(super) rank: Option<u32>,
    pub(super) progress: Option<Progress>,
    pub(super) loaded: bool,
    pub(super) formed_epoch: u64,
    /// Its rank's links to higher ones, in the last group that it formed.
    pub(super) links: Vec<LinkReport>,
    pub(super) silent_ticks: u32,
    /// Whether its node did not answer when its rank was to be started again.
    pub(super) is_absent: bool,
    /// When its rank is to be started again, while it is lost.
    pub(super) restart_at: Option<Instant>,
    pub(super) attempts: Attempts,
    /// What the rank says of its package, which is repaired before the rank is started again.
    pub(super) damage: Option<String>,
    /// Whether its package was repaired since its rank has loaded: once is enough, or of no use.
    pub(super) is_repaired: bool,
}

impl Member {
    pub(super) fn new(node: Node) -> Self {
        Self {
            node,
            incarnation: 0,
            sender: None,
            identity: None,
            rank: None,
            progress: None,
            loaded: false,
            formed_epoch: 0,
            links: Vec::new(),
            silent_ticks: 0,
            is_absent: false,
            restart_at: None,
            attempts: Attempts::default(),
            damage: None,
            is_repaired: false,
        }
    }

    /// Its rank and its name, for messages.
    pub(super) fn names(&self) -> (Option<u32>, Option<String>) {
        let rank = self.identity.as_ref().map(|it| it.rank).or(self.rank);
        (rank, Some(self.node.name.clone()))
    }

    /// How its process ended, if it is a child and does so within `timeout`.
    pub(super) fn exit_within(&mut self, timeout: Duration) -> Option<ExitStatus> {
        self.node.process.as_mut().and_then(|process| process.exit_within(timeout))
    }

    /// Ends what is left of the rank; it is started again at a given time.
    pub(super) fn retire(&mut self, restart_at: Instant) {
        if let Some(sender) = self.sender.take() {
            sender.close();
        }
        // Killed, where it is a child; an agent kills the old one when it starts the new one.
        self.node.process = None;
        self.rank = self.names().0;
        self.identity = None;
        self.progress = None;
        self.loaded = false;
        self.formed_epoch = 0;
        self.silent_ticks = 0;
        self.incarnation += 1;
        self.restart_at = Some(restart_at);
    }
}
