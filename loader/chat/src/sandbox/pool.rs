//! The sandboxes of one model: as many as requests need at once, up to a few, each with one request at
//! a time, in their tenants' turns. One that ends is replaced in the background; where they keep ending,
//! after a pause: of the tenant where its requests cost too much, else of the model.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    error::{Cause, SandboxError, Work},
    process::{Process, SandboxProgram, time},
    turns::{Ends, PAUSE, TenantEnds, Turns, tenant},
    wire::Frame,
};

/// Most processes of one model for one tenant: each holds its tokenizer, 100 MiB of the largest. One more
/// is started when another tenant waits.
const PROCESSES_MAX: usize = 4;

/// The sandboxes of one model, which end with it.
pub struct Sandbox(Arc<Inner>);

struct Inner {
    program: SandboxProgram,
    /// Opens the model in a new process.
    open: Frame,
    /// Most processes of one tenant.
    most_of_one: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    idle: Vec<Process>,
    /// All of them: idle, at work and being started.
    processes: usize,
    starting: usize,
    turns: Turns,
    /// Ends that the model is to blame for: the next process is started after their pause.
    ends: Ends,
    tenant_ends: TenantEnds,
    is_closed: bool,
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let idle = {
            let mut state = self.0.state();
            state.is_closed = true;
            std::mem::take(&mut state.idle)
        };
        drop(idle);
    }
}

impl Sandbox {
    /// Starts the first process and opens a model in it; returns its answer.
    pub fn open(program: &SandboxProgram, open: Frame) -> Result<(Self, Frame), SandboxError> {
        let (process, reply) = start(program, &open)?;
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let state = State { idle: vec![process], processes: 1, ..State::default() };
        let inner = Inner {
            program: program.clone(),
            open,
            most_of_one: cores.clamp(2, PROCESSES_MAX),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Ok((Self(Arc::new(inner)), reply))
    }

    /// Asks one of the processes, and another one where the first is killed meanwhile: that may have had nothing to
    /// do with the request.
    pub fn ask(&self, request: &Frame) -> Result<Frame, SandboxError> {
        match self.ask_one(request) {
            Err(SandboxError::Died { cause: Cause::Killed, .. }) => self.ask_one(request),
            other => other,
        }
    }

    fn ask_one(&self, request: &Frame) -> Result<Frame, SandboxError> {
        let (time, tenant) = (time(request), tenant());
        let mut process = Inner::take(&self.0, time, tenant)?;
        match process.exchange(request, time) {
            Ok(reply) => {
                self.0.give_back(process, tenant);
                Ok(reply)
            }
            Err(cause) => {
                drop(process);
                Inner::ended(&self.0, &cause, tenant);
                Err(SandboxError::Died { work: Work::Prompt, cause })
            }
        }
    }
}

/// A process in which a model is open, and its answer to that.
fn start(program: &SandboxProgram, open: &Frame) -> Result<(Process, Frame), SandboxError> {
    let mut process = Process::start(program, open.body.len())?;
    let opened = process.exchange(open, time(open));
    let opened = opened.map_err(|cause| SandboxError::Died { work: Work::Opening, cause })?;
    process.limit_request()?;
    Ok((process, opened))
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process without work, within `time`, in the tenant's turn.
    fn take(self: &Arc<Self>, time: Duration, tenant: u64) -> Result<Process, SandboxError> {
        let mut state = self.state();
        if let Some((cause, wait)) = state.tenant_ends.wait(tenant, Instant::now()) {
            return Err(SandboxError::Resting { cause, wait });
        }
        let ticket = state.turns.queue(tenant);
        let (mut state, taken) = self.wait_for_turn(state, ticket, Instant::now() + time);
        if taken.is_ok() {
            state.turns.begin(ticket);
        } else {
            state.turns.leave(ticket);
        }
        drop(state);
        // Another one may be next now.
        self.changed.notify_all();
        taken.map_err(|error| error.unwrap_or(SandboxError::Busy(time)))
    }

    /// Waits until it is the ticket's turn and a process is free; no error is the deadline.
    fn wait_for_turn<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        ticket: u64,
        deadline: Instant,
    ) -> (MutexGuard<'a, State>, Result<Process, Option<SandboxError>>) {
        loop {
            let next = state.turns.next(self.most_of_one);
            while next == Some(ticket)
                && let Some(mut process) = state.idle.pop()
            {
                if process.is_running() {
                    return (state, Ok(process));
                }
                // Somebody else ended it.
                state.processes -= 1;
            }
            let wait = state.ends.wait(Instant::now());
            if state.processes == 0
                && let (Some(wait), Some(cause)) = (wait, state.ends.last.clone())
            {
                return (state, Err(Some(SandboxError::Resting { cause, wait })));
            }
            // One that is being started serves the next who waits.
            let is_needed = next.is_some() && state.idle.is_empty() && state.starting == 0;
            if is_needed && state.processes <= self.most_of_one && wait.is_none() {
                self.start_another(&mut state);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (state, Err(None));
            }
            let waited = self.changed.wait_timeout(state, wait.map_or(left, |wait| wait.min(left)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_back(&self, process: Process, tenant: u64) {
        let mut state = self.state();
        state.turns.end(tenant);
        state.tenant_ends.answered(tenant);
        state.ends = Ends::default();
        if state.is_closed {
            drop(state);
            drop(process);
            return;
        }
        state.idle.push(process);
        drop(state);
        self.changed.notify_all();
    }

    /// A process has ended on a tenant's request; another one is started unless too many have.
    fn ended(self: &Arc<Self>, cause: &Cause, tenant: u64) {
        let mut state = self.state();
        state.processes -= 1;
        state.turns.end(tenant);
        if cause.is_expense() {
            state.tenant_ends.count(tenant, cause, Instant::now());
        } else {
            state.ends.count(cause, Instant::now());
        }
        if state.ends.pause.is_none() && state.processes == 0 {
            self.start_another(&mut state);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Starts a process in the background.
    fn start_another(self: &Arc<Self>, state: &mut State) {
        if state.is_closed {
            return;
        }
        state.processes += 1;
        state.starting += 1;
        let own = Arc::clone(self);
        let starts = thread::Builder::new().name("sandbox".to_owned()).spawn(move || {
            let started = start(&own.program, &own.open);
            let mut state = own.state();
            state.starting -= 1;
            match started {
                Ok((process, _)) if !state.is_closed => state.idle.push(process),
                Ok(_) => state.processes -= 1,
                Err(error) => {
                    state.processes -= 1;
                    let cause = match error {
                        SandboxError::Died { cause, .. } => cause,
                        error => Cause::Ended(error.to_string()),
                    };
                    state.ends.count(&cause, Instant::now());
                    // The system has no process to give: the next is not tried at once.
                    state.ends.pause = state.ends.pause.or(Some(Instant::now() + PAUSE));
                }
            }
            drop(state);
            own.changed.notify_all();
        });
        if starts.is_err() {
            state.processes -= 1;
            state.starting -= 1;
        }
    }
}
