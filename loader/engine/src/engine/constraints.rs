//! Constraints beside the steps: threads of low priority compile them and compute their masks, while
//! steps go on. What is compiled when, and which sequence waits for a mask, is the schedule's.
//!
//! A large schema takes a hundred milliseconds to compile and several for a mask; on the thread of the
//! steps every stream would wait for both.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use shardpack_engine_api::{
    Constraint, ConstraintError, ConstraintFactory, ConstraintSource, TokenMask,
};

/// Threads that compute masks. Streams with constraints share them; steps come first.
const MASK_THREADS: usize = 2;

/// How much lower the priority of these threads is than that of the steps' (Unix's `nice`): where
/// there are no more cores than threads of a step, each costs a step a thirtieth at most. Lower
/// still, and a machine that other programs keep busy would hardly compile.
const NICE: i32 = 15;

/// Names a piece of work; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// Work that is done.
pub(super) enum Done {
    /// A constraint was compiled, or not.
    Compiled {
        ticket: Ticket,
        result: Result<Box<dyn Constraint>, ConstraintError>,
        /// Processor time that it took.
        took: Duration,
    },
    /// The mask of a constraint's next token.
    Masked { ticket: Ticket, constraint: Box<dyn Constraint>, mask: ReadyMask },
}

/// The mask of a sequence's next token.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReadyMask {
    /// `None` allows every token.
    pub(super) mask: Result<Option<TokenMask>, String>,
    pub(super) took: Duration,
}

struct MaskJob {
    ticket: Ticket,
    constraint: Box<dyn Constraint>,
    vocab_size: u32,
}

/// The threads. They end when this is dropped and what they are at is done.
pub(super) struct Constraints {
    next: u64,
    compile: Sender<(Ticket, ConstraintSource)>,
    masks: Sender<MaskJob>,
    done: Receiver<Done>,
}

impl Constraints {
    /// Threads for the constraints that `factory` makes.
    pub(super) fn new(factory: Box<dyn ConstraintFactory>) -> Self {
        let (done, received) = mpsc::channel();
        let (compile, sources) = mpsc::channel();
        let (masks, jobs) = mpsc::channel();
        spawn("constraints", {
            let done = done.clone();
            move || compile_all(factory.as_ref(), &sources, &done)
        });
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..MASK_THREADS {
            let (jobs, done) = (Arc::clone(&jobs), done.clone());
            spawn("masks", move || mask_all(&jobs, &done));
        }
        Self { next: 0, compile, masks, done: received }
    }

    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    /// Compiles a constraint.
    pub(super) fn compile(&mut self, source: ConstraintSource) -> Ticket {
        let ticket = self.ticket();
        // Without the thread `take` says so.
        let _ = self.compile.send((ticket, source));
        ticket
    }

    /// Computes the mask of a constraint's next token.
    pub(super) fn mask(&mut self, constraint: Box<dyn Constraint>, vocab_size: u32) -> Ticket {
        let ticket = self.ticket();
        let _ = self.masks.send(MaskJob { ticket, constraint, vocab_size });
        ticket
    }

    /// The next piece of work that is done, waited for until `deadline`.
    pub(super) fn take(&self, deadline: Option<Instant>) -> Option<Done> {
        let Some(deadline) = deadline else {
            return self.done.try_recv().ok();
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.done.recv_timeout(left).ok()
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    let body = move || {
        lower_priority();
        work();
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    thread.expect("the system gives a thread when an engine is made");
}

/// Lowers the priority of this thread, and of those that it starts, where that is possible for one
/// thread alone.
fn lower_priority() {
    // Elsewhere the call is about the whole process.
    #[cfg(target_os = "linux")]
    {
        // Without it the work is done all the same.
        let _ = rustix::process::setpriority_process(None, NICE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = NICE;
}

fn compile_all(
    factory: &dyn ConstraintFactory,
    sources: &Receiver<(Ticket, ConstraintSource)>,
    done: &Sender<Done>,
) {
    for (ticket, source) in sources {
        // A bug in it is one request's affair.
        let built = catch_unwind(AssertUnwindSafe(|| factory.build_timed(&source)));
        let failed = |_| {
            (Err(ConstraintError("compiling the constraint failed".to_owned())), Duration::ZERO)
        };
        let (result, took) = built.unwrap_or_else(failed);
        if done.send(Done::Compiled { ticket, result, took }).is_err() {
            return;
        }
    }
}

fn mask_all(jobs: &Mutex<Receiver<MaskJob>>, done: &Sender<Done>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(MaskJob { ticket, mut constraint, vocab_size }) = job else { return };
        let masked = catch_unwind(AssertUnwindSafe(|| timed_mask(constraint.as_mut(), vocab_size)));
        let mask = masked.unwrap_or_else(|_| ReadyMask {
            mask: Err("computing the mask of the constraint failed".to_owned()),
            took: Duration::ZERO,
        });
        if done.send(Done::Masked { ticket, constraint, mask }).is_err() {
            return;
        }
    }
}

/// Computes a mask, and how long that takes.
pub(super) fn timed_mask(constraint: &mut dyn Constraint, vocab_size: u32) -> ReadyMask {
    let begun = Instant::now();
    let mask = mask(constraint, vocab_size);
    ReadyMask { mask, took: begun.elapsed() }
}

/// The mask of the next token; `None` allows every token.
fn mask(constraint: &mut dyn Constraint, vocab_size: u32) -> Result<Option<TokenMask>, String> {
    let mut mask = TokenMask::all(vocab_size);
    constraint.mask(&mut mask).map_err(|error| error.to_string())?;
    if mask.vocab_size() != vocab_size || mask.count() == 0 {
        return Err("the constraint allows no token here".to_owned());
    }
    // One that forbids nothing need not travel.
    Ok((!mask.is_all()).then_some(mask))
}
