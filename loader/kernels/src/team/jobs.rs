//! One job at a time, handed to several threads task by task.
//!
//! Every thread has a share of the tasks, consecutive ones, and takes them in order: where tasks
//! are rows of a matrix it reads on where it has just read, which is what fetches ahead and the
//! processor's own reading ahead count on. Who has done its share takes the others' last tasks.
//!
//! A share holds the number of the job and which tasks of it nobody has taken. A task is taken by
//! exchanging the share for a smaller one, which fails if either has changed, so a thread that
//! wakes late cannot take a task of a job that is over.

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

use super::{
    has_lasted,
    prefetch::{Cursor, Prefetch},
};

/// Looks at the shares between two looks at the clock.
const LOOKS: u32 = 64;

/// Spins of the caller before it lets others have the processor: the last tasks are under way, so
/// only a thread that the system has set aside takes longer.
const CALLER_SPINS: u32 = 1 << 14;

/// Tasks of a job whose numbers a share has room for.
const MOST_TASKS: usize = u16::MAX as usize;

pub(super) struct Jobs {
    /// One for each thread, the caller's first.
    shares: Box<[Share]>,
    job: AtomicPtr<Job<'static>>,
    finished: AtomicUsize,
    stopped: AtomicBool,
    sleepers: Box<[Sleeper]>,
    /// What each of the other threads will read next.
    prefetches: Box<[Prefetch]>,
    /// Held by who hands out a job; the number of the last one.
    turn: Mutex<u32>,
}

/// Number of the job in the upper half, then the end of what nobody has taken, then its first
/// task. Two cache lines, which processors fetch together.
#[repr(align(128))]
#[derive(Default)]
struct Share(AtomicU64);

impl Share {
    fn give(&self, number: u32, first: usize, end: usize) {
        let share = u64::from(number) << 32 | (end as u64) << 16 | first as u64;
        self.0.store(share, Ordering::SeqCst);
    }

    fn is_empty(&self, ordering: Ordering) -> bool {
        let [first, end] = range(self.0.load(ordering));
        first >= end
    }

    /// Takes a task: the first for the owner, the last for others.
    fn take(&self, is_owner: bool) -> Option<usize> {
        let mut share = self.0.load(Ordering::Acquire);
        loop {
            let [first, end] = range(share);
            if first >= end {
                return None;
            }
            let (task, rest) =
                if is_owner { (first, share + 1) } else { (end - 1, share - (1 << 16)) };
            let taken = self.0.compare_exchange(share, rest, Ordering::AcqRel, Ordering::Acquire);
            match taken {
                Ok(_) => return Some(task),
                Err(now) => share = now,
            }
        }
    }
}

/// First task of a share, and the end.
const fn range(share: u64) -> [usize; 2] {
    let half = u16::MAX as u64;
    [(share & half) as usize, (share >> 16 & half) as usize]
}

#[derive(Default)]
struct Sleeper {
    asleep: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    panicked: AtomicBool,
}

impl Jobs {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            shares: (0..=threads).map(|_| Share::default()).collect(),
            job: AtomicPtr::new(ptr::null_mut()),
            finished: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            sleepers: (0..threads).map(|_| Sleeper::default()).collect(),
            prefetches: (0..threads).map(|_| Prefetch::default()).collect(),
            turn: Mutex::new(0),
        }
    }

    /// Calls `work` with `0..tasks` on the caller and the other threads; returns when all is
    /// done. Alone, and within a job, the caller does everything.
    pub(super) fn carry_out(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.sleepers.is_empty() || tasks > MOST_TASKS {
            return (0..tasks).for_each(work);
        }
        let mut turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..tasks).for_each(work),
        };
        let job = Job { work, panicked: AtomicBool::new(false) };
        self.job.store(ptr::from_ref(&job).cast_mut().cast(), Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
        *turn = turn.wrapping_add(1);
        // Publishes the two stores above. Sequentially consistent, as is what a thread does that
        // falls asleep: either it sees its share or we see that it sleeps.
        let count = self.shares.len();
        for (index, share) in self.shares.iter().enumerate().rev() {
            share.give(*turn, tasks * index / count, tasks * (index + 1) / count);
        }
        self.wake(tasks - 1);
        self.carry_out_all(0);
        let mut spins = 0_u32;
        while self.finished.load(Ordering::Acquire) < tasks {
            spins = spins.saturating_add(1);
            if spins < CALLER_SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        assert!(!job.panicked.load(Ordering::Relaxed), "a kernel panicked on one of its threads");
    }

    /// Carries out tasks, first those of the thread's own share, until all are taken; whether
    /// there were any.
    fn carry_out_all(&self, own: usize) -> bool {
        let mut done = 0;
        while let Some(task) = self.take(own) {
            // SAFETY: a task of the current job has been taken and is not finished, so
            // `carry_out` has not returned and what it points to is alive.
            let job = unsafe { &*self.job.load(Ordering::Relaxed) };
            if panic::catch_unwind(AssertUnwindSafe(|| (job.work)(task))).is_err() {
                job.panicked.store(true, Ordering::Relaxed);
            }
            done += 1;
        }
        // From here on the job may be gone. Counted once, since a line that all threads write to
        // costs as much as a small task.
        if done > 0 {
            self.finished.fetch_add(done, Ordering::Release);
        }
        done > 0
    }

    /// Of each thread but the caller what it will read next.
    pub(super) fn prefetches(&self) -> &[Prefetch] {
        &self.prefetches
    }

    fn take(&self, own: usize) -> Option<usize> {
        let count = self.shares.len();
        let others = (1..count).map(|step| (own + step) % count);
        self.shares[own]
            .take(true)
            .or_else(|| others.into_iter().find_map(|other| self.shares[other].take(false)))
    }

    /// Carries out tasks until [`Jobs::stop`].
    pub(super) fn serve(&self, index: usize, spin: Duration) {
        let sleeper = &self.sleepers[index];
        *sleeper.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
            Some(thread::current());
        let mut idle_since = None;
        let mut cursor = Cursor::default();
        loop {
            let mut looks = 0;
            while looks < LOOKS {
                if self.carry_out_all(index + 1) {
                    idle_since = None;
                    looks = 0;
                } else if !cursor.fetch(&self.prefetches[index]) {
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
        let is_idle = || self.shares.iter().all(|share| share.is_empty(Ordering::SeqCst));
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
