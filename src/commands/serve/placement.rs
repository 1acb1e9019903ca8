//! On which nodes the ranks of several models run: as the user says, else where their packages are, by free
//! memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
};

use anyhow::{Context as _, anyhow};
use serde_json::Value;
use shardpack_identity::Endpoint;
use shardpack_server::{Machine, MemoryShare};
use shardpack_transfer::push::{Activation, PushMode, default_streams, finish_activations};
use shardpack_transfer::{
    protocol::{PackageKey, Timeouts},
    receive::NodeClient,
};

use super::hosted_set::{HostedSet, KvChoice, Place};
use crate::{
    args::{KvFormat, ServeArgs},
    commands::{
        cluster,
        node_facts::{FACTS, NodeFacts},
        push,
    },
    failure::Failure,
    progress::size,
};

/// A node, as it is before models are loaded.
pub(super) struct NodeState {
    endpoint: Endpoint,
    facts: NodeFacts,
    /// Packages that it stores.
    held: BTreeSet<PackageKey>,
}

/// What a node says of itself.
pub(super) fn facts(node: &Endpoint) -> anyhow::Result<NodeFacts> {
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.operate(FACTS, &Value::Null)?;
    serde_json::from_value(answer).with_context(|| format!("node {node}: its facts"))
}

/// Asks every node, all at the same time.
pub(super) fn survey(nodes: &[Endpoint]) -> Result<Vec<NodeState>, Failure> {
    thread::scope(|scope| {
        let asking: Vec<_> =
            nodes.iter().map(|node| scope.spawn(|| NodeState::ask(node))).collect();
        let answers = asking.into_iter().map(|thread| {
            // A panic here is ours, and goes on in the caller's thread.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        answers.collect::<anyhow::Result<_>>().map_err(Failure::from)
    })
}

impl NodeState {
    fn ask(node: &Endpoint) -> anyhow::Result<Self> {
        let facts = facts(node)?;
        let listing = NodeClient::connect(node, Timeouts::default())?.list()?;
        let packages = listing["packages"].as_array().map_or(&[][..], Vec::as_slice);
        let key = |package: &Value| {
            let layout = package["layout"].as_str()?.parse().ok()?;
            Some(PackageKey { layout, rank: package["rank"].as_u64()?.try_into().ok()? })
        };
        let held = packages.iter().filter_map(key).collect();
        Ok(Self { endpoint: node.clone(), facts, held })
    }

    /// How its ranks hold keys and values.
    pub(super) fn kv(&self) -> KvChoice {
        let Some(kv) = &self.facts.kv else { return KvChoice::default() };
        let kv_type = KvFormat::ALL.into_iter().find(|it| it.name() == kv.kv_type);
        KvChoice { kv_type: kv_type.unwrap_or_default().kv_type(), bytes: kv.memory_bytes }
    }

    /// What models may take of it: as said, else what it could give to programs, and at most three
    /// quarters of all that it has. Ranks of these models that an earlier server has left count as free:
    /// they are taken up, or end.
    fn machine(&self, said: Option<u64>, own: &BTreeSet<PackageKey>) -> Result<Machine, Failure> {
        let name = self.endpoint.name().to_owned();
        if let Some(limit_bytes) = said {
            return Ok(Machine { name, limit_bytes });
        }
        let machine = &self.facts.machine;
        let (Some(available), Some(total)) =
            (machine.memory_available_bytes, machine.memory_total_bytes)
        else {
            let error = anyhow!("node {} does not say how much memory it has", self.endpoint);
            return Err(Failure::from(error).hint("say what models may take with --memory"));
        };
        let left = self.facts.ranks.iter().filter(|rank| own.contains(&rank.package));
        let left: u64 = left.filter_map(|rank| rank.memory_bytes).sum();
        Ok(Machine { name, limit_bytes: (available + left).min(total / 4 * 3) })
    }
}

/// Places every rank of `sets` on one of the nodes; returns what models may take of each of them. Sets of
/// the managed store are sent to the nodes that they are placed on, unless these have them.
pub(super) fn place(
    args: &ServeArgs,
    sets: &mut [HostedSet],
    stored: &BTreeSet<String>,
    nodes: &[Endpoint],
) -> Result<Vec<Machine>, Failure> {
    check_layouts(sets)?;
    // An activation that was interrupted is over once some node has the release as current.
    cluster::tell_finished(&finish_activations(nodes, Timeouts::default()));
    let states = survey(nodes)?;
    let own: BTreeSet<PackageKey> = sets.iter().flat_map(HostedSet::keys).collect();
    let said = args.memory.as_ref().map(|size| size.0);
    let machines: Vec<Machine> =
        states.iter().map(|state| state.machine(said, &own)).collect::<Result<_, _>>()?;
    let assigned = assigned(args, sets, &states)?;
    let mut left: BTreeMap<String, i128> = machines
        .iter()
        .map(|machine| (machine.name.clone(), i128::from(machine.limit_bytes)))
        .collect();
    for set in sets {
        let name = set.entry.card.name().to_owned();
        let is_stored = stored.contains(&name);
        let chosen = match assigned.get(&name) {
            Some(indices) => indices.clone(),
            None => choose(set, &states, &left, is_stored)?,
        };
        let missing =
            chosen.iter().zip(set.keys()).find(|(at, key)| !states[**at].held.contains(key));
        if let Some((at, key)) = missing {
            if !is_stored {
                return Err(not_there(set, key, &states[*at].endpoint.to_string()));
            }
            send(set, &chosen.iter().map(|at| states[*at].endpoint.clone()).collect::<Vec<_>>())?;
        }
        let place = |at: &usize| Place { node: states[*at].endpoint.clone(), kv: states[*at].kv() };
        set.place(chosen.iter().map(place).collect());
        for share in &set.entry.memory {
            *left.entry(share.machine.clone()).or_default() -= i128::from(share.total_bytes());
        }
    }
    Ok(machines)
}

/// A node runs one rank of a package.
fn check_layouts(sets: &[HostedSet]) -> Result<(), Failure> {
    for (index, set) in sets.iter().enumerate() {
        let layout = set.manifests[0].ids.layout;
        let twin = sets[..index].iter().find(|other| other.manifests[0].ids.layout == layout);
        if let Some(twin) = twin {
            let (first, second) = (twin.entry.card.name(), set.entry.card.name());
            let error = anyhow!(
                "{first} and {second} are the same packages, of which nodes run one rank each"
            );
            return Err(Failure::from(error).hint("serve one of them"));
        }
    }
    Ok(())
}

/// The nodes that the user has chosen for models, by their index.
fn assigned(
    args: &ServeArgs,
    sets: &[HostedSet],
    states: &[NodeState],
) -> Result<BTreeMap<String, Vec<usize>>, Failure> {
    let mut assigned = BTreeMap::new();
    for text in &args.place {
        let wrong = |what: String| Failure::from(anyhow!("--place {text}: {what}"));
        let (name, nodes) = text
            .split_once('=')
            .ok_or_else(|| wrong("expected NAME=NODE,… in rank order".to_owned()))?;
        let set = sets.iter().find(|set| set.entry.card.name() == name);
        let set = set.ok_or_else(|| {
            let known: Vec<&str> = sets.iter().map(|set| set.entry.card.name()).collect();
            wrong(format!("no such model, expected one of {}", known.join(", ")))
        })?;
        let index = |node: &str| {
            let is_it = |state: &NodeState| {
                state.endpoint.name() == node || state.endpoint.address() == node
            };
            states.iter().position(is_it).ok_or_else(|| {
                let known: Vec<&str> = states.iter().map(|it| it.endpoint.name()).collect();
                wrong(format!("{node} is none of --nodes {}", known.join(",")))
            })
        };
        let indices: Vec<usize> = nodes.split(',').map(index).collect::<Result<_, _>>()?;
        let (found, packages) = (indices.len(), set.manifests.len());
        if found != packages {
            return Err(wrong(format!(
                "the set has {packages} packages and {found} nodes were given"
            )));
        }
        if assigned.insert(name.to_owned(), indices).is_some() {
            return Err(wrong(format!("{name} is placed twice")));
        }
    }
    Ok(assigned)
}

/// A node for each rank: one that has its package, none twice where that is possible, and of those the one
/// with the most memory left.
fn choose(
    set: &HostedSet,
    states: &[NodeState],
    left: &BTreeMap<String, i128>,
    is_stored: bool,
) -> Result<Vec<usize>, Failure> {
    let mut ranks: Vec<(usize, Vec<usize>)> = Vec::new();
    for (rank, key) in set.keys().into_iter().enumerate() {
        let holds = |at: &usize| states[*at].held.contains(&key);
        let mut candidates: Vec<usize> = (0..states.len()).filter(holds).collect();
        if candidates.is_empty() {
            if !is_stored {
                return Err(not_there(set, key, "any of --nodes"));
            }
            candidates = (0..states.len()).collect();
        }
        ranks.push((rank, candidates));
    }
    // Those with the least choice first, so that none takes the only node of another.
    ranks.sort_by_key(|(_, candidates)| candidates.len());
    let mut chosen = vec![0; ranks.len()];
    let mut taken = BTreeSet::new();
    for (rank, candidates) in ranks {
        let room = |at: &&usize| {
            let room = left.get(states[**at].endpoint.name()).copied().unwrap_or_default();
            (!taken.contains(*at), room)
        };
        let best = *candidates.iter().max_by_key(room).expect("there are candidates");
        taken.insert(best);
        chosen[rank] = best;
    }
    Ok(chosen)
}

fn not_there(set: &HostedSet, key: PackageKey, place: &str) -> Failure {
    let (name, path) = (set.entry.card.name(), set.path.display());
    let error =
        anyhow!("rank {} of {name} (layout {}) is not on {place}", key.rank, key.layout.short());
    Failure::from(error)
        .hint(format!("push the set to its nodes first: shardpack push {path} --to NODE,…"))
}

/// Sends a set of the store to its nodes.
fn send(set: &HostedSet, nodes: &[Endpoint]) -> Result<(), Failure> {
    let mode = PushMode::Send(Activation::WhenAllPrepared);
    if push::push_set(&set.path, nodes, mode, default_streams())?.is_done() {
        return Ok(());
    }
    Err(anyhow!("not every node has received its package of {}", set.entry.card.name()).into())
}

/// Whether the nodes report as much free memory as ranks that are about to start there need.
pub(super) fn check_free(name: &str, set: &HostedSet) -> Result<(), String> {
    for share in &set.entry.memory {
        let place = set.places.iter().find(|place| place.node.name() == share.machine);
        let Some(place) = place else { continue };
        let facts = facts(&place.node).map_err(|error| format!("{error:#}"))?;
        let keys = set.keys();
        let left = facts.ranks.iter().filter(|rank| keys.contains(&rank.package));
        let left: u64 = left.filter_map(|rank| rank.memory_bytes).sum();
        let Some(available) = facts.machine.memory_available_bytes else { continue };
        if available + left < share.total_bytes() {
            return Err(refusal(name, share, available + left));
        }
    }
    Ok(())
}

fn refusal(name: &str, share: &MemoryShare, available: u64) -> String {
    format!(
        "node {} reports {} free, and '{name}' needs {} there (weights {}, KV cache {}, working memory {}): end what else runs on it, or say with --memory what models may take",
        share.machine,
        size(available),
        size(share.total_bytes()),
        size(share.weights_bytes),
        size(share.cache_bytes),
        size(share.working_bytes),
    )
}
