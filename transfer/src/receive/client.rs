//! Client of a node for everything but a push: lists its packages and starts ranks.

use std::{
    io,
    time::{Duration, Instant},
};

use serde_json::Value;
use shardpack_identity::{Channel, ConnectError, Endpoint, Service};

use crate::protocol::{
    Failure, Message, PROTOCOL, PackageKey, StartRank, Timeouts, Wire, WireError,
};

/// How long a node may send keep-alives before it must answer.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);

/// The same where it does something: starts a rank, checks a machine, makes a package current.
const LONG_TIMEOUT: Duration = Duration::from_mins(15);

type SetTimeout = fn(&Channel, Duration) -> io::Result<()>;

/// A node did not answer as asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection failed.
    #[error("{address}: the connection ended")]
    Wire {
        /// The node.
        address: String,
        /// How.
        source: WireError,
    },
    /// The node refused.
    #[error("{address}: {failure}")]
    Refused {
        /// The node.
        address: String,
        /// Its reason.
        failure: Failure,
    },
    /// An answer to another question, or one that is not JSON.
    #[error("{address}: {problem}")]
    Answer {
        /// The node.
        address: String,
        /// What is wrong.
        problem: String,
    },
}

/// A connection to a node.
pub struct NodeClient {
    /// What the node is called.
    address: String,
    program: String,
    wire: Wire<Channel, SetTimeout>,
}

impl NodeClient {
    /// Connects and greets.
    pub fn connect(node: impl Into<Endpoint>, timeouts: Timeouts) -> Result<Self, ClientError> {
        let node = node.into();
        let channel = node.connect(Service::Transfer, timeouts.connect)?;
        let set_timeout: SetTimeout = |channel, timeout| {
            channel.set_read_timeout(Some(timeout))?;
            channel.set_write_timeout(Some(timeout))
        };
        let wire = Wire::new(channel, set_timeout, timeouts);
        let mut client = Self { address: node.to_string(), program: String::new(), wire };
        match client.ask(&Message::hello())? {
            Message::Hello { protocol: PROTOCOL, program } => Ok(Self { program, ..client }),
            Message::Hello { protocol, program } => Err(client
                .wrong(format!("{program} speaks protocol {protocol}, this program {PROTOCOL}"))),
            other => Err(client.unexpected(&other)),
        }
    }

    /// The node's program and its version.
    #[must_use]
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Held and active packages: `{"packages": [{"layout", "rank"}], "active": {model:
    /// {"current": key, "previous": key or null}}}`.
    pub fn list(&mut self) -> Result<Value, ClientError> {
        match self.ask(&Message::List)? {
            Message::Listing(json) => self.parse(&json),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Starts the engine of a rank; returns what its starter answered, which has a deadline of its
    /// own, or gives up after a quarter of an hour.
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
        let at_most = match message {
            Message::StartRank(_) | Message::Activate(_) => LONG_TIMEOUT,
            _ => ANSWER_TIMEOUT,
        };
        let address = self.address.clone();
        let begun = Instant::now();
        let ended = |source| ClientError::Wire { address: address.clone(), source };
        self.wire.send(message).map_err(ended)?;
        loop {
            match self.wire.receive().map_err(ended)? {
                Message::Working { .. } if begun.elapsed() < at_most => {}
                Message::Working { .. } => {
                    let seconds = at_most.as_secs();
                    return Err(self.wrong(format!("it is still busy after {seconds} s")));
                }
                Message::Failed(failure) => {
                    return Err(ClientError::Refused { address: address.clone(), failure });
                }
                answer => return Ok(answer),
            }
        }
    }

    fn parse(&self, json: &str) -> Result<Value, ClientError> {
        serde_json::from_str(json).map_err(|error| self.wrong(format!("not JSON: {error}")))
    }

    fn unexpected(&self, message: &Message) -> ClientError {
        self.wrong(format!("message type {} does not answer the request", message.kind()))
    }

    fn wrong(&self, problem: String) -> ClientError {
        ClientError::Answer { address: self.address.clone(), problem }
    }
}
