//! `shardpack text-worker`: the sandbox of one model's chat template and tokenizer, which another
//! process of this program starts. It confines itself, then executes what it is sent on its standard
//! input, a connection for both directions.

mod confinement;

use std::{
    io::{self, Write as _},
    process::ExitCode,
    sync::{mpsc, mpsc::Receiver},
    thread,
};

use anyhow::{Context as _, anyhow};
use shardpack_chat::{
    SandboxProgram, SandboxedProber,
    sandbox::{wire::Frame, worker},
};
use shardpack_formats::chat;

use super::Outcome;
use crate::own_program;

/// Stack of the thread that executes templates and tokenizers: that of a process's first thread.
/// Published templates take less than a hundredth of it.
const STACK_BYTES: usize = 8 << 20;

/// Requests that wait for the thread; there is one at a time.
const WAITING: usize = 1;

/// The name of the command.
const COMMAND: &str = "text-worker";

/// Runs the command until its other end closes the connection.
pub(crate) fn run() -> Outcome {
    confinement::limit_resources()?;
    let (send, requests) = mpsc::sync_channel(WAITING);
    let (ready, is_ready) = mpsc::channel();
    let (confined, go) = mpsc::channel();
    let executes = thread::Builder::new()
        .name("text".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            // What the standard library does for a new thread is done.
            let _ = ready.send(());
            execute(&go, requests);
        })
        .context("the system gave no thread")?;
    is_ready.recv().context("the thread has ended")?;
    // Every thread is there by now, and no other is started.
    confinement::confine().context("the process cannot confine itself")?;
    confined.send(()).map_err(|_| anyhow!("the thread has ended"))?;
    // Read here, so that the end of the other side ends work that would never end.
    let mut input = io::stdin().lock();
    while let Ok(frame) = Frame::read(&mut input) {
        if send.send(frame).is_err() {
            break;
        }
        if executes.is_finished() {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn execute(go: &Receiver<()>, requests: Receiver<Frame>) {
    if go.recv().is_err() {
        return;
    }
    let mut output = io::stdout().lock();
    if let Err(error) = worker::serve(requests, &mut output) {
        // The last words of a sandbox.
        let _ = writeln!(io::stderr(), "{error}");
    }
    // The other side sees that there will be no answer.
    std::process::exit(2);
}

/// This program as the sandbox of templates and tokenizers.
pub(crate) fn program() -> SandboxProgram {
    SandboxProgram::new(|| {
        let own = own_program::path().map_err(io::Error::other)?;
        let mut command = confinement::confined(&own);
        command.arg(COMMAND);
        Ok(command)
    })
}

/// From now on conversions of this process try templates in sandboxes.
pub(crate) fn try_templates_in_sandboxes() {
    chat::probe_with(Box::new(SandboxedProber(program())));
}
