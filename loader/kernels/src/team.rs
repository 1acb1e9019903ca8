//! The threads that kernels run on, and what else a caller chooses for all kernels of a step.
//!
//! A step has hundreds of parallel pieces of some tens of microseconds each, so handing one out
//! must cost about a microsecond: waiting threads spin for a moment before they sleep. An idle
//! team uses no processor time.

use std::{
    cell::RefCell,
    io,
    ops::Range,
    thread,
    time::{Duration, Instant},
};

mod jobs;
mod prefetch;
mod split;

use std::sync::Arc;

use shardpack_quantize::Platform;

use jobs::Jobs;
pub(crate) use split::{Columns, chunks, columns_of_all, parts};

/// How long a thread without work spins before it sleeps: longer than what lies between two
/// products of a step, shorter than what anybody notices in the processor's load.
const SPIN: Duration = Duration::from_micros(100);

/// What activations are when they meet quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Rounded to 8 bits with one scale per group of inputs: as fast as memory allows.
    Int8,
    /// As they are.
    F32,
}

/// What a team is made of.
#[derive(Clone, Copy, Debug)]
pub struct TeamOptions {
    /// Threads, the caller's included.
    pub threads: usize,
    /// Instructions they use.
    pub platform: Platform,
    /// Form of activations before quantized weights.
    pub activations: Activations,
}

/// Threads that work together. Clones are handles on the same threads.
#[derive(Clone)]
pub struct Team {
    inner: Arc<Inner>,
}

struct Inner {
    options: TeamOptions,
    jobs: Arc<Jobs>,
    threads: Vec<thread::JoinHandle<()>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Team>> = const { RefCell::new(None) };
}

impl Team {
    /// Starts the threads.
    ///
    /// # Panics
    /// When the platform is not available on this machine.
    pub fn new(options: &TeamOptions) -> io::Result<Self> {
        let platform = options.platform;
        assert!(platform.is_available(), "{platform} code was asked for on a machine without it");
        let others = options.threads.max(1) - 1;
        let jobs = Arc::new(Jobs::new(others));
        let mut inner = Inner { options: *options, jobs, threads: Vec::with_capacity(others) };
        for index in 0..others {
            let jobs = Arc::clone(&inner.jobs);
            let name = format!("kernels-{}", index + 1);
            let work = move || jobs.serve(index, SPIN);
            inner.threads.push(thread::Builder::new().name(name).spawn(work)?);
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What the team is made of.
    #[must_use]
    pub fn options(&self) -> &TeamOptions {
        &self.inner.options
    }

    /// Calls `work`; kernels that it calls on this thread use the team.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        struct Restore(Option<Team>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.with(|current| current.replace(self.0.take()));
            }
        }
        let _restore = Restore(CURRENT.with(|current| current.replace(Some(self.clone()))));
        work()
    }

    /// Calls `work` with `0..tasks`, in any order and on any thread, and returns when all is done.
    fn each(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        self.inner.jobs.carry_out(tasks, work);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.jobs.stop();
        for thread in self.threads.drain(..) {
            // A thread's panic has been passed on with its job.
            let _ = thread.join();
        }
    }
}

/// The team of this thread's [`Team::run`]. Outside of one: this thread alone, the machine's best
/// instructions, exact activations.
pub(crate) fn current() -> Current {
    let team = CURRENT.with(|current| current.borrow().clone());
    match team {
        Some(team) => {
            let TeamOptions { threads, platform, activations } = *team.options();
            Current { threads, platform, activations, team: Some(team) }
        }
        None => Current {
            threads: 1,
            platform: Platform::detect(),
            activations: Activations::F32,
            team: None,
        },
    }
}

/// What kernels of this thread use.
pub(crate) struct Current {
    pub(crate) threads: usize,
    pub(crate) platform: Platform,
    pub(crate) activations: Activations,
    team: Option<Team>,
}

impl Current {
    /// As [`Team::each`].
    fn each(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        match &self.team {
            Some(team) => team.each(tasks, work),
            None => (0..tasks).for_each(work),
        }
    }

    /// Tells each of the other threads which addresses it will read in the job after the next one,
    /// so that it fetches them while it waits.
    pub(crate) fn announce(&self, runs: &[Vec<Range<usize>>]) {
        let prefetches = self.team.iter().flat_map(|team| team.inner.jobs.prefetches());
        for (prefetch, runs) in prefetches.zip(runs) {
            prefetch.announce(runs);
        }
    }

    /// Units of one task when `units` of `cost` elementary operations each are shared out: several
    /// tasks per thread, as threads are not equally fast and all wait for the last, but none that
    /// is not worth the handing over.
    pub(crate) fn units_per_task(&self, units: usize, cost: usize) -> usize {
        /// Operations (some microseconds) below which another thread costs more than it saves.
        const MIN_COST: usize = 1 << 15;
        const TASKS_PER_THREAD: usize = 16;
        let fewest = MIN_COST.div_ceil(cost.max(1));
        if self.threads <= 1 || units <= fewest {
            return units.max(1);
        }
        units.div_ceil(self.threads * TASKS_PER_THREAD).max(fewest)
    }
}

/// Whether a wait that began at `since` has lasted `limit`; asked rarely, as clocks cost.
fn has_lasted(since: &mut Option<Instant>, limit: Duration) -> bool {
    since.get_or_insert_with(Instant::now).elapsed() >= limit
}

#[cfg(test)]
mod tests;
