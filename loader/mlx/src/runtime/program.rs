//! Other programs, run to their end; digests of files.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use shardpack_http::Checksum;

use super::InstallError;

/// Runs a program to its end, or ends it; returns what it printed.
pub(super) fn run(
    mut command: Command,
    timeout: Duration,
    hint: &'static str,
) -> Result<String, InstallError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let problem =
        |problem: String| InstallError::Program { program: program.clone(), problem, hint };
    let output = tempfile::tempfile().map_err(|error| problem(error.to_string()))?;
    let copy = || output.try_clone().map(Stdio::from).map_err(|error| problem(error.to_string()));
    command.stdin(Stdio::null()).stdout(copy()?).stderr(copy()?);
    let mut child = command.spawn().map_err(|error| problem(format!("cannot be run: {error}")))?;
    let deadline = Instant::now() + timeout;
    let status = loop {
        match child.try_wait().map_err(|error| problem(error.to_string()))? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(problem(format!("did not end within {} s", timeout.as_secs())));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let mut text = String::new();
    let mut output = output;
    io::Seek::rewind(&mut output)
        .and_then(|()| output.read_to_string(&mut text))
        .map_err(|error| problem(error.to_string()))?;
    if status.success() {
        return Ok(text);
    }
    let lines: Vec<_> = text.trim().lines().collect();
    let last = lines[lines.len().saturating_sub(5)..].join("\n");
    Err(problem(format!("failed ({status}): {last}")))
}

/// SHA-256 of a file, in hex.
pub(super) fn sha256_of(path: &Path) -> io::Result<String> {
    let (_, checksum) = Checksum::sha256_of(&mut File::open(path)?)?;
    Ok(checksum.text())
}
