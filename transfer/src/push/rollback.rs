//! Rollback: all nodes of a model go back to an earlier release, or none does.

use shardpack_identity::Endpoint;

use super::{
    NodeError, PushObserver,
    activate::{Member, finish_decided, next_number, two_phases},
    session::{Session, at_once, signer},
};
use crate::{
    protocol::Timeouts,
    receive::{ReleaseInfo, ReleaseOrder},
    release::{Release, ReleaseError, ReleasePackage, SignedRelease},
};

/// What to go back to.
#[derive(Clone, Debug, Default)]
pub struct RollbackOptions {
    /// The model; the only one of the nodes if none is named.
    pub model: Option<String>,
    /// Number of the release; the one before the current one if none is named.
    pub to: Option<u64>,
}

/// A rollback that did not begin: no node was asked to change anything.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// A node was not reached, or did not answer.
    #[error("{node} did not answer, so no node was rolled back")]
    Node {
        /// The node.
        node: String,
        /// Why.
        source: NodeError,
    },
    /// None of the nodes has an active model of that name.
    #[error("no node has an active release of {model}; active are: {}", list(active))]
    NoModel {
        /// The model.
        model: String,
        /// The models that there are.
        active: Vec<String>,
    },
    /// It is not clear which model is meant.
    #[error("the nodes have {} active models ({}); name the one to roll back", active.len(), list(active))]
    WhichModel {
        /// The models.
        active: Vec<String>,
    },
    /// There is nothing to go back to.
    #[error("{node} has no release of {model} before release {current} that it could go back to")]
    NoPrevious {
        /// The node.
        node: String,
        /// The model.
        model: String,
        /// The current release.
        current: u64,
    },
    /// The release that was named is not on a node.
    #[error(
        "{node} does not have release {to} of {model}; before the current one it has: {}",
        numbers(known)
    )]
    NoRelease {
        /// The node.
        node: String,
        /// The model.
        model: String,
        /// The release.
        to: u64,
        /// The releases that it has.
        known: Vec<u64>,
    },
    /// Nodes have different releases, or not all of a release.
    #[error("the nodes do not have the same release of {model} to go back to: {problem}")]
    Different {
        /// The model.
        model: String,
        /// What is different.
        problem: String,
    },
    /// The record could not be made.
    #[error(transparent)]
    Release(#[from] ReleaseError),
}

fn list(models: &[String]) -> String {
    if models.is_empty() { "none".to_owned() } else { models.join(", ") }
}

fn numbers(releases: &[u64]) -> String {
    list(&releases.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// What became of a rollback.
#[derive(Debug)]
pub struct RollbackReport {
    /// The model.
    pub model: String,
    /// Number of the release that is current now: of the new record, or of one that was left half
    /// activated.
    pub release: u64,
    /// Number of the release whose packages are current again; none if instead a release that was
    /// left half activated was finished.
    pub restored: Option<u64>,
    /// Its nodes, in rank order.
    pub nodes: Vec<RollbackNode>,
}

/// A node of a rollback.
#[derive(Debug)]
pub struct RollbackNode {
    /// The node.
    pub node: Endpoint,
    /// Its rank.
    pub rank: u32,
    /// Why it failed.
    pub error: Option<NodeError>,
}

impl RollbackReport {
    /// Whether every node has the release.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.nodes.iter().all(|node| node.error.is_none())
    }
}

/// Takes all nodes of a model back to an earlier release. Nodes without the model are left out. A
/// release that was left half activated is finished instead.
pub fn rollback(
    nodes: &[Endpoint],
    options: &RollbackOptions,
    timeouts: Timeouts,
    observer: PushObserver,
) -> Result<RollbackReport, RollbackError> {
    let (model, mut members) = reach(nodes, options, timeouts)?;
    let report = |members: &[Member], release, restored, errors: Vec<Option<NodeError>>| {
        let node = |(member, error): (&Member, Option<NodeError>)| RollbackNode {
            node: member.session.node.clone(),
            rank: member.rank,
            error,
        };
        let nodes = members.iter().zip(errors).map(node).collect();
        RollbackReport { model: model.clone(), release, restored, nodes }
    };
    let finished = finish_decided(&mut members, &model).map_err(|(index, source)| {
        RollbackError::Node { node: members[index].session.node.to_string(), source }
    })?;
    if let Some(finished) = finished.first() {
        let errors = members.iter().map(|_| None).collect();
        return Ok(report(&members, finished.release, None, errors));
    }
    let target = target(&model, &members, options)?;
    let release = next_number(&members);
    let restored = target.release;
    let (set, layout, packages) = (target.set, target.layout, target.packages);
    let record = Release::new(model.clone(), release, set, layout, packages).restoring(restored);
    let signed = SignedRelease::sign(record, signer(nodes).as_ref())?;
    let results = two_phases(&mut members, &signed, ReleaseOrder::Newer, observer);
    let errors = results.into_iter().map(Result::err).collect();
    Ok(report(&members, release, Some(restored), errors))
}

/// The nodes that have the model, in rank order.
fn reach(
    nodes: &[Endpoint],
    options: &RollbackOptions,
    timeouts: Timeouts,
) -> Result<(String, Vec<Member>), RollbackError> {
    let reached = at_once(nodes, |node| {
        let open = || {
            let mut session = Session::open(node, timeouts)?;
            let state = session.state()?;
            Ok((session, state))
        };
        open().map_err(|source| RollbackError::Node { node: node.to_string(), source })
    });
    let reached = reached.into_iter().collect::<Result<Vec<_>, RollbackError>>()?;
    let mut active: Vec<String> = reached
        .iter()
        .flat_map(|(_, state)| &state.models)
        .filter(|(_, model)| model.current.is_some())
        .map(|(name, _)| name.clone())
        .collect();
    active.sort();
    active.dedup();
    let model = match (&options.model, active.as_slice()) {
        (Some(model), _) if active.contains(model) => model.clone(),
        (Some(model), _) => return Err(RollbackError::NoModel { model: model.clone(), active }),
        (None, [model]) => model.clone(),
        (None, []) => return Err(RollbackError::NoModel { model: "any model".to_owned(), active }),
        (None, _) => return Err(RollbackError::WhichModel { active }),
    };
    let mut members: Vec<Member> = reached
        .into_iter()
        .filter_map(|(session, mut state)| {
            let state = state.models.remove(&model)?;
            let rank = state.current.as_ref()?.package.rank;
            Some(Member { rank, session, state: Some(state) })
        })
        .collect();
    members.sort_by_key(|member| member.rank);
    Ok((model, members))
}

/// The packages to go back to.
struct RollbackTarget {
    release: u64,
    set: Option<shardpack_manifests::Digest>,
    layout: shardpack_manifests::Digest,
    packages: Vec<ReleasePackage>,
}

/// What all nodes can go back to, one package of each rank.
fn target(
    model: &str,
    members: &[Member],
    options: &RollbackOptions,
) -> Result<RollbackTarget, RollbackError> {
    let different = |problem| RollbackError::Different { model: model.to_owned(), problem };
    let mut releases = Vec::with_capacity(members.len());
    for member in members {
        let Some(state) = &member.state else { continue };
        let node = || member.session.node.to_string();
        let found = match options.to {
            None => state.history.first().ok_or_else(|| RollbackError::NoPrevious {
                node: node(),
                model: model.to_owned(),
                current: state.current.as_ref().map_or(0, |current| current.release),
            })?,
            Some(to) => {
                let found = state.history.iter().find(|release| release.release == to);
                found.ok_or_else(|| RollbackError::NoRelease {
                    node: node(),
                    model: model.to_owned(),
                    to,
                    known: state.history.iter().map(|release| release.release).collect(),
                })?
            }
        };
        releases.push((member, found));
    }
    let (first_member, first) = releases[0];
    let mut packages: Vec<Option<ReleasePackage>> = vec![None; ranks_of(first, members.len())];
    for (member, release) in &releases {
        let ReleaseInfo { package, manifest, .. } = release;
        let node = &member.session.node;
        if package.layout != first.package.layout || release.release != first.release {
            return Err(different(format!(
                "{} has release {} (layout {}), {node} release {} (layout {})",
                first_member.session.node,
                first.release,
                first.package.layout.short(),
                release.release,
                package.layout.short()
            )));
        }
        let manifest = manifest.ok_or_else(|| {
            different(format!("{node} no longer has package {package}; push its set again"))
        })?;
        let place = packages.get_mut(package.rank as usize).ok_or_else(|| {
            different(format!("{node} has rank {} of a release of fewer", package.rank))
        })?;
        if place.replace(ReleasePackage { package: *package, manifest }).is_some() {
            return Err(different(format!("two nodes have rank {}", package.rank)));
        }
    }
    if let Some(missing) = packages.iter().position(Option::is_none) {
        return Err(different(format!("no node has rank {missing}; name all nodes with --nodes")));
    }
    let record = first.record.as_ref().map(SignedRelease::release);
    Ok(RollbackTarget {
        release: first.release,
        set: record.and_then(|record| record.set),
        layout: first.package.layout,
        packages: packages.into_iter().flatten().collect(),
    })
}

/// Number of ranks of a release; of one without a record, as many as there are nodes.
fn ranks_of(release: &ReleaseInfo, nodes: usize) -> usize {
    release.record.as_ref().map_or(nodes, |signed| signed.release().packages.len())
}
