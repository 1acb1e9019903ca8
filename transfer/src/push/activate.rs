//! The second phase: all prepared nodes make their packages current.

use std::thread;

use shardpack_identity::Endpoint;

use super::{
    NodeError, NodeProgress, NodeReport, PushEvent, PushObserver, PushOptions,
    connect::{NodeWire, connect},
};
use crate::protocol::{Message, PROTOCOL, PackageKey, SendError};

/// Activates every prepared node. All are reached before the first is asked to, so that a node that
/// has vanished meanwhile leaves the others as they were; after that each is on its own.
pub(super) fn activate(nodes: &mut [NodeReport], options: &PushOptions, observer: PushObserver) {
    let mut prepared: Vec<&mut NodeReport> =
        nodes.iter_mut().filter(|node| node.progress == NodeProgress::Prepared).collect();
    let mut wires = Vec::with_capacity(prepared.len());
    let mut unreachable = None;
    for node in &mut prepared {
        match greet(&node.target.node, options) {
            Ok(wire) => wires.push(wire),
            Err(error) => {
                unreachable = Some(node.target.rank);
                node.error = Some(error);
            }
        }
    }
    if let Some(rank) = unreachable {
        for node in prepared {
            let error = node.error.get_or_insert(NodeError::OtherUnreachable { rank });
            observer(&PushEvent::Failed { rank: node.target.rank, error });
        }
        return;
    }
    thread::scope(|scope| {
        for (node, wire) in prepared.into_iter().zip(wires) {
            scope.spawn(move || {
                let rank = node.target.rank;
                observer(&PushEvent::Activating { rank });
                match tell(wire, node.package) {
                    Ok(()) => {
                        node.progress = NodeProgress::Activated;
                        observer(&PushEvent::Activated { rank });
                    }
                    Err(error) => {
                        let error = node.error.insert(error);
                        observer(&PushEvent::Failed { rank, error });
                    }
                }
            });
        }
    });
}

fn greet(node: &Endpoint, options: &PushOptions) -> Result<NodeWire, NodeError> {
    let mut wire = connect(node, options.timeouts)?;
    wire.send(&Message::hello())?;
    match wire.receive()? {
        Message::Hello { protocol: PROTOCOL, .. } => Ok(wire),
        Message::Hello { protocol, program } => {
            Err(SendError::Version { program, found: protocol }.into())
        }
        Message::Failed(failure) => Err(SendError::Refused(failure).into()),
        other => Err(NodeError::Unexpected { kind: other.kind() }),
    }
}

fn tell(mut wire: NodeWire, package: PackageKey) -> Result<(), NodeError> {
    wire.send(&Message::Activate(package))?;
    match wire.receive()? {
        Message::Activated { .. } => Ok(()),
        Message::Failed(failure) => Err(NodeError::NotActivated(failure)),
        other => Err(NodeError::Unexpected { kind: other.kind() }),
    }
}
