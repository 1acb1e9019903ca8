//! Secrets that a person or a pipe gives: one line, not echoed on a terminal.

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read},
    path::Path,
    process,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::progress::{ask, say};

/// Stands for standard input in place of a secret or file.
pub(super) const STDIN: &str = "-";

/// Most bytes that are looked at.
const MAX_BYTES: u64 = 4096;

/// How long standard input is waited for where nobody sits at it: what writes a secret there does
/// so at once.
const PIPE_TIMEOUT: Duration = Duration::from_mins(1);

/// What a shell gives for a process that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// What is asked for.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// In messages, such as `token`.
    pub what: &'static str,
    /// The question at a terminal.
    pub question: &'static str,
}

/// The first line of a file, or of standard input for `-`.
pub(super) fn read_file(wanted: Wanted, path: &Path) -> anyhow::Result<String> {
    if path == Path::new(STDIN) {
        return read_stdin(wanted);
    }
    let file = File::open(path).and_then(|mut file| read_text(&mut file));
    file.with_context(|| format!("could not read {}", path.display()))
}

/// Whether a person sits at standard input.
pub(super) fn is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// What is typed, or the first line of a pipe.
pub(super) fn read_stdin(wanted: Wanted) -> anyhow::Result<String> {
    if is_terminal() { prompt(wanted.question) } else { read_pipe(wanted.what) }
}

/// The first line.
fn read_text(from: &mut impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    // Whoever writes the line may leave the pipe open.
    while (bytes.len() as u64) < MAX_BYTES && from.read(&mut byte)? == 1 && byte[0] != b'\n' {
        bytes.push(byte[0]);
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not text"))
}

fn read_pipe(what: &str) -> anyhow::Result<String> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // It ends with the process where nothing comes.
    thread::spawn(move || sender.send(read_text(&mut io::stdin().lock())));
    match receiver.recv_timeout(PIPE_TIMEOUT) {
        Ok(text) => text.context("could not read standard input"),
        Err(RecvTimeoutError::Timeout) => Err(anyhow!(
            "no {what} was read from standard input within {} s",
            PIPE_TIMEOUT.as_secs()
        )),
        Err(RecvTimeoutError::Disconnected) => Err(anyhow!("could not read standard input")),
    }
}

/// Shows again what is typed.
struct Echo(Termios);

impl Echo {
    fn off() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut silent = before.clone();
        silent.local_modes -= LocalModes::ECHO;
        // What was typed before the question is no answer to it.
        tcsetattr(io::stdin(), OptionalActions::Flush, &silent)?;
        Ok(Self(before))
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        restore(&self.0);
    }
}

fn restore(before: &Termios) {
    // A terminal that is gone shows nothing.
    let _ = tcsetattr(io::stdin(), OptionalActions::Flush, before);
}

/// Asks the person at the terminal.
fn prompt(question: &str) -> anyhow::Result<String> {
    let echo = Echo::off().context("could not disable terminal echo")?;
    let before = echo.0.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        // Without this thread Ctrl-C would leave the terminal silent.
        if shardpack_server::wait_for_termination().is_ok() {
            restore(&before);
            process::exit(INTERRUPTED);
        }
    })?;
    ask(question);
    let text = read_text(&mut io::stdin().lock()).context("could not read the terminal");
    drop(echo);
    say("");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_bounded_length_is_read() {
        let read = |bytes: &[u8]| read_text(&mut &*bytes);
        assert_eq!(read(b"spj1_x\nmore").unwrap(), "spj1_x");
        assert_eq!(read(b"spj1_x").unwrap(), "spj1_x");
        assert_eq!(read(b"").unwrap(), "");
        assert_eq!(read(&[b'a'; 9000]).unwrap().len() as u64, MAX_BYTES);
        read(b"\xff\n").unwrap_err();
    }
}
