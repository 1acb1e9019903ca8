//! The supervisor's decisions: which phase the group is in, who runs which request, and what
//! follows from each note. One thread; blocks only to send.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use super::{Node, Note, Outcome, ServeError, SupervisorOptions, refuse};
use crate::{
    cluster::{
        identity::{self, Identity},
        message::{FromRank, Progress, ToRank},
        process::RankProcess,
        rank::ALIVE_INTERVAL,
        wire::{Sender, WireError},
    },
    engine::{Command, EngineHandle, EngineState, Event, EventSink, GenerateRequest, RequestId},
};

/// Ticks without a word from a rank after which it counts as lost. They are counted and not
/// measured, so that a front which was itself stopped for a while does not blame its ranks.
const SILENT_TICKS: u32 = 5;

/// How long an ended child may take to be found ended: its sockets close a moment earlier.
const EXIT_TIMEOUT: Duration = Duration::from_millis(250);

/// A node and what is known of it.
struct Member {
    node: Node,
    /// None until connected, and once gone.
    sender: Option<Arc<Sender>>,
    identity: Option<Identity>,
    progress: Option<Progress>,
    loaded: bool,
    formed_epoch: u64,
    silent_ticks: u32,
}

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
    epoch: u64,
    requests: BTreeMap<RequestId, EventSink>,
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
    ) -> Self {
        let member = |node| Member {
            node,
            sender: None,
            identity: None,
            progress: None,
            loaded: false,
            formed_epoch: 0,
            silent_ticks: 0,
        };
        let members = nodes.into_iter().map(member).collect();
        let (by_rank, requests) = (Vec::new(), BTreeMap::new());
        let (phase, phase_start, epoch) = (Phase::Loading, Instant::now(), 0);
        Self { members, by_rank, phase, phase_start, epoch, requests, handle, options, outcome }
    }

    pub(super) fn run(mut self, notes: &Receiver<Note>) {
        if self.members.is_empty() {
            self.learn();
        }
        let mut next_tick = Instant::now() + ALIVE_INTERVAL;
        loop {
            let left = next_tick.saturating_duration_since(Instant::now());
            match notes.recv_timeout(left) {
                Ok(Note::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(note) => self.take(note),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= next_tick {
                self.tick();
                next_tick = Instant::now() + ALIVE_INTERVAL;
            }
        }
        self.stop(notes);
    }

    fn take(&mut self, note: Note) {
        match note {
            Note::Connected { node, sender, identity } => {
                self.members[node].sender = Some(sender);
                self.members[node].identity = Some(identity);
                self.learn();
            }
            Note::Unreachable { node, reason } => {
                let node = self.members[node].node.name.clone();
                self.fail(ServeError::Unreachable { node, reason });
            }
            Note::Message { node, message } => self.hear(node, message),
            Note::Gone { node, reason } => {
                self.members[node].sender = None;
                self.lose(node, reason);
            }
            Note::Command(Command::Submit { id, request, events }) => {
                self.submit(id, request, events);
            }
            Note::Command(Command::Cancel(id)) => {
                if self.requests.contains_key(&id) {
                    self.tell(self.by_rank.first().copied(), &ToRank::Cancel(id));
                }
            }
            Note::Stop => {}
        }
    }

    /// Once all have said who they are: do they belong together?
    fn learn(&mut self) {
        let known = |member: &'_ Member| member.identity.clone();
        let Some(identities) = self.members.iter().map(known).collect::<Option<Vec<_>>>() else {
            return;
        };
        let names = self.members.iter().map(|member| member.node.name.as_str());
        match identity::check_group(&names.zip(&identities).collect::<Vec<_>>()) {
            Ok(by_rank) => {
                self.by_rank = by_rank;
                self.form_when_loaded();
            }
            Err(error) => self.fail(error.into()),
        }
    }

    fn hear(&mut self, index: usize, message: FromRank) {
        let member = &mut self.members[index];
        member.silent_ticks = 0;
        match message {
            FromRank::Alive => {}
            FromRank::Progress(progress) => {
                member.progress = Some(progress);
                self.show_progress();
            }
            FromRank::Loaded => {
                member.loaded = true;
                self.form_when_loaded();
            }
            FromRank::Formed { epoch } => {
                member.formed_epoch = epoch;
                let formed = |member: &Member| member.formed_epoch == self.epoch;
                if matches!(self.phase, Phase::Forming) && self.members.iter().all(formed) {
                    self.enter(Phase::Ready);
                    self.handle.update_status(|status| status.state = EngineState::Ready);
                    self.outcome.set(Ok(()));
                }
            }
            FromRank::Event(event) if self.by_rank.first() == Some(&index) => self.pass(event),
            FromRank::GroupLost { epoch, rank, reason } => {
                if epoch == self.epoch {
                    self.blame(index, rank, reason);
                }
            }
            FromRank::Failed(reason) => {
                let rank = member.identity.as_ref().map(|it| it.rank);
                let node = Some(member.node.name.clone());
                if member.loaded {
                    self.fail(ServeError::Lost { rank, node, reason });
                } else {
                    self.fail(ServeError::Package { rank, node, reason });
                }
            }
            FromRank::Identity(_) | FromRank::Refused(_) | FromRank::Event(_) => {
                self.lose(index, "it said what it may not say now".to_owned());
            }
        }
    }

    /// A rank says that the group is lost; the one that it blames is the better name.
    fn blame(&mut self, by: usize, rank: Option<u32>, reason: String) {
        let culprit = rank.and_then(|rank| self.by_rank.get(rank as usize).copied());
        self.lose(culprit.unwrap_or(by), reason);
    }

    /// A rank is of no use any more: the group ends.
    fn lose(&mut self, index: usize, reason: String) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let member = &mut self.members[index];
        let ended = member.node.process.as_mut().and_then(|it| it.exit_within(EXIT_TIMEOUT));
        let reason = ended.map_or(reason, |status| format!("its process ended ({status})"));
        let rank = member.identity.as_ref().map(|it| it.rank);
        let node = Some(member.node.name.clone());
        self.fail(ServeError::Lost { rank, node, reason });
    }

    /// Ends every request with the reason. The first failure stays.
    fn fail(&mut self, error: ServeError) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let message = error.to_string();
        // First the status, so that whoever learns of the failure finds it there.
        self.handle.update_status(|status| {
            status.state = EngineState::Failed(message.clone());
            status.active_requests = 0;
        });
        self.outcome.set(Err(error.clone()));
        for (request, events) in mem::take(&mut self.requests) {
            events(Event::Failed { request, message: message.clone(), retryable: true });
        }
        self.enter(Phase::Failed(error));
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_start = Instant::now();
    }

    fn form_when_loaded(&mut self) {
        let waiting = matches!(self.phase, Phase::Loading) && !self.by_rank.is_empty();
        if !waiting || !self.members.iter().all(|member| member.loaded) {
            return;
        }
        self.epoch += 1;
        self.enter(Phase::Forming);
        let members = self.by_rank.iter().map(|index| &self.members[*index]);
        let peers = members.map(|member| member.node.announcement.clone()).collect();
        let form = ToRank::Form { epoch: self.epoch, peers };
        (0..self.members.len()).for_each(|index| self.tell(Some(index), &form));
        self.handle.update_status(|status| {
            status.state = EngineState::Starting("connecting the ranks".to_owned());
        });
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
            self.handle.update_status(|status| status.state = EngineState::Starting(text));
        }
    }

    fn submit(&mut self, id: RequestId, request: GenerateRequest, events: EventSink) {
        let refusal = match &self.phase {
            Phase::Ready => None,
            Phase::Failed(error) => Some(error.to_string()),
            Phase::Loading | Phase::Forming => Some("the model is still loading".to_owned()),
        };
        if let Some(message) = refusal {
            refuse(Command::Submit { id, request, events }, &message);
            return;
        }
        let leader = &self.members[self.by_rank[0]];
        let sent = leader.sender.as_ref().map(|it| it.send(&ToRank::Submit { id, request }));
        if let Some(Err(error @ WireError::TooLarge { .. })) = sent {
            let message = format!("the prompt is too long: {error}");
            events(Event::Failed { request: id, message, retryable: false });
            return;
        }
        // Any other failure has closed the connection, of which a note is on its way.
        self.requests.insert(id, events);
        self.count_requests();
    }

    fn pass(&mut self, event: Event) {
        let id = event.request();
        let over = matches!(event, Event::Finished { .. } | Event::Failed { .. });
        // One that has been failed already may still have had events on their way.
        if over {
            let events = self.requests.remove(&id);
            // First the status, so that whoever learns of the end finds it there.
            self.count_requests();
            if let Some(events) = events {
                events(event);
            }
        } else if let Some(events) = self.requests.get(&id) {
            events(event);
        }
    }

    fn count_requests(&self) {
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
        if self.phase_start.elapsed() > limit {
            self.fail(ServeError::Slow { doing: doing.to_owned(), limit });
        }
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if member.sender.is_some() {
                member.silent_ticks += 1;
            }
            if member.silent_ticks >= SILENT_TICKS {
                let silence = ALIVE_INTERVAL * SILENT_TICKS;
                self.lose(index, format!("it said nothing for {} s", silence.as_secs()));
            }
        }
    }

    /// Ends the ranks: asks, waits, then kills those that are children.
    fn stop(mut self, notes: &Receiver<Note>) {
        self.fail(ServeError::Stopped);
        self.handle.update_status(|status| {
            status.state = EngineState::Failed(ServeError::Stopped.to_string());
        });
        (0..self.members.len()).for_each(|index| self.tell(Some(index), &ToRank::Shutdown));
        let deadline = Instant::now() + self.options.stop_timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        while self.members.iter().any(|member| member.sender.is_some())
            && let Ok(note) = notes.recv_timeout(left())
        {
            match note {
                Note::Gone { node, .. } => self.members[node].sender = None,
                Note::Connected { node, sender, .. } => {
                    self.members[node].sender = Some(sender);
                    self.tell(Some(node), &ToRank::Shutdown);
                }
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
