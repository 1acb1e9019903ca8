//! The collectives of MLX's own that a served set uses, and the addresses of its ranks.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow};
use shardpack_identity::{Endpoint, is_local};
use shardpack_mlx::distributed::{Distributed, DistributedError, HostFile};

use crate::{
    args::{CollectivesName, EngineName, ServeArgs},
    failure::Failure,
    progress::say,
};

/// The refusal of collectives that are not encrypted.
pub(super) fn unencrypted(what: &str) -> Failure {
    Failure::from(anyhow!("{what} not encrypted, and --require-encryption was given"))
        .hint("use --collectives auto, which is TCP inside TLS between machines then")
}

/// A ring on this machine that was formed in a recovery.
pub(super) struct FormedRing {
    recovery: u32,
    distributed: Distributed,
}

/// A group of MLX's own.
pub(super) enum MlxGroup {
    /// Described by the arguments.
    Fixed(Distributed),
    /// A ring on this machine, on ports that are free when the group is formed.
    Local { ranks: usize, last: Mutex<Option<FormedRing>> },
}

impl MlxGroup {
    /// The group that the arguments ask for; `None` with the built-in collectives.
    pub(super) fn of(
        args: &ServeArgs,
        ranks: usize,
        nodes: &[Endpoint],
    ) -> Result<Option<Self>, Failure> {
        let wrong = |error: DistributedError| {
            Failure::from(error).hint("see `shardpack serve --help` on --hostfile")
        };
        let which = args.engine.collectives;
        if which.are_own() {
            if args.network.hostfile.is_none() {
                return Ok(None);
            }
            return Err(
                anyhow!("--hostfile is for --collectives ring, jaccl and jaccl-ring").into()
            );
        }
        if args.require_encryption {
            return Err(unencrypted("MLX's ring and JACCL are"));
        }
        let is_jaccl = which != CollectivesName::Ring;
        if args.engine.engine != EngineName::Mlx {
            return Err(
                anyhow!("ring and jaccl are MLX's collectives: they need --engine mlx").into()
            );
        }
        let file =
            args.network.hostfile.as_deref().map(HostFile::read).transpose().map_err(wrong)?;
        let port = args.network.collectives_port;
        let mlx_group = match (file, is_jaccl) {
            (Some(file), true) if which == CollectivesName::JacclRing => {
                Self::Fixed(file.jaccl_ring(port).map_err(wrong)?)
            }
            (Some(file), true) => Self::Fixed(file.jaccl(port).map_err(wrong)?),
            (Some(file), false) => Self::Fixed(file.ring(port).map_err(wrong)?),
            (None, true) => {
                return Err(Failure::from(anyhow!(
                    "jaccl needs the RDMA device from each rank to every other rank"
                ))
                .hint(
                    "let `mlx.distributed_config` write a host file and give it with --hostfile",
                ));
            }
            (None, false) if nodes.is_empty() => Self::Local { ranks, last: Mutex::default() },
            (None, false) => {
                let ip = |node: &Endpoint| {
                    let addresses = node.resolve()?;
                    let first = addresses.first().with_context(|| format!("{node}: no address"))?;
                    anyhow::Ok(first.ip())
                };
                let ips = nodes.iter().map(ip).collect::<anyhow::Result<Vec<_>>>()?;
                if let Some(ip) = ips.iter().find(|ip| !is_local(**ip)) {
                    return Err(Failure::from(anyhow!(
                        "MLX's ring has no encryption and no authentication, and would listen on {ip}"
                    ))
                    .hint(
                        "name the cables' own addresses in a host file and give it with --hostfile",
                    ));
                }
                Self::Fixed(Distributed::ring_over(&ips, port).map_err(wrong)?)
            }
        };
        if let Self::Fixed(distributed) = &mlx_group {
            distributed.check(ranks).map_err(wrong)?;
            let unused = distributed.unused_cables();
            if unused > 0 {
                say(&format!(
                    "jaccl: a mesh uses one cable of each pair, and up to {unused} more stay unused; \
                     --collectives jaccl-ring uses all of them"
                ));
            }
        }
        Ok(Some(mlx_group))
    }

    /// The group of a recovery; the same for all ranks that are started in it.
    pub(super) fn group(&self, recovery: u32) -> anyhow::Result<Distributed> {
        let (ranks, last) = match self {
            Self::Fixed(distributed) => return Ok(distributed.clone()),
            Self::Local { ranks, last } => (*ranks, last),
        };
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(formed) = last.as_ref().filter(|formed| formed.recovery == recovery) {
            return Ok(formed.distributed.clone());
        }
        // All ports are held until every rank has one.
        let listeners = (0..ranks)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .collect::<Result<Vec<_>, _>>()
            .context("no free port on 127.0.0.1")?;
        let hosts = listeners.iter().map(|it| it.local_addr().map(|address| vec![address]));
        let distributed = Distributed::Ring { hosts: hosts.collect::<Result<_, _>>()? };
        *last = Some(FormedRing { recovery, distributed: distributed.clone() });
        Ok(distributed)
    }
}
