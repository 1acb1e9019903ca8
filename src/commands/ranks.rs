//! Starting rank processes on this machine.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    sync::OnceLock,
    time::Duration,
};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use shardpack_cluster::{Announcement, LogSink, RankProcess, Token, WEIGHT_STREAMS};
use shardpack_identity::HostAddress;
use shardpack_manifests::{Digest, Manifest};
use shardpack_mlx::distributed::{Distributed, FOREIGN_VARIABLES};
use shardpack_transfer::protocol::PackageKey;

use crate::{args::EngineChoice, own_program, progress::say};

/// Timeout for a rank to report its address, which it does before it loads.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// What a front sends a node with a request to start a rank, if it is not simply to be started.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum RankParameters {
    /// Its rank is to be started.
    Start {
        /// Who will connect to it.
        front: FrontName,
        /// One of MLX's own groups to start it in.
        #[serde(default)]
        distributed: Option<Distributed>,
    },
    /// No rank: the node is to check itself and answer with the report.
    Doctor {
        /// Compute, read and send too.
        self_test: bool,
    },
}

/// A package that a rank is sent by its front, as far as it must know it before.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamedPackage {
    pub model: Digest,
    pub layout: Digest,
    pub rank: u32,
    pub ranks: u32,
    /// Of the model, in elements.
    pub hidden_size: u32,
    /// Connections on which it comes.
    pub streams: usize,
}

impl StreamedPackage {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        Self {
            model: manifest.ids.model,
            layout: manifest.ids.layout,
            rank: manifest.rank,
            ranks: manifest.layout.ranks,
            hidden_size: manifest.architecture.hidden_size,
            streams: WEIGHT_STREAMS,
        }
    }

    pub(crate) const fn key(&self) -> PackageKey {
        PackageKey { layout: self.layout, rank: self.rank }
    }

    /// Whether a manifest is this package's.
    pub(crate) fn is_of(&self, manifest: &Manifest) -> bool {
        let Manifest { ids, rank, layout, .. } = manifest;
        (ids.model, ids.layout, *rank, layout.ranks)
            == (self.model, self.layout, self.rank, self.ranks)
    }
}

/// Name of the operation by which a front has a node start a rank without a package.
pub(crate) const STREAM_RANK: &str = "rank.stream";

/// Its parameters.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamRank {
    pub package: StreamedPackage,
    /// Who will connect to it.
    pub front: FrontName,
}

/// A front, as a node tells it from others.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrontName {
    /// Random, one for each run of `serve`.
    pub id: Token,
    /// For people: machine and process.
    pub shown: String,
    /// Whether it may take the rank from another front.
    pub takes_over: bool,
}

impl FrontName {
    /// Of this process.
    pub(crate) fn generate(takes_over: bool) -> anyhow::Result<Self> {
        static ID: OnceLock<Token> = OnceLock::new();
        // A rank that this process left on a node that it could not reach is still its own.
        let id = if let Some(id) = ID.get() {
            id.clone()
        } else {
            let id = Token::generate().context("the system gave no random bytes")?;
            ID.get_or_init(|| id).clone()
        };
        Ok(Self { id, shown: Self::shown_here(), takes_over })
    }

    /// How nodes show the fronts of this process.
    pub(crate) fn shown_here() -> String {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        format!("process {} on {host}", std::process::id())
    }
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
    pub host: HostAddress,
    /// The node's key and membership, for TLS.
    pub identity: Option<PathBuf>,
}

impl RankEndpoint {
    /// For a front on this machine only.
    pub(crate) const LOOPBACK: Self =
        Self { host: HostAddress::new(IpAddr::V4(Ipv4Addr::LOCALHOST)), identity: None };
}

/// A rank process that was started on this machine.
pub(crate) struct StartedRank {
    pub process: RankProcess,
    /// Where it listens, with its token.
    pub announcement: Announcement,
}

/// Where a rank has its package.
#[derive(Clone, Copy)]
pub(crate) enum PackageSource<'a> {
    /// In a folder.
    Folder(&'a Path),
    /// Its front sends it; its documents are put into a folder.
    Front(&'a Path, &'a StreamedPackage),
}

/// Starts the rank of a package, which keeps its weights so long when its front has gone. Its log lines
/// are passed on.
pub(crate) fn start(
    name: &str,
    source: PackageSource<'_>,
    threads: usize,
    engine: &EngineChoice,
    endpoint: &RankEndpoint,
    member: Option<Membership<'_>>,
    keep: Duration,
) -> anyhow::Result<StartedRank> {
    let mut command = Command::new(own_program::path()?);
    command.arg("rank");
    match source {
        PackageSource::Folder(folder) => command.arg(folder),
        PackageSource::Front(folder, package) => {
            command.arg(folder).arg("--stream").arg(serde_json::to_string(package)?)
        }
    };
    command.args(["--threads", &threads.to_string()]);
    command.args(engine.arguments()).args(["--bind", &endpoint.host.to_string()]);
    command.args(["--keep", &keep.as_secs().to_string()]);
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
