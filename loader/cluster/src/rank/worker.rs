//! The thread that owns a rank's engine: loads it, takes it from group to group, and drives its
//! steps.

use std::{
    error::Error,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{RecvTimeoutError, TryRecvError},
    },
    time::{Duration, Instant},
};

use shardpack_collectives::{Group, GroupError, LinkedGroup};
use shardpack_engine::engine::{CountedGroup, HEARTBEAT, RankEngine, StepOutcome};
use shardpack_engine_api::Event;
use shardpack_identity::Credentials;

use super::{
    LoadError, RankError,
    commands::{Command, CommandReceiver},
    front::Front,
    step_watch::StepWatch,
};
use crate::{
    identity::Identity,
    links::LinkMaker,
    mesh::{self, LocalRank, Mailbox},
    message::{FromRank, GroupPlan, Progress},
    vitals::StepStats,
};

/// Between two reports of the same activity: people read them, and tensors are many.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The group that the worker is in, for others to end.
#[derive(Default)]
pub(super) struct CurrentGroup(Mutex<State>);

#[derive(Default)]
struct State {
    group: Option<Arc<LinkedGroup>>,
    /// The latest that is wanted.
    epoch: u64,
    ended: Option<String>,
}

impl CurrentGroup {
    /// Ends the present group, formed or not, because that of `epoch` is wanted.
    pub(super) fn supersede(&self, epoch: u64) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.epoch = state.epoch.max(epoch);
        let group = state.group.take();
        drop(state);
        if let Some(group) = group {
            group.abort("another group is being formed");
        }
    }

    /// The latest epoch that was wanted.
    pub(super) fn epoch(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).epoch
    }

    /// Ends the present group, formed or not, and any whose forming is yet to begin: whoever wanted
    /// them is gone.
    pub(super) fn abandon(&self, reason: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.epoch += 1;
        let group = state.group.take();
        drop(state);
        if let Some(group) = group {
            group.abort(reason);
        }
    }

    /// Whether a group of a later epoch is wanted, or none.
    fn is_superseded(&self, epoch: u64) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.epoch > epoch || state.ended.is_some()
    }

    /// Ends the present group and any later one.
    pub(super) fn end(&self, reason: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended = Some(reason.to_owned());
        if let Some(group) = state.group.take() {
            group.abort(reason);
        }
    }

    fn enter(&self, group: &Arc<LinkedGroup>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &state.ended {
            group.abort(reason);
        } else if state.epoch > group.epoch() {
            group.abort("another group is being formed");
        }
        state.group = Some(Arc::clone(group));
    }

    fn leave(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).group = None;
    }
}

/// Why the worker left a group.
enum GroupExit {
    /// The process ends.
    End,
    /// The group broke.
    Broken(GroupError),
    /// Another is to be formed.
    Form(GroupPlan),
}

impl From<GroupError> for GroupExit {
    fn from(error: GroupError) -> Self {
        Self::Broken(error)
    }
}

pub(super) struct Worker {
    pub(super) identity: Identity,
    pub(super) credentials: Option<Credentials>,
    /// Where the rank listens.
    pub(super) address: SocketAddr,
    pub(super) commands: CommandReceiver,
    pub(super) mailbox: Mailbox,
    pub(super) links: LinkMaker,
    pub(super) front: Arc<Front>,
    pub(super) current: Arc<CurrentGroup>,
    pub(super) stats: Arc<StepStats>,
    pub(super) watch: Arc<StepWatch>,
    pub(super) form_timeout: Duration,
}

impl Worker {
    /// Loads, then serves until the commands end.
    pub(super) fn run(
        mut self,
        load: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError>,
    ) -> Result<(), RankError> {
        let mut engine =
            load(&mut self.report()).map_err(|error| RankError::Load(chain(error.as_ref())))?;
        self.front.loaded();
        let mut next = None;
        loop {
            let plan = match next.take() {
                Some(plan) => plan,
                None => match self.commands.recv() {
                    Err(_) => return Ok(()),
                    Ok(Command::Form(plan)) => plan,
                    // For a group that is gone; the front has failed the request.
                    Ok(Command::Submit(..) | Command::Cancel(_)) => continue,
                },
            };
            let left = self.serve(engine.as_mut(), &plan);
            self.current.leave();
            if let Some(message) = engine.device_failure() {
                return Err(RankError::Device(message.to_owned()));
            }
            engine.reset();
            match left {
                GroupExit::End => return Ok(()),
                GroupExit::Form(plan) => next = Some(plan),
                GroupExit::Broken(error) => {
                    self.links.fail(&error);
                    let (rank, reason) = mesh::blame(error);
                    self.say(&FromRank::GroupLost { epoch: plan.epoch, rank, reason });
                }
            }
        }
    }

    /// Passes progress on, but not more often than people read.
    fn report(&self) -> impl FnMut(Progress) + use<> {
        let front = Arc::clone(&self.front);
        let mut last: Option<(Instant, String)> = None;
        move |progress| {
            let now = Instant::now();
            let soon = |(at, doing): &(Instant, String)| {
                now - *at < PROGRESS_INTERVAL && *doing == progress.doing
            };
            let done = progress.done_bytes == progress.total_bytes;
            if done || !last.as_ref().is_some_and(soon) {
                last = Some((now, progress.doing.clone()));
                front.say(&FromRank::Progress(progress));
            }
        }
    }

    fn say(&self, message: &FromRank) {
        self.front.say(message);
    }

    /// Forms a group and stays in it to its end.
    fn serve(&mut self, engine: &mut dyn RankEngine, plan: &GroupPlan) -> GroupExit {
        let epoch = plan.epoch;
        let superseded = || self.current.is_superseded(epoch);
        let me = LocalRank {
            identity: &self.identity,
            credentials: self.credentials.as_ref(),
            address: self.address,
        };
        let (mailbox, maker) = (&mut self.mailbox, &mut self.links);
        let formed = mesh::form(me, plan, mailbox, maker, (self.form_timeout, &superseded));
        let formed = formed.and_then(|group| {
            let group = Arc::new(group);
            self.current.enter(&group);
            mesh::rendezvous(&group, self.form_timeout).map(|()| group)
        });
        let group = match formed {
            Ok(group) => group,
            Err(error) => {
                let (rank, reason) = (error.rank(), chain(&error));
                return GroupExit::Broken(match rank {
                    Some(rank) => GroupError::Lost { rank, reason },
                    None => GroupError::Aborted(reason),
                });
            }
        };
        let links = self.links.reports(self.identity.rank, &group);
        self.say(&FromRank::Formed { epoch, links });
        let served = if self.identity.rank == 0 {
            self.lead(engine, group.as_ref())
        } else {
            self.follow(engine, group.as_ref())
        };
        match served {
            Ok(left) | Err(left @ (GroupExit::End | GroupExit::Form(_))) => left,
            Err(GroupExit::Broken(error)) => self.why(error),
        }
    }

    /// A group that broke because of a command is left for that command.
    fn why(&self, error: GroupError) -> GroupExit {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Form(plan)) => return GroupExit::Form(plan),
                Ok(Command::Submit(..) | Command::Cancel(_)) => {}
                Err(TryRecvError::Disconnected) => return GroupExit::End,
                Err(TryRecvError::Empty) => return GroupExit::Broken(error),
            }
        }
    }

    fn lead(&self, engine: &mut dyn RankEngine, group: &dyn Group) -> Result<GroupExit, GroupExit> {
        let mut say = |event: Event| {
            if matches!(event, Event::Token { .. }) {
                self.stats.token();
            }
            self.say(&FromRank::Event(event));
        };
        let mut beat = Instant::now() + HEARTBEAT;
        let counted = CountedGroup::new(group);
        loop {
            loop {
                match self.commands.try_recv() {
                    Ok(command) => apply(engine, command)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(GroupExit::End),
                }
            }
            let begun = Instant::now();
            self.watch.begin();
            let outcome = engine.lead(&counted, &mut say);
            self.watch.end(matches!(outcome, Ok(StepOutcome::Worked)));
            let outcome = outcome?;
            let counts = counted.observer().take();
            if outcome == StepOutcome::Worked {
                self.stats.add(begun.elapsed(), &counts);
                self.stats.drafts(engine.drafts());
                beat = Instant::now() + HEARTBEAT;
                continue;
            }
            if outcome == StepOutcome::Waiting && Instant::now() < beat {
                // It has waited a moment itself.
                continue;
            }
            let left = beat.saturating_duration_since(Instant::now());
            match self.commands.recv_timeout(left) {
                Ok(command) => apply(engine, command)?,
                Err(RecvTimeoutError::Disconnected) => return Ok(GroupExit::End),
                Err(RecvTimeoutError::Timeout) => {
                    engine.heartbeat(&counted)?;
                    beat = Instant::now() + HEARTBEAT;
                }
            }
        }
    }

    fn follow(
        &self,
        engine: &mut dyn RankEngine,
        group: &dyn Group,
    ) -> Result<GroupExit, GroupExit> {
        let counted = CountedGroup::new(group);
        loop {
            let begun = Instant::now();
            self.watch.begin();
            let followed = engine.follow(&counted);
            let counts = counted.observer().take();
            // A heartbeat has no collectives.
            let has_worked = counts.all_reduces.count + counts.all_gathers.count > 0;
            self.watch.end(has_worked && followed.is_ok());
            followed?;
            if has_worked {
                self.stats.add(begun.elapsed(), &counts);
            }
            match self.commands.try_recv() {
                // Only the leader has requests.
                Err(TryRecvError::Empty) | Ok(Command::Submit(..) | Command::Cancel(_)) => {}
                Err(TryRecvError::Disconnected) => return Ok(GroupExit::End),
                Ok(Command::Form(plan)) => return Ok(GroupExit::Form(plan)),
            }
        }
    }
}

fn apply(engine: &mut dyn RankEngine, command: Command) -> Result<(), GroupExit> {
    match command {
        Command::Submit(id, request) => engine.submit(id, *request),
        Command::Cancel(id) => engine.cancel(id),
        Command::Form(plan) => return Err(GroupExit::Form(plan)),
    }
    Ok(())
}

/// An error and its sources in one sentence.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
