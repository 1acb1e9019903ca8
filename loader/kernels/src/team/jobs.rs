//! One job at a time, handed to several threads task by task.
//!
//! `state` holds the number of the job and how many of its tasks nobody has taken. A task is
//! taken by decrementing it, which fails if either has changed, so a thread that wakes late
//! cannot take a task of a job that is over.

#![expect(unsafe_code, reason = "a job borrows from its caller, who waits until it is done")]

use std::{
    panic::{self, AssertUnwindSafe},
    ptr,
    sync::{
        Mutex, TryLockError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

use super::has_lasted;

/// Looks at the state between two looks at the clock.
const LOOKS: u32 = 64;

/// Spins of the caller before it lets others have the processor: the last tasks are under way, so
/// only a thread that the system has set aside takes longer.
const CALLER_SPINS: u32 = 1 << 14;

pub(super) struct Jobs {
    /// Number of the job in the upper half, tasks that nobody has taken in the lower.
    state: AtomicU64,
    job: AtomicPtr<Job<'static>>,
    finished: AtomicUsize,
    stopped: AtomicBool,
    sleepers: Box<[Sleeper]>,
    /// Held by who hands out a job.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Sleeper {
    asleep: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    panicked: AtomicBool,
}

impl Jobs {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(ptr::null_mut()),
            finished: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            sleepers: (0..threads).map(|_| Sleeper::default()).collect(),
            turn: Mutex::new(()),
        }
    }

    /// Calls `work` with `0..tasks` on the caller and the other threads; returns when all is
    /// done. Alone, and within a job, the caller does everything.
    pub(super) fn carry_out(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.sleepers.is_empty() || tasks > u32::MAX as usize {
            return (0..tasks).for_each(work);
        }
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..tasks).for_each(work),
        };
        let job = Job { work, tasks, panicked: AtomicBool::new(false) };
        self.job.store(ptr::from_ref(&job).cast_mut().cast(), Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // Publishes the two stores above. Sequentially consistent, as is what a thread does that
        // falls asleep: either it sees the job or we see that it sleeps.
        self.state.store(number << 32 | tasks as u64, Ordering::SeqCst);
        self.wake(tasks - 1);
        while self.carry_out_one() {}
        let mut spins = 0_u32;
        while self.finished.load(Ordering::Acquire) < tasks {
            spins = spins.saturating_add(1);
            if spins < CALLER_SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        assert!(!job.panicked.load(Ordering::Relaxed), "a kernel panicked on one of its threads");
    }

    /// Takes a task and carries it out, if there is one.
    fn carry_out_one(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        let left = (state & u64::from(u32::MAX)) as usize;
        if left == 0 {
            return false;
        }
        let taken =
            self.state.compare_exchange(state, state - 1, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            // SAFETY: a task of the current job has been taken and is not finished, so
            // `carry_out` has not returned and what it points to is alive.
            let job = unsafe { &*self.job.load(Ordering::Relaxed) };
            let work = AssertUnwindSafe(|| (job.work)(job.tasks - left));
            if panic::catch_unwind(work).is_err() {
                job.panicked.store(true, Ordering::Relaxed);
            }
            // From here on the job may be gone.
            self.finished.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// Carries out tasks until [`Jobs::stop`].
    pub(super) fn serve(&self, index: usize, spin: Duration) {
        let sleeper = &self.sleepers[index];
        *sleeper.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
            Some(thread::current());
        let mut idle_since = None;
        loop {
            let mut looks = 0;
            while looks < LOOKS {
                if self.carry_out_one() {
                    idle_since = None;
                    looks = 0;
                } else {
                    looks += 1;
                    std::hint::spin_loop();
                }
            }
            if self.stopped.load(Ordering::Acquire) {
                return;
            }
            if has_lasted(&mut idle_since, spin) {
                self.sleep(sleeper);
                idle_since = None;
            }
        }
    }

    fn sleep(&self, sleeper: &Sleeper) {
        sleeper.asleep.store(true, Ordering::SeqCst);
        let is_idle = || self.state.load(Ordering::SeqCst).trailing_zeros() >= 32;
        while is_idle() && !self.stopped.load(Ordering::SeqCst) {
            thread::park();
            if !sleeper.asleep.load(Ordering::SeqCst) {
                return;
            }
        }
        sleeper.asleep.store(false, Ordering::SeqCst);
    }

    /// Wakes up to `count` sleepers.
    fn wake(&self, count: usize) {
        let asleep = |sleeper: &&Sleeper| sleeper.asleep.swap(false, Ordering::SeqCst);
        for sleeper in self.sleepers.iter().filter(asleep).take(count) {
            let thread = sleeper.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(thread) = &*thread {
                thread.unpark();
            }
        }
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake(self.sleepers.len());
    }
}
