//! Compiling within bounds. A compilation cannot be interrupted, only left to its own limits, so
//! there are never more than a few at once: whoever finds none free waits until the deadline.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};

/// Grammars that are compiled at once, those included that nobody waits for any more.
const THREADS_MAX: u32 = 2;
/// Schemas nest, and the compiler recurses with them.
const STACK_BYTES: usize = 16 << 20;

/// Why there is no matcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CompileError {
    /// The compiler's own words.
    Refused(String),
    /// It took too long.
    Timeout,
    /// Every thread was busy until the deadline.
    Busy,
}

/// The compiler of one vocabulary.
pub(super) struct Compiler {
    factory: Arc<ParserFactory>,
    running: Arc<Running>,
}

/// Compilations that have not ended.
#[derive(Default)]
struct Running {
    count: Mutex<u32>,
    ended: Condvar,
}

/// A compilation slot.
struct Slot(Arc<Running>);

impl Running {
    /// A slot, once one is free.
    fn enter(self: &Arc<Self>, deadline: Instant) -> Option<Slot> {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count >= THREADS_MAX {
            let left = deadline.checked_duration_since(Instant::now())?;
            let waited = self.ended.wait_timeout(count, left);
            count = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *count += 1;
        Some(Slot(Arc::clone(self)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

impl Compiler {
    pub(super) fn new(factory: ParserFactory) -> Self {
        Self { factory: Arc::new(factory), running: Arc::default() }
    }

    /// A matcher at the beginning of a grammar, or why there is none by then.
    pub(super) fn compile(
        &self,
        grammar: TopLevelGrammar,
        timeout: Duration,
    ) -> Result<Matcher, CompileError> {
        let factory = Arc::clone(&self.factory);
        self.run(timeout, move |is_given_up| {
            let parser = factory.create_parser(grammar).map_err(|error| format!("{error:#}"))?;
            if is_given_up() {
                return Err("the request timed out".to_owned());
            }
            Ok(Matcher::new(Ok(parser)))
        })
    }

    fn run<T: Send + 'static>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, String> + Send + 'static,
    ) -> Result<T, CompileError> {
        let deadline = Instant::now() + timeout;
        let slot = self.running.enter(deadline).ok_or(CompileError::Busy)?;
        let given_up = Arc::new(AtomicBool::new(false));
        let is_given_up = Arc::clone(&given_up);
        let (sender, receiver) = mpsc::channel();
        let builder = std::thread::Builder::new().name("grammar".to_owned());
        let thread = builder.stack_size(STACK_BYTES).spawn(move || {
            // Held to the thread's end, a panic's included.
            let _slot = slot;
            let done = work(&|| is_given_up.load(Ordering::Relaxed));
            // Nobody may be waiting any more.
            let _ = sender.send(done);
        });
        thread.map_err(|error| CompileError::Refused(error.to_string()))?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(message)) => Err(CompileError::Refused(message)),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                given_up.store(true, Ordering::Relaxed);
                Err(CompileError::Timeout)
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(CompileError::Refused("the grammar is too complex".to_owned()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use llguidance::toktrie::ApproximateTokEnv;

    use super::*;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn those_that_outlast_their_deadline_keep_their_places_and_no_more_begin() {
        let tokens = ApproximateTokEnv::single_byte_env();
        let compiler = Compiler::new(ParserFactory::new_simple(&tokens).unwrap());
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let (told, tells) = mpsc::channel();
        for _ in 0..THREADS_MAX {
            let (released, told) = (Arc::clone(&released), told.clone());
            let stuck = compiler.run(SHORT, move |is_given_up| {
                let _ = released.lock().unwrap().recv();
                told.send(is_given_up()).unwrap();
                Ok(())
            });
            assert_eq!(stuck.unwrap_err(), CompileError::Timeout);
        }
        let refused = compiler.run(SHORT, |_| -> Result<(), String> { panic!("it must not run") });
        assert_eq!(refused.unwrap_err(), CompileError::Busy);
        drop(release);
        let done = compiler.run(LONG, |_| Ok(7));
        assert_eq!(done.unwrap(), 7);
        for _ in 0..THREADS_MAX {
            assert!(tells.recv_timeout(LONG).unwrap(), "they know that nobody waits");
        }
        let refused = compiler.run(LONG, |_| -> Result<(), String> { Err("no".to_owned()) });
        assert_eq!(refused.unwrap_err(), CompileError::Refused("no".to_owned()));
    }
}
