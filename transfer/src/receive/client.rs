//! Client of a node for everything but a push: lists its packages, starts ranks, reads and replaces
//! chunks.

use std::{
    io,
    net::TcpStream,
    time::{Duration, Instant},
};

use serde_json::Value;
use shardpack_identity::{Channel, ConnectError, Endpoint, Service};

use super::take::TAKE;
use crate::protocol::{
    ChunkPlace, Failure, Feature, Greeting, Message, NoCommonVersion, Operation, PackageKey,
    PutOutcome, StartRank, Timeouts, Wire, WireError,
};

/// How long a node may send keep-alives before it must answer.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);

/// The same where it does something: starts a rank, checks a machine, makes a package current.
const LONG_TIMEOUT: Duration = Duration::from_mins(15);

/// Least progress that counts: a disk that reads less within the time is broken.
const STEP_BYTES: u64 = 1 << 20;

/// Chunks that are asked for ahead: two keep a network busy, two more hide the node's disk.
const FETCH_AHEAD: usize = 4;

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
    /// The node speaks other versions.
    #[error("{address}: {source}")]
    Version {
        /// The node.
        address: String,
        /// Which.
        source: NoCommonVersion,
    },
    /// The node's version cannot do this.
    #[error(
        "node {address} speaks transfer protocol {found}; {} needs {}: install this release there",
        feature.name(), feature.since()
    )]
    Outdated {
        /// The node.
        address: String,
        /// What was asked for.
        feature: Feature,
        /// The version of the conversation.
        found: u16,
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
    greeting: Greeting,
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
        let nobody = Greeting { program: String::new(), protocol: 0 };
        let mut client = Self { address: node.to_string(), greeting: nobody, wire };
        client.greeting = match client.ask(&Message::hello())? {
            Message::Hello { protocol, program } => Greeting::of_hello(protocol, &program)
                .map_err(|source| ClientError::Version { address: node.to_string(), source })?,
            other => return Err(client.unexpected(&other)),
        };
        if let Some(mandate) = node.tls().and_then(|tls| tls.credentials.mandate())
            && client.require(Feature::Handover).is_ok()
        {
            // A node that was away during the handover learns of it now. One that knows a later mandate
            // says so when it is asked for a change.
            let mandate = client.parse(mandate)?;
            client.operate("controller.present", &mandate)?;
        }
        Ok(client)
    }

    /// Refuses, by name, what the version of this conversation cannot do.
    pub fn require(&self, feature: Feature) -> Result<(), ClientError> {
        let found = self.greeting.protocol;
        if found >= feature.since() {
            return Ok(());
        }
        Err(ClientError::Outdated { address: self.address.clone(), feature, found })
    }

    /// The version of this conversation.
    #[must_use]
    pub fn protocol(&self) -> u16 {
        self.greeting.protocol
    }

    /// The node's program and its version.
    #[must_use]
    pub fn program(&self) -> &str {
        &self.greeting.program
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

    /// Has an operation carried out; returns what came of it, or gives up after a quarter of an
    /// hour without progress.
    pub fn operate(&mut self, name: &str, parameters: &Value) -> Result<Value, ClientError> {
        let operation = Operation { name: name.to_owned(), parameters: parameters.to_string() };
        match self.ask(&Message::Operate(operation))? {
            Message::Operated(json) => self.parse(&json),
            other => Err(self.unexpected(&other)),
        }
    }

    /// As [`Self::operate`]; `progress` hears how many bytes are done.
    pub(crate) fn operate_watched(
        &mut self,
        name: &str,
        parameters: &Value,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Value, ClientError> {
        let operation = Operation { name: name.to_owned(), parameters: parameters.to_string() };
        match self.ask_watched(&Message::Operate(operation), progress)? {
            Message::Operated(json) => self.parse(&json),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The socket, which ends the connection when it is shut down.
    pub(crate) fn socket(&self) -> &TcpStream {
        self.wire.stream().socket()
    }

    /// Makes a prepared package the current one; returns the one before.
    pub fn activate(&mut self, package: PackageKey) -> Result<Option<PackageKey>, ClientError> {
        match self.ask(&Message::Activate(package))? {
            Message::Activated { previous } => Ok(previous),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Reads a chunk of a stored package. The node has verified it; whoever uses it does so again.
    pub fn fetch(&mut self, place: ChunkPlace) -> Result<Vec<u8>, ClientError> {
        match self.ask(&Message::Fetch(place))? {
            Message::Fetched(bytes) => Ok(bytes),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Reads chunks of stored packages, one after the other, and asks for some ahead.
    pub(crate) fn fetch_each<E: From<ClientError>>(
        &mut self,
        places: &[ChunkPlace],
        mut take: impl FnMut(ChunkPlace, Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut asked = 0;
        for (number, place) in places.iter().enumerate() {
            while asked < places.len() && asked < number + FETCH_AHEAD {
                self.send(&Message::Fetch(places[asked]))?;
                asked += 1;
            }
            match self.hear(ANSWER_TIMEOUT, &mut |_| {})? {
                Message::Fetched(bytes) => take(*place, bytes)?,
                other => return Err(self.unexpected(&other).into()),
            }
        }
        Ok(())
    }

    /// Replaces a damaged chunk of a stored package. The node refuses bytes that are not its
    /// manifest's, and writes nothing where the stored ones are.
    pub fn put(&mut self, place: ChunkPlace, bytes: Vec<u8>) -> Result<PutOutcome, ClientError> {
        match self.ask(&Message::Put { place, bytes })? {
            Message::PutDone(outcome) => Ok(outcome),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&mut self, message: &Message) -> Result<Message, ClientError> {
        self.ask_watched(message, &mut |_| {})
    }

    fn ask_watched(
        &mut self,
        message: &Message,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Message, ClientError> {
        let at_most = match message {
            Message::Operate(operation) if is_quick(&operation.name) => ANSWER_TIMEOUT,
            Message::StartRank(_) | Message::Activate(_) | Message::Operate(_) => LONG_TIMEOUT,
            _ => ANSWER_TIMEOUT,
        };
        self.send(message)?;
        self.hear(at_most, progress)
    }

    fn send(&mut self, message: &Message) -> Result<(), ClientError> {
        let ended = |source| ClientError::Wire { address: self.address.clone(), source };
        self.wire.send(message).map_err(ended)
    }

    /// Waits for an answer that is no keep-alive.
    fn hear(
        &mut self,
        at_most: Duration,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Message, ClientError> {
        let address = self.address.clone();
        let mut begun = Instant::now();
        let mut next_bytes = STEP_BYTES;
        loop {
            let ended = |source| ClientError::Wire { address: address.clone(), source };
            let answer = self.wire.receive().map_err(ended)?;
            if let Message::Working { done_bytes, .. } = &answer {
                progress(*done_bytes);
            }
            match answer {
                // A check of a large store takes as long as its disk needs, and makes progress.
                Message::Working { done_bytes, .. } if done_bytes >= next_bytes => {
                    (begun, next_bytes) = (Instant::now(), done_bytes.saturating_add(STEP_BYTES));
                }
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

    /// An answer that cannot be used.
    pub(crate) fn wrong(&self, problem: String) -> ClientError {
        ClientError::Answer { address: self.address.clone(), problem }
    }
}

/// Whether an operation is a line in a file, or one that makes progress or has a deadline of its own.
fn is_quick(name: &str) -> bool {
    name.starts_with("activation.") || name.starts_with("controller.") || name == TAKE
}
