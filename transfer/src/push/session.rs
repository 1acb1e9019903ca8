//! Connections to the nodes of a release, and what is asked of them.

use std::thread;

use serde_json::Value;
use shardpack_identity::{Credentials, Endpoint};
use shardpack_manifests::Digest;

use super::NodeError;
use crate::{
    protocol::{FailureCode, Timeouts},
    receive::{
        ClientError, FinishRequest, ModelState, NodeClient, PrepareRequest, ReleaseOrder,
        ReleaseState, StateRequest, StoreState,
    },
    release::SignedRelease,
};

/// A node that takes part in a release.
pub(super) struct Session {
    pub(super) node: Endpoint,
    timeouts: Timeouts,
    client: NodeClient,
}

impl From<ClientError> for NodeError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Connect(error) => Self::Connect(error),
            ClientError::Refused { failure, .. } => Self::NotActivated(failure),
            other => Self::Client(other),
        }
    }
}

impl Session {
    pub(super) fn open(node: &Endpoint, timeouts: Timeouts) -> Result<Self, NodeError> {
        let client = NodeClient::connect(node.clone(), timeouts)?;
        Ok(Self { node: node.clone(), timeouts, client })
    }

    /// The node's releases of all models.
    pub(super) fn state(&mut self) -> Result<StoreState, NodeError> {
        self.ask_state(StateRequest::default())
    }

    /// The node's releases of a model, if it has any.
    pub(super) fn state_of(&mut self, model: &str) -> Result<Option<ModelState>, NodeError> {
        let mut state = self.ask_state(StateRequest { model: Some(model.to_owned()) })?;
        Ok(state.models.remove(model))
    }

    fn ask_state(&mut self, request: StateRequest) -> Result<StoreState, NodeError> {
        let answer = match self.client.operate("activation.state", &json(request)) {
            // A program that does not know the message, or not the operation.
            Err(ClientError::Refused { failure, .. })
                if matches!(failure.code, FailureCode::Malformed | FailureCode::NoOperation) =>
            {
                return Err(NodeError::Outdated { program: self.client.program().to_owned() });
            }
            answer => answer?,
        };
        serde_json::from_value(answer).map_err(|error| NodeError::Answer(error.to_string()))
    }

    /// First phase.
    pub(super) fn prepare(
        &mut self,
        rank: u32,
        release: &SignedRelease,
        order: ReleaseOrder,
    ) -> Result<ReleaseState, NodeError> {
        let allow_rollback = order == ReleaseOrder::Any;
        let request = PrepareRequest { rank, release: release.clone(), allow_rollback };
        let answer = self.client.operate("activation.prepare", &json(request))?;
        serde_json::from_value(answer).map_err(|error| NodeError::Answer(error.to_string()))
    }

    /// Second phase.
    pub(super) fn commit(&mut self, model: &str, record: Digest) -> Result<(), NodeError> {
        let request = FinishRequest { model: model.to_owned(), record };
        self.client.operate("activation.commit", &json(request))?;
        Ok(())
    }

    /// Instead of the second phase, on a connection of its own where this one is broken.
    pub(super) fn abort(&mut self, model: &str, record: Digest) -> Result<(), NodeError> {
        let request = json(FinishRequest { model: model.to_owned(), record });
        match self.client.operate("activation.abort", &request) {
            Ok(_) => Ok(()),
            Err(error @ ClientError::Refused { .. }) => Err(error.into()),
            Err(_) => {
                self.client = NodeClient::connect(self.node.clone(), self.timeouts)?;
                self.client.operate("activation.abort", &request)?;
                Ok(())
            }
        }
    }
}

/// Requests hold numbers, texts and digests, which JSON can hold.
fn json(request: impl serde::Serialize) -> Value {
    serde_json::to_value(request).expect("requests have text keys and finite numbers")
}

/// The controller's credentials, if the nodes are members of a cluster.
pub(super) fn signer<'a>(nodes: impl IntoIterator<Item = &'a Endpoint>) -> Option<Credentials> {
    let peer = nodes.into_iter().find_map(Endpoint::tls)?;
    Some(peer.credentials.clone())
}

/// Does something with all at the same time.
pub(super) fn at_once<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    action: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let action = &action;
        let running: Vec<_> =
            items.into_iter().map(|item| scope.spawn(move || action(item))).collect();
        // A panic here is ours, and goes on in the caller's thread.
        let join = |thread: thread::ScopedJoinHandle<'_, R>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    })
}
