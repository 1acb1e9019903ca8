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

use super::{cache::Compiled, processor_time::ThreadClock};

/// Grammars that are compiled at once, those included that nobody waits for any more.
const THREADS_MAX: u32 = 2;
/// How often the processor time of a compilation is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
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

/// How long a compilation may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompileTime {
    /// Of a processor.
    pub(super) processor: Duration,
    /// On the clock, waiting for a free place included: where steps take all processors, compiling is
    /// slow.
    pub(super) clock: Duration,
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

    /// A matcher at the beginning of a grammar, or why there is none by then; and the processor time
    /// that it took.
    pub(super) fn compile(
        &self,
        grammar: TopLevelGrammar,
        most: CompileTime,
    ) -> (Result<Compiled, CompileError>, Duration) {
        let factory = Arc::clone(&self.factory);
        self.run(most, move |is_given_up| {
            let parser = factory.create_parser(grammar).map_err(|error| format!("{error:#}"))?;
            if is_given_up() {
                return Err("the request timed out".to_owned());
            }
            let lexer_bytes = parser.parser.lexer_stats().num_bytes;
            Ok(Compiled { matcher: Matcher::new(Ok(parser)), size_bytes: lexer_bytes })
        })
    }

    fn run<T: Send + 'static>(
        &self,
        most: CompileTime,
        work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, String> + Send + 'static,
    ) -> (Result<T, CompileError>, Duration) {
        let deadline = Instant::now() + most.clock;
        let Some(slot) = self.running.enter(deadline) else {
            return (Err(CompileError::Busy), Duration::ZERO);
        };
        let given_up = Arc::new(AtomicBool::new(false));
        let is_given_up = Arc::clone(&given_up);
        let (clocks, clock) = mpsc::channel();
        let (sender, receiver) = mpsc::channel();
        let builder = std::thread::Builder::new().name("grammar".to_owned());
        let thread = builder.stack_size(STACK_BYTES).spawn(move || {
            // Held to the thread's end, a panic's included.
            let _slot = slot;
            let clock = ThreadClock::start();
            let _ = clocks.send(clock.clone());
            let done = work(&|| is_given_up.load(Ordering::Relaxed));
            // Nobody may be waiting any more.
            let _ = sender.send((done, clock.elapsed()));
        });
        if let Err(error) = thread {
            return (Err(CompileError::Refused(error.to_string())), Duration::ZERO);
        }
        let mut running: Option<ThreadClock> = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left.min(LOOK_EVERY)) {
                Ok((Ok(done), took)) => return (Ok(done), took),
                Ok((Err(message), took)) => return (Err(CompileError::Refused(message)), took),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let message = "the grammar is too complex".to_owned();
                    return (Err(CompileError::Refused(message)), Duration::ZERO);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            running = running.or_else(|| clock.try_recv().ok());
            let took = running.as_ref().map_or(Duration::ZERO, ThreadClock::elapsed);
            if took > most.processor || Instant::now() >= deadline {
                given_up.store(true, Ordering::Relaxed);
                return (Err(CompileError::Timeout), took);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use llguidance::toktrie::ApproximateTokEnv;

    use super::*;

    const NEVER: Duration = Duration::from_hours(1000);
    const SHORT: CompileTime = CompileTime { processor: NEVER, clock: Duration::from_millis(1) };
    const LONG: CompileTime = CompileTime { processor: NEVER, clock: NEVER };

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
            assert_eq!(stuck.0.unwrap_err(), CompileError::Timeout);
        }
        let refused = compiler.run(SHORT, |_| -> Result<(), String> { panic!("it must not run") });
        assert_eq!(refused.0.unwrap_err(), CompileError::Busy);
        drop(release);
        let done = compiler.run(LONG, |_| Ok(7));
        assert_eq!(done.0.unwrap(), 7);
        for _ in 0..THREADS_MAX {
            assert!(tells.recv().unwrap(), "they know that nobody waits");
        }
        let refused = compiler.run(LONG, |_| -> Result<(), String> { Err("no".to_owned()) });
        assert_eq!(refused.0.unwrap_err(), CompileError::Refused("no".to_owned()));
    }

    #[test]
    fn a_compilation_ends_with_its_processor_time() {
        let tokens = ApproximateTokEnv::single_byte_env();
        let compiler = Compiler::new(ParserFactory::new_simple(&tokens).unwrap());
        let most = CompileTime { processor: Duration::from_millis(20), clock: NEVER };
        let (result, took) = compiler.run(most, |is_given_up| -> Result<(), String> {
            while !is_given_up() {
                std::hint::spin_loop();
            }
            Ok(())
        });
        assert_eq!(result.unwrap_err(), CompileError::Timeout);
        assert!(took >= most.processor, "{took:?}");
    }
}
