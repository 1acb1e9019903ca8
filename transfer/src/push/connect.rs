//! A connection to a node.

use std::{io, time::Duration};

use shardpack_identity::{Channel, Endpoint, Service};

use super::NodeError;
use crate::protocol::{Timeouts, Wire};

type SetTimeout = fn(&Channel, Duration) -> io::Result<()>;

/// Frames on a connection, inside TLS but on this machine.
pub(super) type NodeWire = Wire<Channel, SetTimeout>;

/// Connects to a node.
pub(super) fn connect(node: &Endpoint, timeouts: Timeouts) -> Result<NodeWire, NodeError> {
    let channel = node.connect(Service::Transfer, timeouts.connect)?;
    let set_timeout: SetTimeout = |channel, timeout| {
        channel.set_read_timeout(Some(timeout))?;
        channel.set_write_timeout(Some(timeout))
    };
    Ok(Wire::new(channel, set_timeout, timeouts))
}
