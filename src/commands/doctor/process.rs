//! A process of this program whose lines of JSON are read with a deadline; killed when dropped.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use serde::Serialize;
use serde_json::Value;

/// Pipes close a moment after a process has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);

pub(super) struct Process {
    child: Child,
    said: mpsc::Receiver<Value>,
    errors: mpsc::Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    pub(super) fn start(mut command: Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("a process cannot be started")?;
        let output = child.stdout.take().context("its output is a pipe")?;
        let error_output = child.stderr.take().context("its errors are a pipe")?;
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The check may have ended.
                let _ = serde_json::from_str(&line).map(|json: Value| say.send(json));
            }
        });
        let (complain, errors) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(error_output).lines().map_while(Result::ok) {
                let _ = complain.send(line);
            }
        });
        Ok(Self { child, said, errors })
    }

    pub(super) fn tell(&mut self, task: &impl Serialize) -> anyhow::Result<()> {
        let input = self.child.stdin.as_mut().context("its input is a pipe")?;
        let line = serde_json::to_string(task)?;
        writeln!(input, "{line}").map_err(|error| anyhow!("{error}: {}", self.last_words()))
    }

    /// Its next line of JSON.
    pub(super) fn hear(&mut self, deadline: Instant) -> anyhow::Result<Value> {
        let json = self.next(deadline)?;
        let json = json.with_context(|| format!("a process ended: {}", self.last_words()))?;
        if let Some(error) = json["error"].as_str() {
            bail!("a process failed: {error}");
        }
        Ok(json)
    }

    /// The same; none after it ended without an error.
    pub(super) fn next(&mut self, deadline: Instant) -> anyhow::Result<Option<Value>> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.said.recv_timeout(left) {
            Ok(json) => Ok(Some(json)),
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("no answer within the deadline"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                // Its output is closed, so that it has ended or is about to.
                let status = self.child.wait().context("its exit status")?;
                if !status.success() {
                    bail!("it ended with {status}: {}", self.last_words());
                }
                Ok(None)
            }
        }
    }

    fn last_words(&self) -> String {
        let first = self.errors.recv_timeout(LAST_WORDS);
        let lines: Vec<String> = first.into_iter().chain(self.errors.try_iter()).collect();
        // A panic says first where and why; a backtrace may follow.
        if let Some(start) = lines.iter().position(|line| line.contains("panicked at")) {
            return lines[start..].iter().take(2).map(String::as_str).collect::<Vec<_>>().join(" ");
        }
        lines.last().cloned().unwrap_or_else(|| "without an error message".to_owned())
    }
}
