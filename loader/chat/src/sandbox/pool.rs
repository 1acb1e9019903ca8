//! The sandboxes of one model: as many as requests need at once, up to a few, each with one request at
//! a time. One that ends is replaced in the background; where they keep ending, after a pause.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    error::{Cause, SandboxError, Work},
    process::{Process, SandboxProgram, time},
    wire::Frame,
};

/// Most processes of one model: each holds its tokenizer, 100 MiB of the largest.
const PROCESSES_MAX: usize = 4;
/// Ends in a row, without an answer between them, after which they are started with a pause.
const ENDS_BEFORE_PAUSE: u32 = 3;
/// The first pause, and the longest; each is twice as long as the one before.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_mins(1);

/// The sandboxes of one model, which end with it.
pub struct Sandbox(Arc<Inner>);

struct Inner {
    program: SandboxProgram,
    /// Opens the model in a new process.
    open: Frame,
    most: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    idle: Vec<Process>,
    /// All of them: idle, at work and being started.
    processes: usize,
    starting: usize,
    /// Ends since the last answer, and how the last one was.
    ends: u32,
    last: Option<Cause>,
    /// When the next may be started.
    pause: Option<Instant>,
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
            most: cores.clamp(2, PROCESSES_MAX),
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
        let time = time(request);
        let mut process = Inner::take(&self.0, time)?;
        match process.exchange(request, time) {
            Ok(reply) => {
                self.0.give_back(process);
                Ok(reply)
            }
            Err(cause) => {
                drop(process);
                Inner::ended(&self.0, &cause);
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

    /// A process without work, within `time`.
    fn take(self: &Arc<Self>, time: Duration) -> Result<Process, SandboxError> {
        let deadline = Instant::now() + time;
        let mut state = self.state();
        loop {
            while let Some(mut process) = state.idle.pop() {
                if process.is_running() {
                    return Ok(process);
                }
                // Somebody else ended it.
                state.processes -= 1;
            }
            let pause = state.pause.map(|pause| pause.saturating_duration_since(Instant::now()));
            let wait = pause.filter(|wait| !wait.is_zero());
            if state.processes == 0
                && let (Some(wait), Some(cause)) = (wait, state.last.clone())
            {
                return Err(SandboxError::Resting { cause, wait });
            }
            // One that is being started serves the next who waits.
            if state.starting == 0 && state.processes < self.most && wait.is_none() {
                self.start_another(&mut state);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SandboxError::Busy(time));
            }
            let waited = self.changed.wait_timeout(state, wait.map_or(left, |wait| wait.min(left)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn give_back(&self, process: Process) {
        let mut state = self.state();
        state.ends = 0;
        state.pause = None;
        if state.is_closed {
            drop(state);
            drop(process);
            return;
        }
        state.idle.push(process);
        drop(state);
        self.changed.notify_one();
    }

    /// A process has ended; another one is started unless too many have.
    fn ended(self: &Arc<Self>, cause: &Cause) {
        let mut state = self.state();
        state.processes -= 1;
        state.count(cause);
        if state.pause.is_none() && state.processes == 0 {
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
                    state.count(&cause);
                    // The system has no process to give: the next is not tried at once.
                    state.pause = state.pause.or(Some(Instant::now() + PAUSE));
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

impl State {
    /// Counts an end, and pauses where there were several.
    fn count(&mut self, cause: &Cause) {
        self.ends = self.ends.saturating_add(1);
        self.last = Some(cause.clone());
        let more = self.ends.checked_sub(ENDS_BEFORE_PAUSE);
        self.pause = more.map(|more| {
            let pause = PAUSE.saturating_mul(1 << more.min(16)).min(PAUSE_MAX);
            Instant::now() + pause
        });
    }
}
