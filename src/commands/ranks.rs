//! Starting rank processes on this machine.

use std::{
    env, fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use shardpack_cluster::{Announcement, LogSink, RankProcess};
use shardpack_mlx::distributed::{Distributed, FOREIGN_VARIABLES};

use crate::{args::EngineChoice, progress::say};

/// Timeout for a rank to report its address, which it does before it loads.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// What a front sends a node with a request to start a rank, if it is not simply to be started.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum RankParameters {
    /// Its rank is to be started in one of MLX's own groups.
    Distributed(Distributed),
    /// No rank: the node is to check itself and answer with the report.
    Doctor {
        /// Compute, read and send too.
        self_test: bool,
    },
}

/// A rank's membership in one of MLX's own groups.
pub(crate) struct Membership<'a> {
    pub distributed: &'a Distributed,
    pub rank: u32,
    /// Where the rank finds the files that MLX reads; they must stay until it has joined.
    pub folder: PathBuf,
}

/// Where a rank listens, and its TLS identity.
#[derive(Clone)]
pub(crate) struct RankEndpoint {
    /// The address at which front and peers reach it.
    pub ip: IpAddr,
    /// The node's key and membership, for TLS.
    pub identity: Option<PathBuf>,
}

impl RankEndpoint {
    /// For a front on this machine only.
    pub(crate) const LOOPBACK: Self = Self { ip: IpAddr::V4(Ipv4Addr::LOCALHOST), identity: None };
}

/// A rank process that was started on this machine.
pub(crate) struct StartedRank {
    pub process: RankProcess,
    /// Where it listens, with its token.
    pub announcement: Announcement,
}

/// Starts the rank of the package in `folder`. Its log lines are passed on.
pub(crate) fn start(
    name: &str,
    folder: &Path,
    threads: usize,
    engine: &EngineChoice,
    endpoint: &RankEndpoint,
    member: Option<Membership<'_>>,
) -> anyhow::Result<StartedRank> {
    let program = env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.arg("rank").arg(folder).args(["--threads", &threads.to_string()]);
    command.args(engine.arguments()).args(["--bind", &endpoint.ip.to_string()]);
    if let Some(identity) = &endpoint.identity {
        command.arg("--identity").arg(identity);
    }
    // These variables of this process would configure another group.
    for name in FOREIGN_VARIABLES {
        command.env_remove(name);
    }
    command.envs(engine.fast_sync_variable()?);
    if let Some(Membership { distributed, rank, folder }) = member {
        let variables = fs::create_dir_all(&folder)
            .and_then(|()| distributed.environment(rank, &folder))
            .with_context(|| folder.display().to_string())?;
        command.envs(variables);
    }
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // Ctrl-C goes to a terminal's whole process group; ranks end on their front's request.
        command.process_group(0);
    }
    let log: LogSink = Arc::new(|name, line| say(&format!("{name}: {line}")));
    let (process, announcement) = RankProcess::spawn(name, command, START_TIMEOUT, log)?;
    Ok(StartedRank { process, announcement })
}
