//! Recovery from a lost rank: its requests fail, the rank is started again, and all ranks form the
//! group of the next epoch. Before the group has served, and after too many attempts, the group
//! fails.

use std::{thread, time::Instant};

use super::{
    super::{RankEvent, Restarted, ServeError, SupervisorEvent, Survivors, start_reader},
    Core, EXIT_TIMEOUT, EngineState, Phase,
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
        let Some((pause, attempt)) = self.members[index].attempts.next(&options) else {
            let attempts = options.attempts;
            return self.fail(ServeError::GivenUp { attempts, last: Box::new(error) });
        };
        let at = Instant::now() + pause;
        match options.survivors {
            Survivors::Stay => self.members[index].retire(at),
            Survivors::Restart => self.members.iter_mut().for_each(|member| member.retire(at)),
        }
        let most = options.attempts;
        self.interrupt(&error, &format!("it is started again (attempt {attempt} of {most})"));
    }

    /// The group is lost and no rank is: they form the next one.
    fn form_again(&mut self, error: ServeError) {
        self.reset_attempts_when_steady();
        let options = self.options.recovery;
        let Some((pause, attempt)) = self.attempts.next(&options) else {
            let attempts = options.attempts;
            return self.fail(ServeError::GivenUp { attempts, last: Box::new(error) });
        };
        self.form_at = Instant::now() + pause;
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

    /// Ends the running requests; until there is a group again, others are refused.
    fn interrupt(&mut self, error: &ServeError, doing: &str) {
        let message = error.to_string();
        // First the status, so that a client that sees the loss finds it there.
        self.handle.update_status(|status| {
            status.state = EngineState::Starting(format!("{message}; {doing}"));
            status.active_requests = 0;
        });
        self.outcome.clear();
        self.fail_requests(&message);
        self.recoveries += 1;
        self.pending_loss = None;
        self.enter(Phase::Loading);
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
        let member = &self.members[node];
        let Some(restart) = member.node.restart.clone() else { return };
        let (incarnation, recovery, events) =
            (member.incarnation, self.recoveries, self.events.clone());
        let start = move || {
            let restarted = restart(recovery);
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

    pub(super) fn read_restarted(&mut self, node: usize, restarted: Result<Restarted, String>) {
        let (announcement, process) = match restarted {
            Ok(restarted) => restarted,
            Err(reason) => return self.lose(node, format!("it cannot be started again: {reason}")),
        };
        let timeout = self.options.connect_timeout;
        let member = &mut self.members[node];
        member.node.announcement = announcement;
        member.node.process = process;
        let place = (node, member.incarnation);
        if let Err(error) = start_reader(place, &member.node, timeout, &self.events) {
            self.lose(node, format!("no thread to read from it: {error}"));
        }
    }
}
