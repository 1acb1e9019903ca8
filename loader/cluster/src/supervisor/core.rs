//! The supervisor's state machine: the group's phase, the running requests, and the reaction to each
//! event. One thread; blocks only to send.

mod member;
mod recover;

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant},
};

use shardpack_engine_api::{
    Command, EngineHandle, EngineState, Event, EventSink, FinishReason, GenerateRequest, RequestId,
};

use super::{
    GroupEvent, Node, Outcome, RankEvent, ServeError, SupervisorEvent, SupervisorOptions,
    recovery::Attempts,
    refuse,
    requests::{Ended, Requests},
};
use crate::{
    identity::Identity,
    message::{FromRank, GroupPlan, Progress, ToRank},
    process::RankProcess,
    rank::ALIVE_INTERVAL,
    wire::WireError,
};
use member::Member;

/// Heartbeat timeout: ticks without a message after which a rank counts as lost. They are counted and not
/// measured, so that a front which was itself stopped for a while does not blame its ranks.
const SILENT_TICKS: u32 = 6;

/// The same of a rank that loads: reading as fast as a machine can may hold up its threads.
const SILENT_LOADING_TICKS: u32 = 10;

/// How long an ended child may take to be found ended: its sockets close a moment earlier.
const EXIT_TIMEOUT: Duration = Duration::from_millis(250);

enum Phase {
    /// Connecting and loading.
    Loading,
    /// Connecting to each other.
    Forming,
    Ready,
    Failed(ServeError),
}

pub(super) struct Core {
    members: Vec<Member>,
    /// Index of each rank's member; empty until all are known.
    by_rank: Vec<usize>,
    phase: Phase,
    phase_start: Instant,
    /// Before which no group is formed.
    form_at: Instant,
    /// Since when requests wait for the group to form again.
    interrupted: Option<Instant>,
    epoch: u64,
    /// Whether the group has ever served; from then on it is formed again.
    has_served: bool,
    /// Times that it was to be formed again.
    recoveries: u32,
    /// To form it again without a lost rank.
    attempts: Attempts,
    /// A reported loss whose rank is not known yet: the deadline for learning it, the reporting
    /// member, and the reason.
    pending_loss: Option<(Instant, usize, String)>,
    /// Ranks that are being started, on threads of their own.
    starting: u32,
    events: SyncSender<SupervisorEvent>,
    requests: Requests,
    handle: EngineHandle,
    options: SupervisorOptions,
    outcome: Arc<Outcome>,
}

impl Core {
    pub(super) fn new(
        nodes: Vec<Node>,
        handle: EngineHandle,
        options: SupervisorOptions,
        outcome: Arc<Outcome>,
        events: SyncSender<SupervisorEvent>,
    ) -> Self {
        let now = Instant::now();
        Self {
            members: nodes.into_iter().map(Member::new).collect(),
            by_rank: Vec::new(),
            phase: Phase::Loading,
            phase_start: now,
            form_at: now,
            interrupted: None,
            epoch: 0,
            has_served: false,
            recoveries: 0,
            attempts: Attempts::default(),
            pending_loss: None,
            starting: 0,
            events,
            requests: Requests::default(),
            handle,
            options,
            outcome,
        }
    }

    pub(super) fn run(mut self, events: &Receiver<SupervisorEvent>) {
        if self.members.is_empty() {
            self.check_identities();
        }
        let mut next_tick = Instant::now() + ALIVE_INTERVAL;
        loop {
            let next = self.next_due().map_or(next_tick, |due| due.min(next_tick));
            match events.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(SupervisorEvent::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.do_due();
            if Instant::now() >= next_tick {
                self.tick();
                next_tick = Instant::now() + ALIVE_INTERVAL;
            }
        }
        self.stop(events);
    }

    fn handle(&mut self, event: SupervisorEvent) {
        match event {
            SupervisorEvent::Rank { node, incarnation, event } => {
                self.starting -= u32::from(matches!(event, RankEvent::Restarted(_)));
                if self.members[node].incarnation == incarnation {
                    self.handle_rank_event(node, event);
                } else if let RankEvent::Connected { sender, .. } = event {
                    sender.close();
                }
            }
            SupervisorEvent::Command(Command::Submit { id, request, events }) => {
                self.submit(id, request, events);
            }
            SupervisorEvent::Command(Command::Cancel(id)) => {
                // One that rank 0 does not have ends here.
                let ended = self.requests.finish_unsent(id, FinishReason::Cancelled);
                self.end(ended);
                if self.requests.contains(id) {
                    self.tell(self.by_rank.first().copied(), &ToRank::Cancel(id));
                }
            }
            SupervisorEvent::Stop => {}
        }
    }

    fn handle_rank_event(&mut self, node: usize, event: RankEvent) {
        match event {
            RankEvent::Connected { sender, identity } => {
                self.members[node].sender = Some(sender);
                self.members[node].identity = Some(identity);
                self.check_identities();
            }
            RankEvent::Unreachable(reason) => {
                let name = self.members[node].node.name.clone();
                self.give_up_or_recover(node, ServeError::Unreachable { node: name, reason });
            }
            RankEvent::Message(message) => self.handle_message(node, message),
            RankEvent::Disconnected(reason) => {
                self.members[node].sender = None;
                self.lose(node, reason);
            }
            RankEvent::Restarted(restarted) => self.read_restarted(node, restarted),
        }
    }

    /// Checks that the ranks form one group, once all have sent their identity.
    fn check_identities(&mut self) {
        let known = |member: &'_ Member| member.identity.clone();
        let Some(identities) = self.members.iter().map(known).collect::<Option<Vec<_>>>() else {
            return;
        };
        let names = self.members.iter().map(|member| member.node.name.as_str());
        match crate::identity::check_group(&names.zip(&identities).collect::<Vec<_>>()) {
            Ok(by_rank) => {
                self.by_rank = by_rank;
                self.form_when_loaded();
            }
            Err(error) => self.fail(error.into()),
        }
    }

    fn handle_message(&mut self, index: usize, message: FromRank) {
        let member = &mut self.members[index];
        member.silent_ticks = 0;
        match message {
            FromRank::Alive => {}
            FromRank::Vitals(vitals) => {
                if let Some(rank) = member.identity.as_ref().map(|identity| identity.rank) {
                    self.handle.update_status(|status| status.hear(rank, vitals));
                }
            }
            FromRank::Progress(progress) => {
                member.progress = Some(progress);
                self.show_progress();
            }
            FromRank::Loaded { epoch } => {
                member.loaded = true;
                member.is_repaired = false;
                self.epoch = self.epoch.max(epoch);
                self.form_when_loaded();
            }
            FromRank::Formed { epoch, links } => {
                member.formed_epoch = epoch;
                member.links = links;
                let formed = |member: &Member| member.formed_epoch == self.epoch;
                if matches!(self.phase, Phase::Forming) && self.members.iter().all(formed) {
                    self.enter(Phase::Ready);
                    self.has_served = true;
                    let links = self.by_rank.iter().map(|index| self.members[*index].links.clone());
                    let links = links.flatten().collect();
                    self.handle.update_status(|status| {
                        status.links = links;
                        status.state = EngineState::Ready;
                    });
                    self.outcome.set(Ok(()));
                    let after = self.interrupted.take().map(|since| since.elapsed());
                    let resumed = self.requests.unsent().len();
                    self.send_requests();
                    let (epoch, ranks) = (self.epoch, self.members.len() as u32);
                    let formed = GroupEvent::Formed { epoch, ranks, after, resumed };
                    self.options.events.tell(&formed);
                }
            }
            FromRank::Event(event) if self.by_rank.first() == Some(&index) => self.pass(event),
            FromRank::GroupLost { epoch, rank, reason } => {
                let is_present = matches!(self.phase, Phase::Forming | Phase::Ready);
                if epoch == self.epoch && is_present {
                    self.blame(index, rank, reason);
                }
            }
            FromRank::Failed(reason) => {
                let (rank, node) = member.names();
                let error = if member.loaded {
                    ServeError::Lost { rank, node, reason }
                } else {
                    ServeError::Package { rank, node, reason }
                };
                if !self.repair(index, &error) {
                    self.give_up_or_recover(index, error);
                }
            }
            FromRank::Identity(_) | FromRank::Refused(_) | FromRank::Event(_) => {
                self.lose(index, "it sent an unexpected message".to_owned());
            }
        }
    }

    /// A rank is of no use any more.
    fn lose(&mut self, index: usize, reason: String) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let member = &mut self.members[index];
        let reason = match member.exit_within(EXIT_TIMEOUT) {
            Some(status) => format!("its process ended ({status})"),
            None => reason,
        };
        let (rank, node) = member.names();
        self.give_up_or_recover(index, ServeError::Lost { rank, node, reason });
    }

    /// Ends every request with the reason. The first failure stays.
    fn fail(&mut self, error: ServeError) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let message = error.to_string();
        // First the status, so that a client that sees the failure finds it there.
        self.handle.update_status(|status| {
            status.state = EngineState::Failed(message.clone());
            status.active_requests = 0;
        });
        self.outcome.set(Err(error.clone()));
        self.requests.fail(&message).into_iter().for_each(Ended::tell);
        if error != ServeError::Stopped {
            self.options.events.tell(&GroupEvent::Failed { reason: message });
        }
        self.pending_loss = None;
        self.enter(Phase::Failed(error));
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_start = Instant::now();
    }

    fn form_when_loaded(&mut self) {
        let due = Instant::now() >= self.form_at;
        let waiting = matches!(self.phase, Phase::Loading) && !self.by_rank.is_empty() && due;
        if !waiting || !self.members.iter().all(|member| member.loaded) {
            return;
        }
        self.epoch += 1;
        self.enter(Phase::Forming);
        let members = self.by_rank.iter().map(|index| &self.members[*index]);
        let peers = members.map(|member| member.node.announcement.clone()).collect();
        let links = self.options.links;
        let form = ToRank::Form(GroupPlan { epoch: self.epoch, peers, links });
        (0..self.members.len()).for_each(|index| self.tell(Some(index), &form));
        self.show("connecting the ranks".to_owned());
    }

    fn show_progress(&self) {
        let share = |progress: &Progress| {
            progress.done_bytes as f64 / progress.total_bytes.max(1) as f64 * 100.0
        };
        let loading = self.members.iter().filter(|member| !member.loaded);
        let progress = loading.filter_map(|member| Some((member, member.progress.as_ref()?)));
        let slowest = progress.min_by(|(_, a), (_, b)| share(a).total_cmp(&share(b)));
        if let Some((member, progress)) = slowest
            && matches!(self.phase, Phase::Loading)
        {
            let percent = share(progress).min(100.0);
            let text = format!("{}: {}, {percent:.0} %", member.node.name, progress.doing);
            self.show(text);
        }
    }

    /// Shows what happens before there is a group.
    pub(super) fn show(&self, text: String) {
        let state = if self.interrupted.is_some() {
            EngineState::Recovering(text)
        } else {
            EngineState::Starting(text)
        };
        self.handle.update_status(|status| status.state = state);
    }

    fn submit(&mut self, id: RequestId, request: Box<GenerateRequest>, events: EventSink) {
        let refusal = match &self.phase {
            Phase::Ready => None,
            Phase::Failed(error) => Some(error.to_string()),
            Phase::Loading | Phase::Forming if self.interrupted.is_some() => None,
            Phase::Loading | Phase::Forming if self.has_served => {
                Some("a lost rank is being replaced".to_owned())
            }
            Phase::Loading | Phase::Forming => Some("the model is still loading".to_owned()),
        };
        if let Some(message) = refusal {
            refuse(Command::Submit { id, request, events }, &message);
            return;
        }
        self.requests.insert(id, request, events);
        self.count_requests();
        if matches!(self.phase, Phase::Ready) {
            self.send_requests();
        }
    }

    /// Sends rank 0 the requests that it does not have.
    fn send_requests(&mut self) {
        let Some(sender) = self.members[self.by_rank[0]].sender.clone() else { return };
        for id in self.requests.unsent() {
            let Some(request) = self.requests.take_to_send(id) else { continue };
            // Any other failure has closed the connection, of which an event is on its way.
            if let Err(error @ WireError::TooLarge { .. }) =
                sender.send(&ToRank::Submit { id, request })
            {
                let refused = self.requests.refuse(id, format!("the prompt is too long: {error}"));
                self.end(refused);
            }
        }
    }

    fn pass(&mut self, event: Event) {
        if let Some(ended) = self.requests.pass(event) {
            self.end([ended]);
        }
    }

    /// Tells clients that their requests have ended.
    pub(super) fn end(&self, ended: impl IntoIterator<Item = Ended>) {
        self.count_requests();
        ended.into_iter().for_each(Ended::tell);
    }

    pub(super) fn count_requests(&self) {
        let count = self.requests.len() as u32;
        self.handle.update_status(|status| status.active_requests = count);
    }

    /// Sends to a member; one that cannot be reached is noticed by the thread that reads it.
    fn tell(&self, index: Option<usize>, message: &ToRank) {
        if let Some(sender) = index.and_then(|index| self.members[index].sender.as_ref()) {
            let _ = sender.send(message);
        }
    }

    fn tick(&mut self) {
        let (doing, limit) = match self.phase {
            Phase::Loading => ("loading", self.options.load_timeout),
            Phase::Forming => ("connecting the ranks", self.options.form_timeout),
            Phase::Ready => ("", Duration::MAX),
            Phase::Failed(_) => return,
        };
        if self.phase_start.elapsed() > limit && !self.waits_for_a_node() {
            self.handle_timeout(ServeError::Slow { doing: doing.to_owned(), limit });
        }
        self.expire_requests();
        (0..self.members.len()).for_each(|index| self.tell(Some(index), &ToRank::Alive));
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if member.sender.is_some() {
                member.silent_ticks += 1;
            }
            let most = if member.loaded { SILENT_TICKS } else { SILENT_LOADING_TICKS };
            if member.silent_ticks >= most {
                let silence = ALIVE_INTERVAL * most;
                self.lose(index, format!("no heartbeat for {} s", silence.as_secs()));
            }
        }
    }

    /// Ends the ranks: asks, waits, then kills those that are children.
    fn stop(mut self, events: &Receiver<SupervisorEvent>) {
        self.fail(ServeError::Stopped);
        self.handle.update_status(|status| {
            status.state = EngineState::Failed(ServeError::Stopped.to_string());
        });
        (0..self.members.len()).for_each(|index| self.tell(Some(index), &ToRank::Shutdown));
        let deadline = Instant::now() + self.options.stop_timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        while (self.starting > 0 || self.members.iter().any(|member| member.sender.is_some()))
            && let Ok(event) = events.recv_timeout(left())
        {
            let SupervisorEvent::Rank { node, incarnation, event } = event else { continue };
            let is_present = self.members[node].incarnation == incarnation;
            match event {
                RankEvent::Disconnected(_) if is_present => self.members[node].sender = None,
                RankEvent::Connected { sender, .. } if is_present => {
                    self.members[node].sender = Some(sender);
                    self.tell(Some(node), &ToRank::Shutdown);
                }
                // A child ends when it is dropped.
                RankEvent::Restarted(_) => self.starting -= 1,
                _ => {}
            }
        }
        for member in &mut self.members {
            if let Some(sender) = &member.sender {
                sender.close();
            }
            let end = |process: &mut RankProcess| {
                if process.exit_within(left()).is_none() {
                    process.kill();
                }
            };
            member.node.process.as_mut().map(end);
        }
    }
}
