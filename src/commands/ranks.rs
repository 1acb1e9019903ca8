//! Starting rank processes on this machine.

use std::{env, path::Path, process::Command, sync::Arc, time::Duration};

use anyhow::Context;
use shardpack_loader::cluster::{Announcement, LogSink, RankProcess};

use crate::{args::EngineChoice, progress::say};

/// For a rank to say where it listens; it does so before it loads.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts the rank of the package in `folder`. What it writes for people is passed on.
pub(crate) fn start(
    name: &str,
    folder: &Path,
    threads: usize,
    engine: &EngineChoice,
) -> anyhow::Result<(RankProcess, Announcement)> {
    let program = env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.arg("rank").arg(folder).args(["--threads", &threads.to_string()]);
    command.args(engine.arguments());
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // Ctrl-C goes to a terminal's whole process group; ranks end when their front says so.
        command.process_group(0);
    }
    let log: LogSink = Arc::new(|name, line| say(&format!("{name}: {line}")));
    Ok(RankProcess::spawn(name, command, START_TIMEOUT, log)?)
}
