//! A set that a server of several models can load: its packages, where its ranks run, and what memory they
//! take there as planned.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use shardpack_converter::plan::served_memory;
use shardpack_formats::memory::KvType;
use shardpack_identity::Endpoint;
use shardpack_manifests::Manifest;
use shardpack_server::{MemoryShare, ModelCard, ModelEntry};
use shardpack_transfer::protocol::PackageKey;

use super::{Served, info};
use crate::{
    args::{EngineChoice, KvFormat},
    failure::Failure,
};

/// The machine of ranks that run beside the server.
pub(super) const THIS_MACHINE: &str = "this machine";

/// How ranks of a machine hold keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KvChoice {
    pub(super) kv_type: KvType,
    /// Of each rank; enough for one sequence of the longest context when absent.
    pub(super) bytes: Option<u64>,
}

impl KvChoice {
    /// What was chosen with an engine.
    pub(super) fn of(engine: &EngineChoice) -> Self {
        let kv_type = engine.kv_type.map_or(KvType::default(), KvFormat::kv_type);
        Self { kv_type, bytes: engine.kv_memory.as_ref().map(|size| size.0) }
    }
}

/// The node of a rank.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) node: Endpoint,
    pub(super) kv: KvChoice,
}

/// A set that can be loaded.
pub(super) struct HostedSet {
    pub(super) entry: ModelEntry,
    /// The set's folder.
    pub(super) path: PathBuf,
    /// The packages' folders and manifests, in rank order.
    pub(super) folders: Vec<PathBuf>,
    pub(super) manifests: Vec<Manifest>,
    /// The nodes of its ranks, in rank order; none where they run on this machine.
    pub(super) places: Vec<Place>,
}

impl HostedSet {
    /// The set at `path`, whose ranks are to run on this machine.
    pub(super) fn open(
        path: &Path,
        kv: KvChoice,
        idle_timeout: Option<Duration>,
    ) -> Result<Self, Failure> {
        let Served { model, folders, manifests, name, .. } = Served::open(path)?;
        let entry = ModelEntry {
            card: ModelCard::of(&model, vec![name], info::of(&manifests)),
            memory: shares(&manifests, &vec![(THIS_MACHINE.to_owned(), kv); manifests.len()]),
            is_pinned: false,
            priority: 1,
            idle_timeout,
        };
        let (path, places) = (path.to_owned(), Vec::new());
        Ok(Self { entry, path, folders, manifests, places })
    }

    /// Its ranks are to run on these nodes, one for each.
    pub(super) fn place(&mut self, places: Vec<Place>) {
        let machines: Vec<(String, KvChoice)> =
            places.iter().map(|place| (place.node.name().to_owned(), place.kv)).collect();
        self.entry.memory = shares(&self.manifests, &machines);
        self.entry.card.info.nodes = machines.into_iter().map(|(name, _)| name).collect();
        self.places = places;
    }

    /// The packages that nodes hold of it, in rank order.
    pub(super) fn keys(&self) -> Vec<PackageKey> {
        self.manifests.iter().map(package_key).collect()
    }

    /// Nodes and packages of its ranks, in rank order.
    pub(super) fn remote(&self) -> Vec<(Endpoint, PackageKey)> {
        let nodes = self.places.iter().map(|place| place.node.clone());
        nodes.zip(self.keys()).collect()
    }
}

/// By which nodes know a package.
pub(super) fn package_key(manifest: &Manifest) -> PackageKey {
    PackageKey { layout: manifest.ids.layout, rank: manifest.rank }
}

/// What the ranks of these packages take of each machine, as `plan` counts it; `machines` are those of the
/// ranks, in rank order, and how they hold keys and values.
pub(super) fn shares(manifests: &[Manifest], machines: &[(String, KvChoice)]) -> Vec<MemoryShare> {
    let weights = |manifest: &Manifest| manifest.tensors.iter().map(|tensor| tensor.size).sum();
    let weights: Vec<u64> = manifests.iter().map(weights).collect();
    let (spec, layout) = (&manifests[0].architecture, &manifests[0].layout);
    let mut shares: BTreeMap<&str, MemoryShare> = BTreeMap::new();
    for (rank, (machine, kv)) in machines.iter().enumerate() {
        let planned = served_memory(spec, layout, &weights, (kv.kv_type, kv.bytes));
        let Some(planned) = planned.into_iter().nth(rank) else { continue };
        let share = shares.entry(machine).or_insert_with(|| MemoryShare {
            machine: machine.clone(),
            weights_bytes: 0,
            cache_bytes: 0,
            working_bytes: 0,
        });
        share.weights_bytes += planned.weight_bytes;
        share.cache_bytes += planned.cache_bytes;
        share.working_bytes += planned.working_bytes;
    }
    shares.into_values().collect()
}
