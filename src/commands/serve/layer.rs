//! Which of MLX's own layers carries the sums of a served set, and who is where in it.

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
};

/// A layer of MLX's own.
pub(super) enum Layer {
    /// As described, for ever.
    Fixed(Distributed),
    /// A ring on this machine, on ports that are free when the group is formed.
    Local { ranks: usize, last: Mutex<Option<(u32, Distributed)>> },
}

impl Layer {
    /// What the arguments ask for; none where the sums are our own.
    pub(super) fn of(
        args: &ServeArgs,
        ranks: usize,
        nodes: &[Endpoint],
    ) -> Result<Option<Self>, Failure> {
        let wrong = |error: DistributedError| {
            Failure::from(error).hint("see `shardpack serve --help` on --hostfile")
        };
        let is_jaccl = match args.engine.collectives {
            CollectivesName::Auto | CollectivesName::Own if args.hostfile.is_none() => {
                return Ok(None);
            }
            CollectivesName::Auto | CollectivesName::Own => {
                return Err(anyhow!("--hostfile is for --collectives ring or jaccl").into());
            }
            CollectivesName::Ring => false,
            CollectivesName::Jaccl => true,
        };
        if args.engine.engine != EngineName::Mlx {
            return Err(anyhow!(
                "ring and jaccl are MLX's own collectives: they go with --engine mlx"
            )
            .into());
        }
        let file = args.hostfile.as_deref().map(HostFile::read).transpose().map_err(wrong)?;
        let port = args.collectives_port;
        let layer = match (file, is_jaccl) {
            (Some(file), true) => Self::Fixed(file.jaccl(port).map_err(wrong)?),
            (Some(file), false) => Self::Fixed(file.ring(port).map_err(wrong)?),
            (None, true) => {
                return Err(Failure::from(anyhow!(
                    "jaccl must be told which RDMA device leads from each rank to each other"
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
                        "MLX's ring neither encrypts nor asks who calls: it would listen on {ip}"
                    ))
                    .hint(
                        "name the cables' own addresses in a host file and give it with --hostfile",
                    ));
                }
                Self::Fixed(Distributed::ring_over(&ips, port).map_err(wrong)?)
            }
        };
        if let Self::Fixed(distributed) = &layer {
            distributed.check(ranks).map_err(wrong)?;
        }
        Ok(Some(layer))
    }

    /// The group of a recovery; the same for all ranks that are started in it.
    pub(super) fn group(&self, recovery: u32) -> anyhow::Result<Distributed> {
        let (ranks, last) = match self {
            Self::Fixed(distributed) => return Ok(distributed.clone()),
            Self::Local { ranks, last } => (*ranks, last),
        };
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, distributed)) = last.as_ref().filter(|(of, _)| *of == recovery) {
            return Ok(distributed.clone());
        }
        // All are held until each has its own.
        let listeners = (0..ranks)
            .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .collect::<Result<Vec<_>, _>>()
            .context("no free port on 127.0.0.1")?;
        let hosts = listeners.iter().map(|it| it.local_addr().map(|address| vec![address]));
        let distributed = Distributed::Ring { hosts: hosts.collect::<Result<_, _>>()? };
        *last = Some((recovery, distributed.clone()));
        Ok(distributed)
    }
}
