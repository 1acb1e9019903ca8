//! The demo's processes: this program again, as a node and as a server.

use std::{
    collections::VecDeque,
    ffi::OsStr,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use serde_json::Value;

use crate::{args::EngineChoice, own_program};

/// For a process to say that it is up; the demo's model loads in a fraction of a second.
const START_TIMEOUT: Duration = Duration::from_mins(1);

/// For a process to end after it was asked to.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Lines of a process's standard error that are shown if it does not start.
const LAST_WORDS: usize = 3;

/// Between two looks at a process that is to end.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A running process of the demo; asked to end when dropped, killed if it does not.
pub(in crate::commands) struct Child {
    process: std::process::Child,
    /// What it said: an address for a node, a URL for a server.
    pub(in crate::commands) address: String,
}

/// Starts a node that keeps its packages in `store`.
pub(in crate::commands) fn node(store: &Path, engine: &EngineChoice) -> anyhow::Result<Child> {
    let mut command = own_program()?;
    command
        .args(["node", "--listen", "127.0.0.1:0", "--threads", "1", "--json", "--store"])
        .arg(store)
        .args(engine.arguments());
    start(command, "a node", "listening")
}

/// Starts the server of `set` on running nodes; with none, on this machine. Further `options` are
/// passed on.
pub(in crate::commands) fn serve(
    set: &Path,
    nodes: &[String],
    options: &[impl AsRef<OsStr>],
) -> anyhow::Result<Child> {
    let mut command = own_program()?;
    command.arg("serve").arg(set).args(["--listen", "127.0.0.1:0", "--json"]).args(options);
    if !nodes.is_empty() {
        command.args(["--nodes", &nodes.join(",")]);
    }
    start(command, "the server", "url")
}

fn own_program() -> anyhow::Result<Command> {
    let mut command = Command::new(own_program::path()?);
    // Their notes for people would stand between the demo's lines.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Starts a process and waits for its line of JSON with `field`.
fn start(mut command: Command, name: &str, field: &str) -> anyhow::Result<Child> {
    let mut process = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let output = process.stdout.take().context("its output is a pipe")?;
    let errors = process.stderr.take().context("its errors are a pipe")?;
    let mut child = Child { process, address: String::new() };
    let (lines, said) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // The demo may have heard enough.
            let _ = lines.send(line);
        }
    });
    let last_words = thread::spawn(move || {
        let lines = BufReader::new(errors).lines().map_while(Result::ok);
        lines.fold(VecDeque::new(), |mut last, line| {
            last.push_back(line);
            if last.len() > LAST_WORDS {
                last.pop_front();
            }
            last
        })
    });
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        match said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                let json: Value = serde_json::from_str(&line).unwrap_or_default();
                if let Some(address) = json[field].as_str() {
                    address.clone_into(&mut child.address);
                    return Ok(child);
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("{name} did not start within {} s", START_TIMEOUT.as_secs())
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let last = Vec::from(last_words.join().unwrap_or_default()).join("; ");
                return Err(anyhow!("{name} did not start: {last}"));
            }
        }
    }
}

impl Child {
    /// Waits until the process ends by itself (Ctrl-C reaches it too).
    pub(in crate::commands) fn wait(&mut self) -> anyhow::Result<()> {
        self.process.wait().context("cannot wait for the server")?;
        Ok(())
    }

    /// Asks the process to end; on systems without signals it is killed.
    fn ask_to_end(&mut self) {
        #[cfg(unix)]
        {
            // It is waited for by nobody else, so its number is its own.
            let pid = rustix::process::Pid::from_child(&self.process);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        #[cfg(not(unix))]
        let _ = self.process.kill();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(Some(_))) {
            return;
        }
        self.ask_to_end();
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(LOOK_AGAIN);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
