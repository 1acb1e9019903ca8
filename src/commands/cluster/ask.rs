//! Asks all nodes at the same time: what people look at, within a deadline whatever has become of some,
//! and operations, to their end.

use std::{
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use shardpack_identity::{Endpoint, Member};
use shardpack_transfer::protocol::{FailureCode, Timeouts};
use shardpack_transfer::receive::{ClientError, NodeClient};

use crate::{
    args::ClusterArgs,
    cluster,
    commands::{
        events::time,
        node_facts::{FACTS, NodeFacts},
    },
    failure::Failure,
    progress::say,
};

/// How long nodes have for what people look at: the whole command takes less than a second.
/// `SHARDPACK_GLANCE_MS` is another time, for tests on busy machines.
pub(super) fn glance() -> Duration {
    static GLANCE: OnceLock<Duration> = OnceLock::new();
    *GLANCE.get_or_init(|| {
        let given = std::env::var("SHARDPACK_GLANCE_MS").ok().and_then(|it| it.parse().ok());
        Duration::from_millis(given.unwrap_or(800))
    })
}

/// A node that is asked.
#[derive(Clone)]
pub(super) struct Target {
    pub name: String,
    pub endpoint: Endpoint,
    /// What the cluster knows of it; nothing of a node of this machine.
    pub member: Option<Member>,
}

impl Target {
    /// As JSON names it.
    pub(super) fn json(&self) -> Value {
        match &self.member {
            Some(member) => json!(member),
            None => json!({ "name": self.name, "address": self.endpoint.address() }),
        }
    }
}

/// The nodes of these names and addresses, all members without any.
pub(super) fn targets(args: &ClusterArgs, names: &[String]) -> Result<Vec<Target>, Failure> {
    if names.is_empty() {
        let home = cluster::open(&args.cluster)?;
        let target = |member: &Member| Target {
            name: member.name.clone(),
            endpoint: home.endpoint(member),
            member: Some(member.clone()),
        };
        return Ok(home.members().iter().map(target).collect());
    }
    let known = cluster::known(names, &args.cluster)?;
    let target = |(name, (endpoint, member)): (&String, (Endpoint, Option<Member>))| Target {
        name: member.as_ref().map_or_else(|| name.clone(), |member| member.name.clone()),
        endpoint,
        member,
    };
    Ok(names.iter().zip(known).map(target).collect())
}

/// Asks each node `question`, which may tell a part of its answer before it has the rest. A node has
/// `deadline`; what it has told by then counts, and who told nothing did not answer.
pub(super) fn ask<T: Send + 'static>(
    targets: &[Target],
    deadline: Duration,
    question: impl Fn(&mut NodeClient, &dyn Fn(T)) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<Result<T, String>> {
    let end = Instant::now() + deadline;
    let question = Arc::new(question);
    let (answers, answered) = mpsc::channel::<(usize, Result<T, String>)>();
    for (index, target) in targets.iter().enumerate() {
        let (endpoint, question) = (target.endpoint.clone(), Arc::clone(&question));
        let sender = answers.clone();
        let asking = move || {
            // Whoever has waited long enough takes no more answers.
            let tell = |answer| drop(sender.send((index, answer)));
            let asked = NodeClient::connect(endpoint, timeouts(deadline))
                .map_err(anyhow::Error::from)
                .and_then(|mut client| question(&mut client, &|part| tell(Ok(part))));
            tell(asked.map_err(|error| format!("{error:#}")));
        };
        // Left behind at the deadline: the process ends soon after.
        let started = thread::Builder::new().name(format!("ask-{}", target.name)).spawn(asking);
        if let Err(error) = started {
            let reason = format!("no thread to ask it: {error}");
            let _ = answers.send((index, Err(reason)));
        }
    }
    drop(answers);
    let mut found: Vec<Option<Result<T, String>>> = targets.iter().map(|_| None).collect();
    let left = || end.saturating_duration_since(Instant::now());
    while let Ok((index, answer)) = answered.recv_timeout(left()) {
        let has_part = matches!(found[index], Some(Ok(_)));
        // A failure after a part leaves the part.
        if answer.is_ok() || !has_part {
            found[index] = Some(answer);
        }
    }
    let silent = || Err(format!("no answer within {} ms", deadline.as_millis()));
    found.into_iter().map(|answer| answer.unwrap_or_else(silent)).collect()
}

const fn timeouts(deadline: Duration) -> Timeouts {
    Timeouts { connect: deadline, idle: deadline, frame: deadline, progress: deadline }
}

/// What a node says at a glance.
#[derive(Clone)]
pub(super) struct State {
    /// Program and version.
    pub program: String,
    /// Of itself; nothing where the program is older than the question.
    pub facts: Option<NodeFacts>,
    /// How far its clock is ahead of this machine's, in milliseconds.
    pub clock_ahead_ms: Option<i64>,
    /// Its packages and releases, with a `problem` if they cannot be told.
    pub listing: Value,
}

impl State {
    /// What is wrong with the node's store.
    pub(super) fn problem(&self) -> Option<&str> {
        self.listing["problem"].as_str()
    }
}

/// Asks all nodes for their state.
pub(super) fn states(targets: &[Target]) -> Vec<Result<State, String>> {
    ask(targets, glance(), |client, tell| {
        let program = client.program().to_owned();
        let begun = time::now_ms();
        let facts: Option<NodeFacts> =
            operate(client, FACTS, &Value::Null)?.map(serde_json::from_value).transpose()?;
        // The node looked at its clock somewhere between question and answer.
        let here = u64::midpoint(begun, time::now_ms());
        let ahead = |facts: &NodeFacts| facts.clock_ms as i64 - here as i64;
        let clock_ahead_ms = facts.as_ref().map(ahead);
        let late =
            format!("its store did not list its packages within {} ms", glance().as_millis());
        let state = State { program, facts, clock_ahead_ms, listing: json!({ "problem": late }) };
        tell(state.clone());
        Ok(State { listing: client.list()?, ..state })
    })
}

/// Has an operation carried out; `None` if the node's program does not know it.
pub(super) fn operate(
    client: &mut NodeClient,
    name: &str,
    parameters: &Value,
) -> anyhow::Result<Option<Value>> {
    match client.operate(name, parameters) {
        Ok(answer) => Ok(Some(answer)),
        Err(ClientError::Refused { failure, .. }) if failure.code == FailureCode::NoOperation => {
            Ok(None)
        }
        Err(error) => Err(anyhow!(error)),
    }
}

/// What a node answered, or why it did not.
pub(super) struct Answer<T> {
    pub(super) node: Endpoint,
    pub(super) report: Result<T, String>,
}

/// Has all nodes carry out an operation at the same time, however long that takes.
pub(super) fn carry_out<T: DeserializeOwned + Send>(
    nodes: Vec<Endpoint>,
    operation: &str,
    options: impl Serialize,
) -> anyhow::Result<Vec<Answer<T>>> {
    let parameters = serde_json::to_value(options)?;
    let ask = &|node: &Endpoint| {
        let mut client = NodeClient::connect(node.clone(), Timeouts::default())?;
        let answer = client.operate(operation, &parameters)?;
        serde_json::from_value(answer).context("the node's answer cannot be read")
    };
    let reports: Vec<Result<T, String>> = thread::scope(|scope| {
        let ask = |node| ask(node).map_err(|error| format!("{error:#}"));
        let asking: Vec<_> = nodes.iter().map(|node| scope.spawn(move || ask(node))).collect();
        let reports = asking.into_iter().map(|thread| {
            // A panic here is ours, and goes on in the caller's thread.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        reports.collect()
    });
    let answers = nodes.into_iter().zip(reports);
    Ok(answers.map(|(node, report)| Answer { node, report }).collect())
}

/// Names the nodes that did not answer.
pub(super) fn tell_failures<T>(answers: &[Answer<T>]) {
    for Answer { node, report } in answers {
        if let Err(problem) = report {
            say(&format!("error: {node}: {problem}"));
        }
    }
}
