//! Files that several nodes of a push lack leave this machine once: each further node fetches them from one
//! that has them or is getting them, so that nodes form a chain in the order in which they are ready.
//!
//! A relay is a shortcut and nothing is lost without it: whatever a node could not fetch is sent from here.
//! A node whose connection broke fetches nothing when it comes again, so that no two nodes can wait for one another.
//!
//! Knows which nodes have which files; does not know how chunks are sent from here.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{Shutdown as Direction, SocketAddr},
    sync::{Mutex, MutexGuard, PoisonError},
};

use shardpack_identity::{Endpoint, is_local};
use shardpack_manifests::{Digest, manifest::FileEntry};

use super::{PushEvent, Target, open::Package, send::NodePush};
use crate::{
    error_chain::chain,
    protocol::{FailureCode, Join},
    receive::{ClientError, NodeClient, TAKE, TakeAnswer, TakeRequest},
    ticket::{MAX_TICKET_FILES, SignedTicket, Ticket, TicketError, TicketFile},
};

/// Whether nodes of a push may fetch from one another what several of them lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedFiles {
    /// They leave this machine once.
    Relayed,
    /// This machine sends them to each.
    Sent,
}

/// A file by what it is.
type FileId = (Digest, u64);

/// Who has what, over all nodes of a push.
pub(super) struct Relays<'a> {
    targets: &'a [Target],
    packages: &'a [Package],
    /// Files that stand in several of the packages.
    shared: HashSet<FileId>,
    /// Nodes, by their position, that have a file or are getting it, the latest last.
    holders: Mutex<HashMap<FileId, Vec<usize>>>,
}

/// Files that a node is to fetch from another.
pub(super) struct Order {
    /// Position of the node that has them.
    from: usize,
    /// Their indices in the package of the node that fetches.
    pub(super) files: BTreeSet<u32>,
}

/// What a node is to do about shared files, once it has said what it holds.
#[derive(Default)]
pub(super) struct Plan {
    /// Files to be fetched.
    pub(super) orders: Vec<Order>,
    /// Files that others will fetch from this node, and that are sent first.
    pub(super) first: BTreeSet<u32>,
}

/// Why nothing was fetched, or not all.
#[derive(Debug, thiserror::Error)]
pub(super) enum RelayError {
    /// The node could not be asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No ticket.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// The push has failed meanwhile.
    #[error("the push to this node has ended")]
    Ended,
}

impl RelayError {
    /// Whether the node is of a version without relays, which is no fault.
    fn is_outdated(&self) -> bool {
        let Self::Client(ClientError::Refused { failure, .. }) = self else { return false };
        matches!(failure.code, FailureCode::NoOperation | FailureCode::Malformed)
    }
}

impl<'a> Relays<'a> {
    pub(super) fn new(
        targets: &'a [Target],
        packages: &'a [Package],
        shared_files: SharedFiles,
    ) -> Self {
        let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
        for package in packages.iter().filter(|_| shared_files == SharedFiles::Relayed) {
            let files: HashSet<FileId> = package.manifest.files.iter().filter_map(id).collect();
            shared.extend(files.iter().filter(|it| seen.contains(*it)));
            seen.extend(files);
        }
        Self { targets, packages, shared, holders: Mutex::default() }
    }

    /// A node has said which files it lacks chunks of. From now on others may fetch from it.
    /// `may_fetch` is false of one that has been asked before.
    pub(super) fn plan(&self, node: usize, missing: &BTreeSet<u32>, may_fetch: bool) -> Plan {
        let mut holders = self.lock();
        let (mut plan, mut orders) = (Plan::default(), BTreeMap::<usize, BTreeSet<u32>>::new());
        let mut known: HashMap<FileId, Option<usize>> = HashMap::new();
        for (index, entry) in (0..).zip(&self.packages[node].manifest.files) {
            let Some(id) = id(entry).filter(|id| self.shared.contains(id)) else { continue };
            let from = *known.entry(id).or_insert_with(|| {
                let those = holders.entry(id).or_default();
                let of_others = |it: &&usize| **it != node && self.can_reach(node, **it);
                let from = those.iter().rev().find(of_others).copied();
                those.retain(|it| *it != node);
                those.push(node);
                from.filter(|_| may_fetch)
            });
            match from.filter(|_| missing.contains(&index)) {
                Some(from) if orders.get(&from).map_or(0, BTreeSet::len) < MAX_TICKET_FILES => {
                    orders.entry(from).or_default().insert(index);
                }
                _ => drop(plan.first.insert(index)),
            }
        }
        plan.orders = orders.into_iter().map(|(from, files)| Order { from, files }).collect();
        plan
    }

    /// The push to a node failed: nobody else is sent to it.
    pub(super) fn lost(&self, node: usize) {
        self.lock().values_mut().for_each(|those| those.retain(|it| *it != node));
    }

    /// Whether a node can be expected to reach another: both are members of the cluster or neither, and
    /// an address on this machine means nothing elsewhere.
    fn can_reach(&self, node: usize, from: usize) -> bool {
        let (node, from) = (&self.targets[node].node, &self.targets[from].node);
        node.tls().is_some() == from.tls().is_some() && is_here(node) == is_here(from)
    }

    /// Has the node of a push fetch files; returns what came of it.
    fn take(&self, push: &NodePush, order: &Order) -> Result<TakeAnswer, RelayError> {
        let (package, target) = (push.package, push.target);
        let (from, theirs) = (&self.targets[order.from].node, &self.packages[order.from]);
        let wanted: HashSet<FileId> =
            order.files.iter().filter_map(|it| id(&package.manifest.files[*it as usize])).collect();
        let listed = (0..).zip(&theirs.manifest.files);
        let files = listed.filter(|(_, entry)| id(entry).is_some_and(|it| wanted.contains(&it)));
        let files = files.map(|(file, entry)| {
            let FileEntry { blake3, size, .. } = *entry;
            TicketFile { file, blake3, size }
        });
        let key = |node: &Endpoint| node.tls().map(|peer| peer.key);
        let ticket = Ticket::new(theirs.key, files.collect(), key(from), key(&target.node));
        let signer = target.node.tls().map(|peer| &peer.credentials);
        let Join { package: taker, manifest } =
            Join::of(&package.manifest, &package.manifest_bytes);
        let request = TakeRequest {
            package: taker,
            manifest,
            name: from.name().to_owned(),
            address: from.address().to_owned(),
            key: key(from),
            ticket: SignedTicket::sign(ticket, signer)?,
        };
        let mut client = NodeClient::connect(&target.node, push.options.timeouts)?;
        if let Ok(socket) = client.socket().try_clone()
            && !push.register(move || drop(socket.shutdown(Direction::Both)))
        {
            return Err(RelayError::Ended);
        }
        let parameters = serde_json::to_value(request).expect("requests have text keys");
        let (rank, mut told_bytes) = (target.rank, 0);
        let mut tell = |done_bytes: u64| {
            let size_bytes = done_bytes.saturating_sub(told_bytes);
            told_bytes += size_bytes;
            (push.observer)(&PushEvent::Relayed { rank, size_bytes });
        };
        let answer = client.operate_watched(TAKE, &parameters, &mut tell)?;
        let answer: TakeAnswer = serde_json::from_value(answer).map_err(|error| {
            let (address, problem) = (target.node.to_string(), error.to_string());
            ClientError::Answer { address, problem }
        })?;
        tell(answer.taken_bytes);
        Ok(answer)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FileId, Vec<usize>>> {
        // Nothing that panics leaves a list halfway.
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries out an order; what did not come is sent from here.
pub(super) fn carry_out(push: &NodePush, order: &Order) {
    let taken = push.relays.take(push, order);
    let rank = push.target.rank;
    let tell = |reason: &str| {
        if push.has_failed() {
            return;
        }
        let from = push.relays.targets[order.from].node.to_string();
        (push.observer)(&PushEvent::RelayFailed { rank, from: &from, reason });
    };
    match taken {
        Ok(answer) => {
            push.with(|shared| {
                shared.traffic.relayed_bytes += answer.taken_bytes;
                shared.traffic.relayed_chunks += answer.taken_chunks;
                let is_missing = |file, chunk| {
                    let holds = |[of, begin, end]: &[u32; 3]| {
                        *of == file && (*begin..*end).contains(&chunk)
                    };
                    answer.missing.iter().any(holds)
                };
                shared.sender.relayed(&order.files, is_missing);
            });
            if let Some(problem) = &answer.problem {
                tell(problem);
            }
        }
        Err(error) => {
            push.with(|shared| shared.sender.relayed(&order.files, |_, _| true));
            if !error.is_outdated() {
                tell(&chain(&error));
            }
        }
    }
}

/// A file that may be relayed; an empty one is not worth a word.
fn id(entry: &FileEntry) -> Option<FileId> {
    (entry.size > 0).then_some((entry.blake3, entry.size))
}

/// Whether an address is one of this machine, as it is written: a node elsewhere would look at home.
fn is_here(node: &Endpoint) -> bool {
    let address = node.address();
    address.starts_with("localhost:")
        || address.parse::<SocketAddr>().is_ok_and(|address| is_local(address.ip()))
}
