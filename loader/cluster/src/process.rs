//! Rank processes as children of the front's process: started, read, and never left behind.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use shardpack_collectives::Deadline;

use super::announce::{Announcement, FrontPresence, MAX_LINE_BYTES};

/// Takes a line that a child wrote for people: the child's name, then the line.
pub type LogSink = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// Last lines kept of a child, to say why it did not start.
const TAIL_LINES: usize = 5;

/// Between two looks at whether a child has ended: the standard library cannot wait for both an
/// end and a deadline.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a killed process may take to be gone.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the pipes of an ended child may take to be read out.
const PIPE_TIMEOUT: Duration = Duration::from_millis(200);

/// Why a rank process did not come up.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The system did not start it.
    #[error("{name} cannot be started")]
    Start {
        /// The child's name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// It ended before it announced its address.
    #[error("{name} ended before it was ready ({status}){last_words}")]
    Ended {
        /// The child's name.
        name: String,
        /// How it ended.
        status: ExitStatus,
        /// Its last lines, each on a new line; may be empty.
        last_words: String,
    },
    /// It did not announce its address in time.
    #[error("{name} did not announce its address within {} s", .waited.as_secs())]
    Timeout {
        /// The child's name.
        name: String,
        /// How long it was given.
        waited: Duration,
    },
}

/// Whether a rank has a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrontState {
    /// None has connected yet.
    Awaited,
    /// It has one.
    Present,
    /// Its last one is gone, and it keeps its weights for the next.
    Gone,
}

/// Tells whether a rank has a front, without its process at hand.
#[derive(Clone, Debug)]
pub struct FrontWatch(Arc<AtomicU8>);

impl FrontWatch {
    /// As the rank said last.
    #[must_use]
    pub fn state(&self) -> FrontState {
        match self.0.load(Ordering::SeqCst) {
            AWAITED => FrontState::Awaited,
            PRESENT => FrontState::Present,
            _ => FrontState::Gone,
        }
    }
}

/// A running child; killed when dropped.
#[derive(Debug)]
pub struct RankProcess {
    child: Child,
    /// [`AWAITED`], [`PRESENT`] or [`GONE`].
    front: Arc<AtomicU8>,
}

/// No front has connected yet.
const AWAITED: u8 = 0;
/// There is one.
const PRESENT: u8 = 1;
/// The last one is gone.
const GONE: u8 = 2;

impl RankProcess {
    /// Starts `command`, whose program and arguments the caller chose, and waits for its
    /// [`Announcement`]. Other output goes to `log`, line by line.
    pub fn spawn(
        name: &str,
        mut command: Command,
        timeout: Duration,
        log: LogSink,
    ) -> Result<(Self, Announcement), SpawnError> {
        let start = |source| SpawnError::Start { name: name.to_owned(), source };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let deadline = Deadline::after(timeout);
        let front = Arc::new(AtomicU8::new(AWAITED));
        let child = command.spawn().map_err(start)?;
        let mut process = Self { child, front: Arc::clone(&front) };
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let (announce, announced) = mpsc::channel();
        if let Some(output) = process.child.stdout.take() {
            let mut announce = Some(announce);
            let log = Arc::clone(&log);
            let take = move |name: &str, line: &str| {
                if let Some(waiting) = &announce
                    && let Ok(announcement) = Announcement::parse(line)
                {
                    // Nobody waits any more when the time was up.
                    let _ = waiting.send(announcement);
                    announce = None;
                } else if let Some(FrontPresence { rank_front }) = FrontPresence::parse(line) {
                    front.store(if rank_front { PRESENT } else { GONE }, Ordering::SeqCst);
                } else {
                    log(name, line);
                }
            };
            read_lines(name, output, take).map_err(start)?;
        }
        let mut written = None;
        if let Some(errors) = process.child.stderr.take() {
            let tail = Arc::clone(&tail);
            let take = move |name: &str, line: &str| {
                let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
                tail.push_back(line.to_owned());
                if tail.len() > TAIL_LINES {
                    tail.pop_front();
                }
                drop(tail);
                log(name, line);
            };
            written = Some(read_lines(name, errors, take).map_err(start)?);
        }
        match announced.recv_timeout(deadline.left()) {
            Ok(announcement) => Ok((process, announcement)),
            Err(_) => Err(process.explain(name, timeout, written, &tail)),
        }
    }

    fn explain(
        &mut self,
        name: &str,
        waited: Duration,
        written: Option<Receiver<()>>,
        tail: &Mutex<VecDeque<String>>,
    ) -> SpawnError {
        let name = name.to_owned();
        let Some(status) = self.exit_within(PIPE_TIMEOUT) else {
            return SpawnError::Timeout { name, waited };
        };
        // Ends with an error when all has been read, or when a grandchild holds the pipe.
        let _ = written.map(|written| written.recv_timeout(PIPE_TIMEOUT));
        let tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last_words = String::new();
        for line in tail.iter() {
            last_words.push_str("\n  ");
            last_words.push_str(line);
        }
        SpawnError::Ended { name, status, last_words }
    }

    /// The process's number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells from now on whether the rank has a front.
    #[must_use]
    pub fn watch(&self) -> FrontWatch {
        FrontWatch(Arc::clone(&self.front))
    }

    /// Whether it runs without a front, after it had one; if so, the next one is awaited from now on.
    pub fn adopt(&mut self) -> bool {
        let is_kept = self.exit_within(Duration::ZERO).is_none();
        let was = self.front.compare_exchange(GONE, AWAITED, Ordering::SeqCst, Ordering::SeqCst);
        is_kept && was.is_ok()
    }

    /// How the process ended, if it does within `timeout`.
    pub fn exit_within(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Deadline::after(timeout);
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if deadline.left().is_zero() {
                return None;
            }
            thread::sleep(POLL_INTERVAL.min(deadline.left()));
        }
    }

    /// Ends the process without asking it. One that hangs in the system, as a driver can make
    /// it, is left to the system after a while.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.exit_within(KILL_TIMEOUT);
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads lines on a thread of its own; the returned channel closes at their end.
fn read_lines(
    name: &str,
    from: impl Read + Send + 'static,
    mut take: impl FnMut(&str, &str) + Send + 'static,
) -> io::Result<Receiver<()>> {
    let owner = name.to_owned();
    let (reading, done) = mpsc::channel::<()>();
    let read = move || {
        let _reading = reading;
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A longer line comes in parts, so that no child can fill the memory.
            let mut part = from.by_ref().take(8 * MAX_LINE_BYTES as u64);
            match part.read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => take(&owner, String::from_utf8_lossy(&line).trim_end()),
            }
        }
    };
    thread::Builder::new().name(format!("log-{name}")).spawn(read)?;
    Ok(done)
}
