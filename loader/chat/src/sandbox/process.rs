//! One sandbox as a child of this process: started, limited in memory, asked with a deadline, and never
//! left behind.

use std::{
    fmt,
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    error::{Cause, SandboxError, Work},
    wire::{Frame, Reply, VERSION, WireError},
};

/// Memory for what is opened, besides what its bytes take.
const OPENING_BYTES: u64 = 1 << 30;
/// Memory for each byte that is opened: tokenizers of 35 MiB take 12 times as much for a moment.
const OPENING_FACTOR: u64 = 24;
/// Memory for one request, beyond what was open before it.
const REQUEST_BYTES: u64 = 1 << 30;

/// Time for any work, and for each MiB that it is given.
const TIME: Duration = Duration::from_secs(5);
const TIME_PER_MIB: Duration = Duration::from_secs(1);
/// Time for a process to come up and confine itself: the machine may be busy.
const START_TIME: Duration = Duration::from_secs(20);

/// How long a process that closed its connection may take to be gone.
const END_TIME: Duration = Duration::from_secs(2);
/// Between two looks at whether it is.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// Bytes of its last words that are read.
const LAST_WORDS_BYTES: u64 = 16 << 10;

/// Signals by which processes end, the same on Linux and macOS but for the last.
const SIGKILL: i32 = 9;
const SIGBUS: i32 = if cfg!(target_os = "linux") { 7 } else { 10 };
const SIGSEGV: i32 = 11;
const SIGSYS: i32 = if cfg!(target_os = "linux") { 31 } else { 12 };

/// The program that runs as a sandbox: speaks [`super::wire`] on its standard input, which is a
/// connection for both directions.
#[derive(Clone)]
pub struct SandboxProgram(Arc<dyn Fn() -> io::Result<Command> + Send + Sync>);

impl fmt::Debug for SandboxProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SandboxProgram")
    }
}

impl SandboxProgram {
    /// The program and its arguments, for each process anew.
    #[must_use]
    pub fn new(command: impl Fn() -> io::Result<Command> + Send + Sync + 'static) -> Self {
        Self(Arc::new(command))
    }

    /// Asks a process that is ended afterwards.
    pub(crate) fn ask_once(&self, request: &Frame, work: Work) -> Result<Frame, SandboxError> {
        let mut process = Process::start(self, request.body.len())?;
        process.exchange(request, time(request)).map_err(|cause| SandboxError::Died { work, cause })
    }
}

/// The time that a request may take.
pub(super) fn time(request: &Frame) -> Duration {
    let mebibytes = request.size_bytes() as f64 / f64::from(1 << 20);
    TIME + TIME_PER_MIB.mul_f64(mebibytes)
}

/// A running sandbox; killed when dropped.
pub(super) struct Process {
    child: Child,
    connection: UnixStream,
    errors: Option<ChildStderr>,
    /// Most memory that it may have now, where the system does not enforce it.
    memory: u64,
}

impl Process {
    /// Starts one that has `opened_bytes` to open, and waits until it is confined.
    pub(super) fn start(
        program: &SandboxProgram,
        opened_bytes: usize,
    ) -> Result<Self, SandboxError> {
        let mut process = Self::spawn(program).map_err(SandboxError::Start)?;
        let hello = process.read_hello();
        hello.map_err(|cause| SandboxError::Start(io::Error::other(cause.to_string())))?;
        let memory = OPENING_BYTES + OPENING_FACTOR * opened_bytes as u64;
        process.limit_memory(memory).map_err(SandboxError::Start)?;
        Ok(process)
    }

    fn spawn(program: &SandboxProgram) -> io::Result<Self> {
        let (connection, its) = UnixStream::pair()?;
        let its_output = its.try_clone()?;
        let mut command = (program.0)()?;
        command
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(its)))
            .stdout(Stdio::from(OwnedFd::from(its_output)))
            .stderr(Stdio::piped())
            // Ctrl-C goes to a terminal's whole process group; sandboxes end with their connection.
            .process_group(0);
        let mut child = command.spawn()?;
        let errors = child.stderr.take();
        Ok(Self { child, connection, errors, memory: u64::MAX })
    }

    fn read_hello(&mut self) -> Result<(), Cause> {
        let hello = self.receive(Instant::now() + START_TIME);
        let hello = hello.map_err(|error| self.cause(&error, START_TIME))?;
        match hello.owned() {
            Ok(Reply::Hello { version: VERSION }) => Ok(()),
            other => Err(Cause::Protocol(format!("{other:?}"))),
        }
    }

    /// From now on it may take as much as one request may, beyond what it has.
    pub(super) fn limit_request(&mut self) -> Result<(), SandboxError> {
        self.limit_memory(REQUEST_BYTES).map_err(SandboxError::Start)
    }

    /// Whether it still runs.
    pub(super) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a request and waits for its reply. After an error it is gone.
    pub(super) fn exchange(&mut self, request: &Frame, time: Duration) -> Result<Frame, Cause> {
        let deadline = Instant::now() + time;
        let sent = {
            let mut connection = Timed { process: self, deadline };
            request.write(&mut connection)
        };
        let reply = match sent {
            // One that ended may have said why before it closed its side.
            Ok(()) => self.receive(deadline),
            Err(error) => Err(error),
        };
        reply.map_err(|error| self.cause(&error, time))
    }

    fn receive(&mut self, deadline: Instant) -> Result<Frame, WireError> {
        Frame::read(&mut Timed { process: self, deadline })
    }

    /// Ends it, and says why it had to.
    fn cause(&mut self, error: &WireError, time: Duration) -> Cause {
        let kind = match error {
            WireError::Io(error) => error.kind(),
            other => {
                let _ = self.child.kill();
                return Cause::Protocol(other.to_string());
            }
        };
        match kind {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                let _ = self.child.kill();
                Cause::Time(time)
            }
            io::ErrorKind::OutOfMemory => {
                let _ = self.child.kill();
                Cause::Memory
            }
            _ => self.last_words(),
        }
    }

    /// How a process ended that closed its connection.
    fn last_words(&mut self) -> Cause {
        let deadline = Instant::now() + END_TIME;
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
                _ => break None,
            }
        };
        let _ = self.child.kill();
        let mut words = Vec::new();
        if let Some(errors) = self.errors.take() {
            let _ = errors.take(LAST_WORDS_BYTES).read_to_end(&mut words);
        }
        cause_of(status, &String::from_utf8_lossy(&words))
    }
}

/// The cause in a process's exit status and what the standard library wrote before it ended it.
fn cause_of(status: Option<ExitStatus>, words: &str) -> Cause {
    let signal = status.and_then(|status| status.signal());
    // Whole lines, as the standard library writes them: an error message may quote a prompt.
    let mut lines = words.lines();
    let is_failed =
        |line: &str| line.starts_with("memory allocation of ") && line.ends_with(" bytes failed");
    if signal.is_some() && lines.clone().any(is_failed) {
        return Cause::Memory;
    }
    let is_panic = |line: &str| line.starts_with("thread '") && line.contains(" panicked at ");
    if lines.any(is_panic) && lines.next() == Some("capacity overflow") {
        return Cause::Capacity;
    }
    if words.contains("has overflowed its stack") {
        return Cause::Stack;
    }
    match signal {
        Some(SIGSYS) => Cause::SystemCall,
        Some(SIGKILL) => Cause::Killed,
        Some(SIGSEGV | SIGBUS) => Cause::Stack,
        _ => {
            let line = words.lines().map(str::trim).rfind(|line| !line.is_empty());
            let status = status.map_or("no exit status".to_owned(), |status| status.to_string());
            Cause::Ended(line.map_or(status.clone(), |line| format!("{status}, {line:.300}")))
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(target_os = "linux")]
impl Process {
    /// Limits its address space to what it has now and `more`.
    fn limit_memory(&mut self, more: u64) -> io::Result<()> {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

        let id = self.child.id();
        let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
        let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
        let size = status.lines().find_map(|line| {
            let kibibytes = line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?;
            kibibytes.trim().parse::<u64>().ok()
        });
        let (Some(pid), Some(kibibytes)) = (pid, size) else {
            return Err(io::Error::other("the process has no size in /proc"));
        };
        self.memory = kibibytes * 1024 + more;
        // The limit that it could raise stays as it was inherited: it cannot ask for that.
        let Rlimit { maximum, .. } = getrlimit(Resource::As);
        let current = maximum.map_or(self.memory, |maximum| maximum.min(self.memory));
        let limit = Rlimit { current: Some(current), maximum };
        prlimit(Some(pid), Resource::As, limit)?;
        Ok(())
    }

    /// The system watches by itself.
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "elsewhere it looks")]
    const fn check_memory(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
impl Process {
    /// No system but Linux limits a process's memory: it is watched.
    fn limit_memory(&mut self, more: u64) -> io::Result<()> {
        self.memory = self.resident_bytes().unwrap_or_default() + more;
        Ok(())
    }

    fn check_memory(&self) -> io::Result<()> {
        match self.resident_bytes() {
            Some(found) if found > self.memory => Err(io::ErrorKind::OutOfMemory.into()),
            _ => Ok(()),
        }
    }

    /// Its memory, as `ps` has it.
    fn resident_bytes(&self) -> Option<u64> {
        let id = self.child.id().to_string();
        let ps = Command::new("/bin/ps").args(["-o", "rss=", "-p", &id]).output().ok()?;
        let kibibytes: u64 = String::from_utf8_lossy(&ps.stdout).trim().parse().ok()?;
        Some(kibibytes * 1024)
    }
}

/// How long a wait may last before the process is looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// The connection to a process, until a deadline.
struct Timed<'a> {
    process: &'a mut Process,
    deadline: Instant,
}

impl Timed<'_> {
    /// Repeats `go` until it does something, the deadline passes, or the process is too large.
    fn wait<T>(
        &mut self,
        set: fn(&UnixStream, Option<Duration>) -> io::Result<()>,
        mut go: impl FnMut(&mut UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let watched = if cfg!(target_os = "linux") { left } else { left.min(WATCH_INTERVAL) };
            set(&self.process.connection, Some(watched))?;
            match go(&mut self.process.connection) {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    self.process.check_memory()?;
                }
                other => return other,
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(UnixStream::set_read_timeout, |connection| connection.read(bytes))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(UnixStream::set_write_timeout, |connection| connection.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_apart() {
        let check = |signal: i32, words: &str, expected: &str| {
            let cause = cause_of(Some(ExitStatus::from_raw(signal)), words);
            assert_eq!(cause.to_string(), expected);
        };
        check(6, "memory allocation of 8 bytes failed\n", "ran out of memory");
        check(6, "\nthread 'text' has overflowed its stack\nfatal", "overflowed its stack");
        let panicked = "thread 'text' (7) panicked at library/alloc/src/raw_vec/mod.rs:28:5:\n";
        let overflow = format!("{panicked}capacity overflow\nnote: run with");
        let capacity = "asked for more memory at once than a program can have";
        check(101 << 8, &overflow, capacity);
        check(6, &overflow, capacity);
        let quoted = format!("{panicked}no filter 'capacity overflow'\n");
        check(101 << 8, &quoted, "ended: exit status: 101, no filter 'capacity overflow'");
        let quoted = "no filter 'memory allocation of 8 bytes failed'";
        check(101 << 8, quoted, &format!("ended: exit status: 101, {quoted}"));
        check(SIGSYS, "", "made a system call that it may not make");
        check(SIGKILL, "", "was killed (as the system does where memory runs out)");
        check(
            101 << 8,
            "thread 'text' panicked\nno such key\n",
            "ended: exit status: 101, no such key",
        );
    }
}
