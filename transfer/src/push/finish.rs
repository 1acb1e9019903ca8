//! Finishes activations that were interrupted, at any contact with the nodes.

use std::collections::BTreeSet;

use shardpack_identity::Endpoint;

use super::{
    activate::{Member, finish_decided},
    session::{Session, at_once},
};
use crate::{protocol::Timeouts, receive::StoreState};

/// A release that became current on a node where it was pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedRelease {
    /// The node.
    pub node: String,
    /// The model.
    pub model: String,
    /// Number of the release.
    pub release: u64,
}

/// Makes releases current that are pending on one of the nodes and current on another. Nodes that
/// cannot be reached, or know no releases, are left as they are: whoever needs them will say so.
#[must_use]
pub fn finish_activations(nodes: &[Endpoint], timeouts: Timeouts) -> Vec<FinishedRelease> {
    let reached = at_once(nodes, |node| {
        let mut session = Session::open(node, timeouts).ok()?;
        let state = session.state().ok()?;
        Some((session, state))
    });
    let (mut sessions, states): (Vec<Session>, Vec<StoreState>) =
        reached.into_iter().flatten().unzip();
    let pending: BTreeSet<String> = states
        .iter()
        .flat_map(|state| &state.models)
        .filter(|(_, model)| model.pending.is_some())
        .map(|(name, _)| name.clone())
        .collect();
    let mut finished = Vec::new();
    for model in pending {
        let mut members: Vec<Member> = sessions
            .drain(..)
            .zip(&states)
            .map(|(session, state)| Member {
                rank: 0,
                session,
                state: state.models.get(&model).cloned(),
            })
            .collect();
        for done in finish_decided(&mut members, &model).unwrap_or_default() {
            finished.push(FinishedRelease {
                node: members[done.member].session.node.to_string(),
                model: model.clone(),
                release: done.release,
            });
        }
        sessions.extend(members.into_iter().map(|member| member.session));
    }
    finished
}
