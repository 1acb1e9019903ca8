//! Recovery from a lost rank: the rank is started again, all ranks form the group of the next epoch,
//! and the requests go on in it. Before the group has served, and after too many attempts, the
//! group fails.

use std::{thread, time::Instant};

use shardpack_engine::loading::tells_of_damage;

use super::{
    super::{
        GroupEvent, RankEvent, RestartError, Restarted, ServeError, SupervisorEvent, Survivors,
        start_reader,
    },
    Core, EXIT_TIMEOUT, Phase,
};

impl Core {
    /// A rank reports that the group is lost; the error names the rank that it blames.
    pub(super) fn blame(&mut self, by: usize, rank: Option<u32>, reason: String) {
        let culprit = rank.and_then(|rank| self.by_rank.get(rank as usize).copied());
        if culprit.is_none() && self.ends_with_a_loss() {
            // Another connection is about to report which rank it was.
            self.pending_loss.get_or_insert((Instant::now() + EXIT_TIMEOUT, by, reason));
            return;
        }
        let named = culprit.unwrap_or(by);
        if self.ends_with_a_loss() || culprit.is_some_and(|culprit| self.is_gone(culprit)) {
            self.lose(named, reason);
        } else {
            // As far as its own connection shows it lives: reading its weights again would take
            // longer than another try.
            let (rank, node) = self.members[named].names();
            self.form_again(ServeError::Lost { rank, node, reason });
        }
    }

    /// Whether a member is beyond doubt of no use: it ended, or was to join this group and did
    /// not.
    fn is_gone(&mut self, index: usize) -> bool {
        let is_forming = matches!(self.phase, Phase::Forming);
        let member = &mut self.members[index];
        is_forming || member.sender.is_none() || member.exit_within(EXIT_TIMEOUT).is_some()
    }

    fn can_recover(&self) -> bool {
        self.has_served && self.members.iter().all(|member| member.node.restart.is_some())
    }

    /// Whether any loss costs at least a rank.
    fn ends_with_a_loss(&self) -> bool {
        !self.can_recover() || self.options.recovery.survivors == Survivors::Restart
    }

    /// A member is lost: starts it again, or ends the group with `error`.
    pub(super) fn give_up_or_recover(&mut self, index: usize, error: ServeError) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        if !self.can_recover() {
            return self.fail(error);
        }
        self.reset_attempts_when_steady();
        let options = self.options.recovery;
        let now = Instant::now();
        let Some((pause, attempt)) = self.members[index].attempts.next(&options, now) else {
            let attempts = options.attempts;
            return self.fail(ServeError::GivenUp { attempts, last: Box::new(error) });
        };
        let at = now + pause;
        match options.survivors {
            Survivors::Stay => self.members[index].retire(at),
            Survivors::Restart => self.members.iter_mut().for_each(|member| member.retire(at)),
        }
        let most = options.attempts;
        self.interrupt(&error, &format!("it is started again (attempt {attempt} of {most})"));
    }

    /// Repairs a package that its rank finds damaged, and starts the rank again: false where the error
    /// is another, or nothing can be done.
    pub(super) fn repair(&mut self, index: usize, error: &ServeError) -> bool {
        let ServeError::Package { reason, .. } = error else { return false };
        let member = &mut self.members[index];
        let can_be_repaired = member.node.repair.is_some() && member.node.restart.is_some();
        let is_done = member.is_repaired || matches!(self.phase, Phase::Failed(_));
        if is_done || !can_be_repaired || !tells_of_damage(reason) {
            return false;
        }
        member.damage = Some(reason.clone());
        member.is_repaired = true;
        member.retire(Instant::now());
        self.interrupt(error, "the package is repaired");
        true
    }

    /// The group is lost and no rank is: they form the next one.
    fn form_again(&mut self, error: ServeError) {
        self.reset_attempts_when_steady();
        let options = self.options.recovery;
        let now = Instant::now();
        let Some((pause, attempt)) = self.attempts.next(&options, now) else {
            let attempts = options.attempts;
            return self.fail(ServeError::GivenUp { attempts, last: Box::new(error) });
        };
        self.form_at = now + pause;
        let most = options.attempts;
        self.interrupt(&error, &format!("the ranks connect again (attempt {attempt} of {most})"));
    }

    fn reset_attempts_when_steady(&mut self) {
        let is_steady = self.phase_start.elapsed() >= self.options.recovery.steady;
        if matches!(self.phase, Phase::Ready) && is_steady {
            self.attempts.reset();
            self.members.iter_mut().for_each(|member| member.attempts.reset());
        }
    }

    /// The group is lost; its requests wait for the next one.
    fn interrupt(&mut self, error: &ServeError, doing: &str) {
        let message = error.to_string();
        self.outcome.clear();
        let ended = self.requests.interrupt(&message);
        self.recoveries += 1;
        self.pending_loss = None;
        if matches!(self.phase, Phase::Ready) {
            self.interrupted = Some(Instant::now());
        }
        self.show(format!("{message}; {doing}"));
        self.end(ended);
        self.enter(Phase::Loading);
        let (rank, node, reason) = match error {
            ServeError::Lost { rank, node, reason } => (*rank, node.clone(), reason.clone()),
            _ => (None, None, message),
        };
        let (epoch, waiting, doing) = (self.epoch, self.requests.len(), doing.to_owned());
        let lost = GroupEvent::Lost { epoch, rank, node, reason, doing, waiting };
        self.options.events.tell(&lost);
    }

    /// Ends requests that have waited too long for the group to form again.
    pub(super) fn expire_requests(&mut self) {
        let mut ended = self.requests.expire_unsent();
        let most = self.options.recovery.resume_timeout;
        if self.interrupted.is_some_and(|since| since.elapsed() >= most) {
            self.interrupted = None;
            let seconds = most.as_secs();
            let message = format!("a lost rank was not replaced within {seconds} s");
            ended.extend(self.requests.fail(&message));
            self.show(message);
        }
        self.end(ended);
    }

    /// Whether a rank is away because its node is.
    pub(super) fn waits_for_a_node(&self) -> bool {
        matches!(self.phase, Phase::Loading) && self.members.iter().any(|it| it.is_absent)
    }

    /// Loading or forming took too long.
    pub(super) fn handle_timeout(&mut self, error: ServeError) {
        if !self.can_recover() || matches!(self.phase, Phase::Loading) {
            return self.fail(error);
        }
        let is_late = |index: &usize| self.members[*index].formed_epoch != self.epoch;
        let late: Vec<_> = (0..self.members.len()).filter(is_late).collect();
        for index in late {
            self.give_up_or_recover(index, error.clone());
        }
    }

    /// When something is to be done next, apart from the ticks.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let forming = matches!(self.phase, Phase::Loading) && self.form_at > Instant::now();
        let restarts = self.members.iter().filter_map(|member| member.restart_at);
        let pending_loss = self.pending_loss.as_ref().map(|(at, ..)| *at);
        restarts.chain(forming.then_some(self.form_at)).chain(pending_loss).min()
    }

    /// Does what is due.
    pub(super) fn do_due(&mut self) {
        let now = Instant::now();
        if let Some((_, by, reason)) = self.pending_loss.take_if(|(at, ..)| *at <= now) {
            self.lose(by, reason);
        }
        for index in 0..self.members.len() {
            if self.members[index].restart_at.is_some_and(|at| at <= now) {
                self.members[index].restart_at = None;
                if !matches!(self.phase, Phase::Failed(_)) {
                    self.restart(index);
                }
            }
        }
        self.form_when_loaded();
    }

    fn restart(&mut self, node: usize) {
        let member = &mut self.members[node];
        let Some(restart) = member.node.restart.clone() else { return };
        let damage = member.damage.take().zip(member.node.repair.clone());
        let (incarnation, recovery, events) =
            (member.incarnation, self.recoveries, self.events.clone());
        let start = move || {
            let repaired = damage.map_or(Ok(()), |(damage, repair)| {
                repair().map_err(|why| RestartError::Unrepaired(format!("{damage}; {why}")))
            });
            let restarted = repaired.and_then(|()| restart(recovery));
            // A supervisor that is gone drops the event, and with it ends the process.
            let _ = events.send(SupervisorEvent::Rank {
                node,
                incarnation,
                event: RankEvent::Restarted(restarted),
            });
        };
        let name = format!("start-{}", member.node.name);
        match thread::Builder::new().name(name).spawn(start) {
            Ok(_) => self.starting += 1,
            Err(error) => self.lose(node, format!("no thread to start it: {error}")),
        }
    }

    pub(super) fn read_restarted(
        &mut self,
        node: usize,
        restarted: Result<Restarted, RestartError>,
    ) {
        let (announcement, process) = match restarted {
            Ok(restarted) => restarted,
            Err(error @ RestartError::Unreachable(_)) => return self.await_node(node, &error),
            Err(error @ RestartError::Failed(_)) => return self.lose(node, error.to_string()),
            Err(RestartError::Unrepaired(reason)) => {
                let (rank, node) = self.members[node].names();
                return self.fail(ServeError::Package { rank, node, reason });
            }
            Err(error @ RestartError::Taken(_)) => {
                let (rank, node) = self.members[node].names();
                return self.fail(ServeError::Lost { rank, node, reason: error.to_string() });
            }
        };
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let timeout = self.options.connect_timeout;
        // Loading begins now.
        self.enter(Phase::Loading);
        let member = &mut self.members[node];
        member.is_absent = false;
        member.node.announcement = announcement;
        member.node.process = process;
        let place = (node, member.incarnation);
        if let Err(error) = start_reader(place, &member.node, timeout, &self.events) {
            self.lose(node, format!("no thread to read from it: {error}"));
        }
    }

    /// Its node does not answer: it is tried again until it does, however long that takes.
    fn await_node(&mut self, index: usize, error: &RestartError) {
        if matches!(self.phase, Phase::Failed(_)) {
            return;
        }
        let options = self.options.recovery;
        let member = &mut self.members[index];
        member.is_absent = true;
        let pause = member.attempts.unreached(&options);
        member.retire(Instant::now() + pause);
        let (rank, node) = member.names();
        let error = ServeError::Lost { rank, node, reason: error.to_string() };
        self.show(format!("{error}; it is tried again until its node answers"));
    }
}
