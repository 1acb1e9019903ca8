//! How a node ends, and how it goes over to another program.
//!
//! The present program starts the new one as its child, on its own socket, with its own arguments, and
//! serves nothing meanwhile. If the controller finds the new one well and confirms it, the child ends with
//! [`CONFIRMED`], the present program puts the new file in its place, keeps its own as `NAME.previous`,
//! and executes the new one in this process. Whatever else happens (it ends, hangs, is not confirmed
//! in time, the machine loses power), the present program is still there and serves on. The socket is never
//! closed, so that callers wait and are not refused.

use std::{
    env, fs,
    fs::File,
    io,
    net::TcpListener,
    os::{fd::AsFd as _, fd::OwnedFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use shardpack_manifests::Digest;
use shardpack_transfer::receive::Shutdown;
use tempfile::TempPath;

use crate::{progress::say, sd_notify};

/// How a program on trial ends once it was confirmed; no program ends so by itself.
pub(super) const CONFIRMED: u8 = 86;

/// The option with which a node takes its socket from standard input.
const SOCKET: &str = "--socket-on-stdin";

/// The option of a program on trial.
const TRIAL: &str = "--trial";

/// Arguments that are not for a second start.
const ONCE: [&str; 3] = ["--reset", SOCKET, TRIAL];

/// Between two looks at the program on trial.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a program on trial may take to end in order.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A program that the node is to go over to.
pub(super) struct Trial {
    /// The new file, beside the present one; removed if it does not take its place.
    pub file: TempPath,
    /// The present one.
    pub program: PathBuf,
    pub digest: Digest,
    /// How long the controller has to confirm it.
    pub confirm: Duration,
}

/// Why a node stops serving.
pub(super) enum End {
    /// It was asked to end.
    Asked,
    /// To go over to another program.
    Upgrade(Box<Trial>),
    /// This program, on trial, is confirmed.
    Confirmed,
}

/// Ends what serves; clones end the same.
#[derive(Clone, Default)]
pub(super) struct Ending(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    end: Option<End>,
    serving: Option<Shutdown>,
}

impl Ending {
    /// By Ctrl-C and SIGTERM.
    pub(super) fn by_signals() -> io::Result<Self> {
        let ending = Self::default();
        let asked = ending.clone();
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            // Without signals the node still ends with its process.
            let _ = shardpack_server::wait_for_termination();
            sd_notify::notify("STOPPING=1");
            asked.ask(End::Asked);
        })?;
        Ok(ending)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what serves, for this reason; a signal counts before all others.
    pub(super) fn ask(&self, end: End) {
        let mut state = self.lock();
        if !matches!(state.end, Some(End::Asked)) {
            state.end = Some(end);
        }
        let serving = state.serving.clone();
        drop(state);
        if let Some(serving) = serving {
            serving.stop();
        }
    }

    /// The same once the answer that announces it has been sent.
    pub(super) fn ask_soon(&self, end: End) -> io::Result<()> {
        let ending = self.clone();
        let ask = move || {
            // A controller that misses the answer asks for the node's state anyway.
            thread::sleep(Duration::from_millis(100));
            ending.ask(end);
        };
        thread::Builder::new().name("restart".to_owned()).spawn(ask).map(drop)
    }

    /// This serves from now on.
    pub(super) fn serving(&self, shutdown: &Shutdown) {
        let mut state = self.lock();
        state.serving = Some(shutdown.clone());
        let is_over = state.end.is_some();
        drop(state);
        if is_over {
            shutdown.stop();
        }
    }

    /// Why it has stopped.
    pub(super) fn reason(&self) -> End {
        let mut state = self.lock();
        state.serving = None;
        match state.end.take() {
            None | Some(End::Asked) => {
                state.end = Some(End::Asked);
                End::Asked
            }
            Some(end) => end,
        }
    }

    /// Whether a signal has come.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.lock().end, Some(End::Asked))
    }
}

/// The socket that an earlier program of this node has left on standard input.
pub(super) fn inherited_socket() -> anyhow::Result<TcpListener> {
    let socket = io::stdin().as_fd().try_clone_to_owned();
    let listener = TcpListener::from(socket.context("standard input cannot be used")?);
    listener.local_addr().context("standard input is no socket")?;
    Ok(listener)
}

/// Tries a program and goes over to it. Returns only if that failed: this program is to serve on.
pub(super) fn replace(trial: Trial, listener: &TcpListener, ending: &Ending) -> anyhow::Error {
    let error = match try_program(&trial, listener, ending) {
        Ok(()) => go_over(trial, listener),
        Err(error) => error,
    };
    say(&format!("node: the program before serves on: {error:#}"));
    error
}

/// The node's own command with another program, on its socket.
fn command(program: &Path, listener: &TcpListener) -> io::Result<Command> {
    let mut command = Command::new(program);
    let again = |argument: &std::ffi::OsString| !ONCE.iter().any(|once| argument == once);
    command.args(env::args_os().skip(1).filter(again)).arg(SOCKET);
    command.stdin(Stdio::from(OwnedFd::from(listener.try_clone()?)));
    Ok(command)
}

/// Runs a program until it is confirmed.
fn try_program(trial: &Trial, listener: &TcpListener, ending: &Ending) -> anyhow::Result<()> {
    let started = command(&trial.file, listener).and_then(|mut it| it.arg(TRIAL).spawn());
    let mut child = started.context("the new program cannot be started")?;
    let deadline = Instant::now() + trial.confirm;
    loop {
        if let Some(status) = child.try_wait().context("the new program cannot be watched")? {
            if status.code() == Some(CONFIRMED.into()) {
                return Ok(());
            }
            bail!("the new program ended ({status})");
        }
        if ending.is_asked() {
            end(&mut child);
            bail!("the node was asked to end");
        }
        if Instant::now() >= deadline {
            end(&mut child);
            bail!(
                "the controller did not confirm the new program within {} s",
                trial.confirm.as_secs()
            );
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// Ends a program, in order if it can.
fn end(child: &mut Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, Signal::TERM);
    }
    let deadline = Instant::now() + END_TIMEOUT;
    while Instant::now() < deadline {
        if child.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        thread::sleep(LOOK_AGAIN);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Where the program before is kept.
pub(super) fn previous_of(program: &Path) -> PathBuf {
    let mut name = program.as_os_str().to_owned();
    name.push(".previous");
    name.into()
}

/// Puts the new program in its place and executes it.
fn go_over(trial: Trial, listener: &TcpListener) -> anyhow::Error {
    let Trial { file, program, .. } = trial;
    let previous = previous_of(&program);
    if let Err(error) = take_place(file, &program, &previous) {
        return error.context(format!("{} cannot be replaced", program.display()));
    }
    let error = match command(&program, listener) {
        Ok(mut command) => command.exec(),
        Err(error) => error,
    };
    let error = anyhow!(error).context("the new program, which ran on trial, cannot be executed");
    match fs::rename(&previous, &program) {
        Ok(()) => error,
        Err(_) => error.context(format!("the program before is in {}", previous.display())),
    }
}

fn take_place(file: TempPath, program: &Path, previous: &Path) -> anyhow::Result<()> {
    match fs::remove_file(previous) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    // A second name for the present file: at every moment there is a program under the first.
    fs::hard_link(program, previous)?;
    file.persist(program)?;
    let folder = program.parent().context("a program in a folder")?;
    Ok(File::open(folder)?.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_program_takes_the_place_and_the_one_before_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("shardpack");
        fs::write(&program, "1").unwrap();
        for (new, before) in [("2", "1"), ("3", "2")] {
            let file = tempfile::NamedTempFile::new_in(folder.path()).unwrap();
            fs::write(file.path(), new).unwrap();
            take_place(file.into_temp_path(), &program, &previous_of(&program)).unwrap();
            assert_eq!(fs::read_to_string(&program).unwrap(), new);
            assert_eq!(
                fs::read_to_string(folder.path().join("shardpack.previous")).unwrap(),
                before
            );
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_signal_counts_before_every_other_reason() {
        let ending = Ending::default();
        ending.ask(End::Asked);
        ending.ask(End::Confirmed);
        assert!(matches!(ending.reason(), End::Asked) && ending.is_asked());
        let ending = Ending::default();
        ending.ask(End::Confirmed);
        assert!(matches!(ending.reason(), End::Confirmed) && !ending.is_asked());
    }
}
