//! What carries the frames of a pair of ranks: RDMA where both have it and it works, else TCP, inside
//! TLS between machines. Each pair is judged by itself when a group is formed, so a missing or slow
//! cable costs its pair alone; which algorithm an all-reduce uses is then up to what was measured.

use std::{
    collections::HashMap,
    env, io,
    time::{Duration, Instant},
};

use shardpack_collectives::{
    Deadline, GroupError, Link, LinkedGroup, TcpLink,
    rdma::{self, Cables, Connected, Devices, Pair, RdmaError, Shape},
};
use shardpack_engine_api::{LinkReport, Transport};
use shardpack_identity::{Channel, is_local};

use crate::message::{GroupPlan, LinkChoice};

/// Names the RDMA devices to use, with commas; with it, RDMA also serves ranks on one machine.
const DEVICES: &str = "SHARDPACK_RDMA_DEVICES";

/// RDMA links to a rank that failed within [`FAILURE_WINDOW`], after which it is linked over TCP for
/// as long: a cable that passes its test and then loses frames would otherwise end one step after
/// another.
const MAX_FAILURES: usize = 2;

/// See [`MAX_FAILURES`].
const FAILURE_WINDOW: Duration = Duration::from_mins(10);

/// The devices that may be used.
fn open() -> Result<Devices, String> {
    let opened = match env::var(DEVICES) {
        Ok(names) => Devices::open_only(&names.split(',').collect::<Vec<_>>()),
        Err(_) => Devices::open(),
    };
    opened.map_err(|error| error.to_string())
}

/// Why a pair has no link at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkFailure {
    #[error("rank {rank} has no RDMA, which --collectives rdma asks for: {reason}")]
    NoRdma { rank: u32, reason: String },
    #[error("rank {rank} cannot be connected to by RDMA")]
    Rdma { rank: u32, source: RdmaError },
    #[error("the connection to rank {rank} cannot be used")]
    Socket { rank: u32, source: io::Error },
}

impl LinkFailure {
    /// The rank at the other end.
    pub(crate) const fn rank(&self) -> u32 {
        match self {
            Self::NoRdma { rank, .. } | Self::Rdma { rank, .. } | Self::Socket { rank, .. } => {
                *rank
            }
        }
    }
}

/// Makes the links of one rank process, epoch after epoch.
pub(crate) struct LinkMaker {
    shape: Shape,
    /// The RDMA devices, or why there are none; not looked for before they are wanted. Opened once:
    /// registering memory takes long, and processes that open them often exhaust the driver.
    devices: Option<Result<Devices, String>>,
    /// When RDMA links failed, by the rank at the other end.
    failures: HashMap<u32, Vec<Instant>>,
    /// Of the present group.
    present: Vec<LinkReport>,
}

impl LinkMaker {
    /// `vector_bytes`: of the hidden vector of one token, the message that is sent most.
    pub(crate) fn new(vector_bytes: usize) -> Self {
        let shape = Shape::for_vectors(vector_bytes);
        Self { shape, devices: None, failures: HashMap::new(), present: Vec::new() }
    }

    /// Forgets the last group's links.
    pub(crate) fn begin(&mut self) {
        self.present.clear();
    }

    /// The link of `pair` over its two connected streams. All pairs of a group are linked in the
    /// same order.
    pub(crate) fn link(
        &mut self,
        pair: Pair,
        plan: &GroupPlan,
        streams: (Channel, Channel),
        deadline: Deadline,
    ) -> Result<Box<dyn Link>, LinkFailure> {
        let (rank, peer, choice, peers) = (pair.rank, pair.peer, plan.links, &plan.peers);
        let transport =
            if peers[rank as usize].key.is_some() { Transport::Tls } else { Transport::Tcp };
        let mut report = LinkReport {
            ranks: [rank.min(peer), rank.max(peer)],
            transport,
            declined: None,
            latency_us: None,
            bytes_per_second: None,
        };
        let is_here = |rank: u32| is_local(peers[rank as usize].address.ip());
        let is_useless = choice == LinkChoice::Auto
            && is_here(rank)
            && is_here(peer)
            && env::var_os(DEVICES).is_none();
        let (data, control) = if choice == LinkChoice::Tcp {
            streams
        } else {
            let shape = self.shape;
            // Even then the other side is told: it may see this otherwise.
            let cables = if is_useless {
                Cables::Without("both ranks run on one machine".to_owned())
            } else {
                self.cables(peer)
            };
            match rdma::connect(pair, &shape, &cables, streams, deadline)
                .map_err(|source| LinkFailure::Rdma { rank: peer, source })?
            {
                Connected::Rdma(link) => {
                    report.transport = Transport::Rdma;
                    self.present.push(report);
                    return Ok(Box::new(link));
                }
                Connected::Declined { reason, .. } if choice == LinkChoice::Rdma => {
                    return Err(LinkFailure::NoRdma { rank: peer, reason });
                }
                Connected::Declined { reason, data, control } => {
                    report.declined = (!is_useless).then_some(reason);
                    (data, control)
                }
            }
        };
        self.present.push(report);
        let link = TcpLink::new(data, control);
        let link = link.map_err(|source| LinkFailure::Socket { rank: peer, source })?;
        Ok(Box::new(link))
    }

    /// This rank's cables to a peer.
    fn cables(&mut self, peer: u32) -> Cables<'_> {
        let failed = self.failures.get(&peer).map_or(0, |failures| {
            failures.iter().filter(|failure| failure.elapsed() < FAILURE_WINDOW).count()
        });
        if failed >= MAX_FAILURES {
            let minutes = FAILURE_WINDOW.as_secs() / 60;
            return Cables::Without(format!(
                "RDMA to rank {peer} failed {failed} times within {minutes} minutes"
            ));
        }
        match self.devices.get_or_insert_with(open) {
            Ok(devices) => Cables::Found(devices),
            Err(reason) => Cables::Without(reason.clone()),
        }
    }

    /// Counts the failure of an RDMA link that the end of a group shows. A process that ended is no
    /// fault of its link.
    pub(crate) fn fail(&mut self, error: &GroupError) {
        let (GroupError::Timeout { rank: peer, .. } | GroupError::Link { rank: peer, .. }) = error
        else {
            return;
        };
        let is_rdma =
            |link: &LinkReport| link.transport == Transport::Rdma && link.ranks.contains(peer);
        if self.present.iter().any(is_rdma) {
            let failures = self.failures.entry(*peer).or_default();
            failures.retain(|failure| failure.elapsed() < FAILURE_WINDOW);
            failures.push(Instant::now());
        }
    }

    /// The present group's links to ranks above `rank`, with their measured speeds: each pair is
    /// reported by one of its ends.
    pub(crate) fn reports(&self, rank: u32, group: &LinkedGroup) -> Vec<LinkReport> {
        let mut reports: Vec<LinkReport> =
            self.present.iter().filter(|link| link.ranks[0] == rank).cloned().collect();
        let speeds = group.link_speeds();
        for report in &mut reports {
            let [low, high] = report.ranks;
            if let Some(speed) = speeds.as_ref().and_then(|speeds| speeds.between(low, high)) {
                report.latency_us = Some(speed.latency_ns as f64 / 1e3);
                report.bytes_per_second = Some(speed.bytes_per_s as f64);
            }
        }
        reports
    }
}
