//! Activation in two phases: every node keeps the signed record of the release as pending, then
//! every node makes it current. If one does not take it, all drop it, and the release before stays
//! current everywhere. A node that is lost in the second phase holds the record, and makes it current
//! as soon as a controller sees that another node has done so.

use shardpack_identity::{Credentials, Endpoint};
use shardpack_manifests::Digest;

use super::{
    NodeError, NodeProgress, NodeReport, OpenSet, PushEvent, PushObserver, ReleaseOptions,
    open::Package,
    session::{Session, at_once, signer},
};
use crate::{
    protocol::Timeouts,
    receive::{ModelState, ReleaseInfo, ReleaseOrder, ReleaseState, model_name},
    release::{Release, SignedRelease},
};

/// What came of each node.
type Results = Vec<Result<(), NodeError>>;

/// A node of a release, connected, with its releases of the model.
pub(super) struct Member {
    pub(super) rank: u32,
    pub(super) session: Session,
    pub(super) state: Option<ModelState>,
}

/// Activates every prepared node.
pub(super) fn activate(
    set: &OpenSet,
    package: &Package,
    nodes: &mut [NodeReport],
    (options, timeouts): (&ReleaseOptions, Timeouts),
    observer: PushObserver,
) {
    let mut prepared: Vec<&mut NodeReport> =
        nodes.iter_mut().filter(|node| node.progress == NodeProgress::Prepared).collect();
    let targets: Vec<(u32, Endpoint)> =
        prepared.iter().map(|node| (node.target.rank, node.target.node.clone())).collect();
    let model = model_name(&package.manifest);
    let run = || -> Result<Results, Results> {
        let mut members = reach(&targets, &model, timeouts)?;
        finish_decided(&mut members, &model)
            .map_err(|(index, error)| spread(&targets, index, error))?;
        let signer = signer(targets.iter().map(|(_, node)| node));
        let signed = record(set, &model, &members, options, signer.as_ref())
            .map_err(|error| spread(&targets, 0, error))?;
        Ok(two_phases(&mut members, &signed, options.order, observer))
    };
    let results = run().unwrap_or_else(|results| results);
    for (node, result) in prepared.iter_mut().zip(results) {
        match result {
            Ok(()) => node.progress = NodeProgress::Activated,
            Err(error) => {
                let (rank, error) = (node.target.rank, node.error.insert(error));
                observer(&PushEvent::Failed { rank, error });
            }
        }
    }
}

/// Connects to all nodes and asks what they have of the model. If one cannot be reached, the others
/// were asked nothing that changes them.
fn reach(
    targets: &[(u32, Endpoint)],
    model: &str,
    timeouts: Timeouts,
) -> Result<Vec<Member>, Results> {
    let mut reached = at_once(targets, |(rank, node)| {
        let mut session = Session::open(node, timeouts)?;
        let state = session.state_of(model)?;
        Ok(Member { rank: *rank, session, state })
    });
    let Some(failed) = reached.iter().position(Result::is_err) else {
        return Ok(reached.into_iter().flatten().collect());
    };
    let rank = targets[failed].0;
    let other = |_| Err(NodeError::OtherUnreachable { rank });
    Err(reached.drain(..).map(|it| it.and_then(other)).collect())
}

/// The error of one node, and for the others that they were not activated because of it.
fn spread(targets: &[(u32, Endpoint)], index: usize, error: NodeError) -> Results {
    let rank = targets[index].0;
    let mut error = Some(error);
    let each = (0..targets.len()).map(|it| match error.take_if(|_| it == index) {
        Some(error) => Err(error),
        None => Err(NodeError::OtherFailed { rank }),
    });
    each.collect()
}

/// A release that was left half activated and is now current.
pub(super) struct Finished {
    pub(super) member: usize,
    pub(super) release: u64,
}

/// Makes pending releases current that are so on another node: there the decision was made.
pub(super) fn finish_decided(
    members: &mut [Member],
    model: &str,
) -> Result<Vec<Finished>, (usize, NodeError)> {
    let current = |member: &Member| {
        let current = member.state.as_ref()?.current.as_ref()?;
        current.record.as_ref().map(SignedRelease::digest)
    };
    let decided: Vec<Digest> = members.iter().filter_map(current).collect();
    let mut finished = Vec::new();
    for (index, member) in members.iter_mut().enumerate() {
        let pending = member.state.as_ref().and_then(|state| state.pending.as_ref());
        let record = pending.and_then(|pending| pending.record.as_ref());
        let Some(record) = record.filter(|record| decided.contains(&record.digest())) else {
            continue;
        };
        let (digest, release) = (record.digest(), record.release().release);
        let failed = |error| (index, error);
        member.session.commit(model, digest).map_err(failed)?;
        member.state = member.session.state_of(model).map_err(failed)?;
        finished.push(Finished { member: index, release });
    }
    Ok(finished)
}

/// The number above those of all releases that some node knows.
pub(super) fn next_number(members: &[Member]) -> u64 {
    let releases = members.iter().filter_map(|member| member.state.as_ref());
    let numbers = releases.flat_map(ModelState::releases).map(|release| release.release);
    numbers.max().map_or(1, |highest| highest + 1)
}

/// The record of the release of this set: the one that an earlier push of it left on some node, if
/// no node knows of a later release; else a new one.
fn record(
    set: &OpenSet,
    model: &str,
    members: &[Member],
    options: &ReleaseOptions,
    signer: Option<&Credentials>,
) -> Result<SignedRelease, NodeError> {
    let next = next_number(members);
    let new = set.release(model.to_owned(), options.number.unwrap_or(next));
    let is_same = |info: &&ReleaseInfo| {
        let Some(signed) = &info.record else { return false };
        let Release { set, packages, release, .. } = signed.release();
        let is_latest = options.number.map_or(release + 1 == next, |number| *release == number);
        let is_accepted = match signer {
            Some(signer) => signed.verify(signer, new.time).is_ok(),
            None => !signed.is_signed(),
        };
        (set, packages) == (&new.set, &new.packages) && is_latest && is_accepted
    };
    let states = members.iter().filter_map(|member| member.state.as_ref());
    let mut known = states.flat_map(|state| state.current.iter().chain(&state.pending));
    match known.find(is_same).and_then(|info| info.record.clone()) {
        Some(signed) => Ok(signed),
        None => Ok(SignedRelease::sign(new, signer)?),
    }
}

/// Both phases.
pub(super) fn two_phases(
    members: &mut [Member],
    signed: &SignedRelease,
    order: ReleaseOrder,
    observer: PushObserver,
) -> Results {
    let Release { model, release, .. } = signed.release();
    let (record, release) = (signed.digest(), *release);
    let prepared = at_once(members.iter_mut(), |member| {
        let rank = member.rank;
        observer(&PushEvent::PreparingRelease { rank, release });
        let state = member.session.prepare(rank, signed, order)?;
        observer(&PushEvent::ReleasePending { rank, release });
        Ok(state)
    });
    // A node on which the release is current already shows that an earlier controller had all of
    // them: what is left is to finish it.
    let is_decided = prepared.iter().any(|it| matches!(it, Ok(ReleaseState::Current)));
    if let Some(failed) = prepared.iter().position(Result::is_err).filter(|_| !is_decided) {
        let rank = members[failed].rank;
        let dropped = at_once(members, |member| member.session.abort(model, record));
        let both = prepared.into_iter().zip(dropped);
        return both
            .map(|(prepared, dropped)| match (prepared, dropped) {
                (Err(error), _) => Err(error),
                (Ok(_), Ok(())) => Err(NodeError::OtherFailed { rank }),
                (Ok(_), Err(source)) => {
                    Err(NodeError::NotDropped { rank, release, source: Box::new(source) })
                }
            })
            .collect();
    }
    let pending = members.iter_mut().zip(prepared);
    at_once(pending, |(member, prepared)| {
        let rank = member.rank;
        // Where it was decided before, and this node did not take it.
        prepared?;
        observer(&PushEvent::Activating { rank });
        // Whether it became current there is unknown; that it can is known.
        let unfinished = |source| NodeError::Unfinished { release, source: Box::new(source) };
        member.session.commit(model, record).map_err(unfinished)?;
        observer(&PushEvent::Activated { rank });
        Ok(())
    })
}
