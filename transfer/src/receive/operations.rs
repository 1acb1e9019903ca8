//! Operations on a store that a controller asks for by name: the two phases of an activation,
//! removal of what is not needed, a check, a search for chunks.
//!
//! | name | parameters | answer |
//! |---|---|---|
//! | `activation.state` | [`StateRequest`] | [`StoreState`] |
//! | `activation.prepare` | [`PrepareRequest`] | [`ReleaseState`] |
//! | `activation.commit` | [`FinishRequest`] | `{"previous": key or null}` |
//! | `activation.abort` | [`FinishRequest`] | `{"dropped": bool}` |
//! | `controller.state` | null | the mandate that the node knows, or null |
//! | `controller.present` | a signed mandate | `{"accepted": bool, "known": mandate}` |
//! | `gc` | [`GcOptions`] | [`super::GcReport`] |
//! | `fsck` | [`FsckOptions`] | [`super::FsckReport`] |
//! | `chunks.find` | [`FindRequest`] | [`super::FindAnswer`] |
//! | `package.document` | [`DocumentRequest`] | [`super::documents::DocumentPiece`] |
//! | `relay.take` | [`TakeRequest`] | [`super::take::TakeAnswer`] |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use shardpack_identity::{Mandate, MandateError, Presented, SignedMandate};
use shardpack_manifests::Digest;

use super::{
    active::{ActiveModel, ReleaseOrder, ReleaseState, StoredRelease},
    documents::{DOCUMENT, DocumentRequest},
    event::ReceiveEvent,
    find::FindRequest,
    fsck::FsckOptions,
    gc::{GcEntry, GcOptions, GcReason},
    node::Node,
    stage::Meter,
    store::{Store, StoreError},
    take::{self, TAKE, TakeRequest},
};
use crate::{
    error_chain::chain,
    protocol::{Failure, FailureCode, PackageKey},
    release::{ReleaseError, SignedRelease},
    ticket::TicketError,
};

/// Which releases to tell.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StateRequest {
    /// Of this model alone.
    #[serde(default)]
    pub model: Option<String>,
}

/// The releases of a store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StoreState {
    /// By model.
    pub models: BTreeMap<String, ModelState>,
}

/// The releases of a model on a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelState {
    /// The one that is served.
    pub current: Option<ReleaseInfo>,
    /// The ones before, the latest first.
    pub history: Vec<ReleaseInfo>,
    /// The one that waits for the other nodes.
    pub pending: Option<ReleaseInfo>,
}

/// A release on a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReleaseInfo {
    /// Its number.
    pub release: u64,
    /// The node's package of it.
    pub package: PackageKey,
    /// Digest of the package's manifest; none if the package is gone or has none.
    pub manifest: Option<Digest>,
    /// The record; none of a version without records.
    pub record: Option<SignedRelease>,
}

impl ReleaseInfo {
    /// Whether it is a release by this record.
    #[must_use]
    pub fn is(&self, signed: &SignedRelease) -> bool {
        self.record.as_ref().is_some_and(|record| record.digest() == signed.digest())
    }
}

impl ModelState {
    /// All releases.
    pub fn releases(&self) -> impl Iterator<Item = &ReleaseInfo> {
        self.current.iter().chain(&self.history).chain(&self.pending)
    }

    fn of(store: &Store, model: &ActiveModel) -> Self {
        let info = |stored: &StoredRelease| ReleaseInfo {
            release: stored.release,
            package: stored.package,
            manifest: store.package(stored.package).and_then(|it| it.manifest_digest()).ok(),
            record: stored.record.clone(),
        };
        Self {
            current: model.current.as_ref().map(info),
            history: model.history.iter().map(info).collect(),
            pending: model.pending.as_ref().map(info),
        }
    }
}

/// First phase: keep a release as pending.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrepareRequest {
    /// The node's rank in it.
    pub rank: u32,
    /// The record.
    pub release: SignedRelease,
    /// Whether it may be older than the current one.
    #[serde(default)]
    pub allow_rollback: bool,
}

/// Second phase, or its opposite.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FinishRequest {
    /// The model.
    pub model: String,
    /// Digest of the record.
    pub record: Digest,
}

/// Why an operation is not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum OperationError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Release(#[from] ReleaseError),
    #[error(transparent)]
    Ticket(#[from] TicketError),
    #[error(transparent)]
    Mandate(#[from] MandateError),
    #[error("the parameters of {name} cannot be read")]
    Parameters { name: String, source: serde_json::Error },
}

impl From<OperationError> for Failure {
    fn from(error: OperationError) -> Self {
        let code = match &error {
            OperationError::Store(error) => error.code(),
            OperationError::Release(_) | OperationError::Ticket(_) | OperationError::Mandate(_) => {
                FailureCode::Refused
            }
            OperationError::Parameters { .. } => FailureCode::Malformed,
        };
        Self { code, message: chain(&error) }
    }
}

/// Carries out an operation on the node's store; `None` of a name that is none of them.
pub(super) fn carry_out(
    node: &Node,
    name: &str,
    parameters: &Value,
    meter: &Meter,
) -> Option<Result<Value, Failure>> {
    let done = match name {
        "activation.state" => state(node, name, parameters),
        "activation.prepare" => prepare(node, name, parameters),
        "activation.commit" => commit(node, name, parameters),
        "activation.abort" => abort(node, name, parameters),
        "controller.state" => Ok(answer(known_mandate(node))),
        "controller.present" => present(node, name, parameters),
        "gc" => collect(node, name, parameters, meter),
        "fsck" => check(node, name, parameters, meter),
        "chunks.find" => find(node, name, parameters),
        DOCUMENT => parse::<DocumentRequest>(name, parameters)
            .and_then(|request| Ok(answer(node.store.document(request)?))),
        TAKE => parse::<TakeRequest>(name, parameters)
            .and_then(|request| take::take(node, &request, meter))
            .map(answer),
        _ => return None,
    };
    Some(done.map_err(Failure::from))
}

pub(super) fn parse<T: DeserializeOwned>(
    name: &str,
    parameters: &Value,
) -> Result<T, OperationError> {
    T::deserialize(parameters)
        .map_err(|source| OperationError::Parameters { name: name.to_owned(), source })
}

/// What is answered holds numbers, texts and digests, which JSON can hold.
fn answer(value: impl Serialize) -> Value {
    serde_json::to_value(value).expect("answers have text keys and finite numbers")
}

fn state(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let StateRequest { model: wanted } = parse(name, parameters)?;
    let active = node.store.active()?;
    let models = active
        .models
        .iter()
        .filter(|(name, _)| wanted.as_ref().is_none_or(|wanted| wanted == *name))
        .map(|(name, model)| (name.clone(), ModelState::of(&node.store, model)));
    Ok(answer(StoreState { models: models.collect() }))
}

fn prepare(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let PrepareRequest { rank, release: signed, allow_rollback } = parse(name, parameters)?;
    if let Some(guard) = &node.guard {
        // A node that has left its cluster since takes nothing.
        let credentials = guard.credentials().ok_or(ReleaseError::Unsigned)?;
        signed.verify(&credentials, now())?;
    }
    let order = if allow_rollback { ReleaseOrder::Any } else { ReleaseOrder::Newer };
    let release = signed.release().release;
    let package = signed.release().package(rank).map(|listed| listed.package);
    let tell = |event: fn(PackageKey, u64) -> ReceiveEvent| {
        if let Some(key) = package {
            (node.options.observer)(&event(key, release));
        }
    };
    tell(|package, release| ReceiveEvent::PreparingRelease { package, release });
    let state: ReleaseState = node.store.prepare_release(rank, signed, order)?;
    tell(|package, release| ReceiveEvent::ReleasePending { package, release });
    Ok(answer(state))
}

fn commit(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let FinishRequest { model, record } = parse(name, parameters)?;
    let active = node.store.active()?;
    let mut releases = active.models.get(&model).into_iter().flat_map(ActiveModel::releases);
    let named = |stored: &&StoredRelease| {
        stored.record.as_ref().is_some_and(|signed| signed.digest() == record)
    };
    let stored = releases.find(named).cloned();
    let tell = |event: ReceiveEvent| (node.options.observer)(&event);
    if let Some(StoredRelease { package, .. }) = stored {
        tell(ReceiveEvent::Activating { package });
    }
    let previous = node.store.commit_release(&model, record)?;
    if let Some(StoredRelease { package, release, record }) = stored {
        let restores = record.and_then(|signed| signed.release().restores);
        tell(ReceiveEvent::Activated { package, previous, release: Some(release), restores });
    }
    Ok(json!({ "previous": previous }))
}

fn abort(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let FinishRequest { model, record } = parse(name, parameters)?;
    Ok(json!({ "dropped": node.store.abort_release(&model, record)? }))
}

fn known_mandate(node: &Node) -> Option<Mandate> {
    node.guard.as_ref()?.mandate().map(|signed| signed.mandate().clone())
}

fn present(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let signed: SignedMandate = parse(name, parameters)?;
    let Mandate { epoch, name, .. } = signed.mandate().clone();
    let guard = node.guard.as_ref().ok_or(MandateError::NoCluster)?;
    let presented = guard.present(signed)?;
    if presented == Presented::New {
        (node.options.observer)(&ReceiveEvent::ControllerChanged { epoch, name });
    }
    let accepted = !matches!(presented, Presented::Refused(_));
    Ok(json!({ "accepted": accepted, "known": known_mandate(node) }))
}

fn collect(
    node: &Node,
    name: &str,
    parameters: &Value,
    meter: &Meter,
) -> Result<Value, OperationError> {
    let options: GcOptions = parse(name, parameters)?;
    let report = node.store.collect(options, meter)?;
    let is_package = |entry: &&GcEntry| {
        matches!(entry.reason, GcReason::OldRelease | GcReason::NeverActivated) && !options.dry_run
    };
    for GcEntry { package, size_bytes, .. } in report.removed.iter().filter(is_package) {
        let (package, size_bytes) = (*package, *size_bytes);
        (node.options.observer)(&ReceiveEvent::Removed { package, size_bytes });
    }
    Ok(answer(report))
}

fn check(
    node: &Node,
    name: &str,
    parameters: &Value,
    meter: &Meter,
) -> Result<Value, OperationError> {
    let options: FsckOptions = parse(name, parameters)?;
    let credentials = node.guard.as_ref().and_then(|guard| guard.credentials());
    Ok(answer(node.store.check(options, credentials.as_ref(), meter)?))
}

fn find(node: &Node, name: &str, parameters: &Value) -> Result<Value, OperationError> {
    let request: FindRequest = parse(name, parameters)?;
    Ok(answer(node.store.find_chunks(&request)?))
}

/// Seconds since 1970.
fn now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}
