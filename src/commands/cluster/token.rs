//! Where `cluster add` takes the token from: a terminal without echo, standard input, a file, the
//! environment, or the command line, where other users of the machine can see it.

use std::{
    env,
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
use shardpack_identity::JoinToken;

use crate::{
    failure::Failure,
    progress::{ask, say},
};

/// Holds a token where it is neither given nor asked for.
const VARIABLE: &str = "SHARDPACK_JOIN_TOKEN";

/// Stands for standard input in place of a token or file.
const STDIN: &str = "-";

/// Most bytes that are looked at; a token has 69.
const MAX_BYTES: u64 = 4096;

/// How long standard input is waited for where nobody sits at it: what writes a token there does
/// so at once.
const PIPE_TIMEOUT: Duration = Duration::from_mins(1);

/// What a shell gives for a process that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// The token that was given, or the one that is asked for.
pub(super) fn read(given: Option<&str>, file: Option<&Path>) -> Result<JoinToken, Failure> {
    let (text, from) = match (given, file) {
        (Some(STDIN), _) => (read_stdin()?, "standard input".to_owned()),
        (Some(token), _) => (token.to_owned(), "--token".to_owned()),
        (None, Some(path)) if path == Path::new(STDIN) => {
            (read_stdin()?, "standard input".to_owned())
        }
        (None, Some(path)) => {
            let file = File::open(path).and_then(|mut file| read_text(&mut file));
            let text = file.with_context(|| format!("could not read {}", path.display()))?;
            (text, path.display().to_string())
        }
        // A variable that is set to nothing is not set.
        (None, None) => match env::var(VARIABLE).ok().filter(|text| !text.trim().is_empty()) {
            Some(text) => (text, VARIABLE.to_owned()),
            None => (read_stdin()?, "standard input".to_owned()),
        },
    };
    if text.trim().is_empty() {
        return Err(Failure::from(anyhow!("{from}: there is no token")).hint(
            "the node printed it when it started; type or paste it when asked, or give it with --token-file FILE",
        ));
    }
    // Neither the text nor where it differs is repeated: errors end up in logs.
    Ok(text.parse::<JoinToken>().context(from)?)
}

fn read_stdin() -> anyhow::Result<String> {
    if io::stdin().is_terminal() { prompt() } else { read_pipe() }
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

fn read_pipe() -> anyhow::Result<String> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // It ends with the process where nothing comes.
    thread::spawn(move || sender.send(read_text(&mut io::stdin().lock())));
    match receiver.recv_timeout(PIPE_TIMEOUT) {
        Ok(text) => text.context("could not read standard input"),
        Err(RecvTimeoutError::Timeout) => Err(anyhow!(
            "no token was read from standard input within {} s",
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
fn prompt() -> anyhow::Result<String> {
    let echo = Echo::off().context("could not disable terminal echo")?;
    let before = echo.0.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        // Without this thread Ctrl-C would leave the terminal silent.
        if shardpack_server::wait_for_termination().is_ok() {
            restore(&before);
            process::exit(INTERRUPTED);
        }
    })?;
    ask("join token that the node printed (not echoed): ");
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

    #[test]
    fn a_token_that_is_none_is_not_repeated() {
        let error = super::read(Some("spj1_secret"), None).unwrap_err();
        let text = format!("{:#}", error.into_error());
        assert!(text.contains("--token") && text.contains("not a token"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}
