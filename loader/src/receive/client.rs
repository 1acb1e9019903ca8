//! Asks a node for anything but a push: what it holds, and to start a rank.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;
use shardpack_manifests::transfer::{
    Failure, Message, PROTOCOL, PackageKey, StartRank, Timeouts, Wire, WireError,
};

type SetTimeout = fn(&TcpStream, Duration) -> io::Result<()>;

/// A node did not answer as asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error("could not connect to {address}")]
    Connect {
        /// The node.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The connection failed.
    #[error("{address}: the connection ended")]
    Wire {
        /// The node.
        address: SocketAddr,
        /// How.
        source: WireError,
    },
    /// The node refused.
    #[error("{address}: {failure}")]
    Refused {
        /// The node.
        address: SocketAddr,
        /// Its reason.
        failure: Failure,
    },
    /// An answer to another question, or one that is not JSON.
    #[error("{address}: {problem}")]
    Answer {
        /// The node.
        address: SocketAddr,
        /// What is wrong.
        problem: String,
    },
}

/// A connection to a node.
pub struct NodeClient {
    address: SocketAddr,
    wire: Wire<TcpStream, SetTimeout>,
}

impl NodeClient {
    /// Connects and greets.
    pub fn connect(address: SocketAddr, timeouts: Timeouts) -> Result<Self, ClientError> {
        let refused = |source| ClientError::Connect { address, source };
        let stream = TcpStream::connect_timeout(&address, timeouts.connect).map_err(refused)?;
        stream.set_nodelay(true).map_err(refused)?;
        let set_timeout: SetTimeout = |stream, timeout| {
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))
        };
        let mut client = Self { address, wire: Wire::new(stream, set_timeout, timeouts) };
        match client.ask(&Message::hello())? {
            Message::Hello { protocol: PROTOCOL, .. } => Ok(client),
            Message::Hello { protocol, program } => Err(client
                .wrong(format!("{program} speaks protocol {protocol}, this program {PROTOCOL}"))),
            other => Err(client.unexpected(&other)),
        }
    }

    /// Held and active packages: `{"packages": [{"layout", "rank"}], "active": {model:
    /// {"current": key, "previous": key or null}}}`.
    pub fn list(&mut self) -> Result<Value, ClientError> {
        match self.ask(&Message::List)? {
            Message::Listing(json) => self.parse(&json),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Starts the engine of a rank; returns what its starter answered. There is no deadline for
    /// the start as a whole: the node says that it is at it, and the starter has its own.
    pub fn start_rank(
        &mut self,
        package: PackageKey,
        parameters: &Value,
    ) -> Result<Value, ClientError> {
        let request = StartRank { package, parameters: parameters.to_string() };
        match self.ask(&Message::StartRank(request))? {
            Message::RankStarted(json) => self.parse(&json),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Makes a prepared package the current one; returns the one before.
    pub fn activate(&mut self, package: PackageKey) -> Result<Option<PackageKey>, ClientError> {
        match self.ask(&Message::Activate(package))? {
            Message::Activated { previous } => Ok(previous),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&mut self, message: &Message) -> Result<Message, ClientError> {
        let address = self.address;
        let ended = |source| ClientError::Wire { address, source };
        self.wire.send(message).map_err(ended)?;
        loop {
            match self.wire.receive().map_err(ended)? {
                Message::Working { .. } => {}
                Message::Failed(failure) => return Err(ClientError::Refused { address, failure }),
                answer => return Ok(answer),
            }
        }
    }

    fn parse(&self, json: &str) -> Result<Value, ClientError> {
        serde_json::from_str(json).map_err(|error| self.wrong(format!("not JSON: {error}")))
    }

    fn unexpected(&self, message: &Message) -> ClientError {
        self.wrong(format!("message type {} answers another question", message.kind()))
    }

    fn wrong(&self, problem: String) -> ClientError {
        ClientError::Answer { address: self.address, problem }
    }
}
