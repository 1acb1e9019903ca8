//! `shardpack cluster upgrade`: brings a program to nodes, one after the other.

use std::{
    fs::File,
    io::Read as _,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use base64ct::{Base64, Encoding as _};
use serde_json::{Value, json};
use shardpack_identity::{Endpoint, Home, Member};
use shardpack_manifests::Digest;
use shardpack_transfer::protocol::{Feature, Timeouts};
use shardpack_transfer::receive::NodeClient;

use crate::{
    args::{ClusterArgs, UpgradeArgs},
    cluster,
    commands::{
        Outcome,
        program::{
            BEGIN, CONFIRM, INSTALL, PIECE, PIECE_BYTES, Platform, STATE, SignedOffer, digest_of,
        },
    },
    failure::Failure,
    own_program,
    progress::{result, say, table},
};

/// Between two looks at a node that restarts.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// What a node needs beyond the time for its confirmation: to end in order, to go back, and to start.
const MARGIN: Duration = Duration::from_mins(1);

/// The program that nodes are to run.
struct Program {
    file: PathBuf,
    digest: Digest,
    size_bytes: u64,
    platform: Platform,
}

/// What became of a node.
enum Done {
    /// It runs the program, as it did before.
    Current,
    /// It runs the program now.
    Upgraded { from: String },
    /// It would be asked to.
    Planned { from: String },
    /// Nodes before it failed.
    Untried,
}

/// Upgrades nodes; the first that fails ends it.
pub(super) fn run(args: &ClusterArgs, options: &UpgradeArgs) -> Outcome {
    let home = cluster::open(&args.cluster)?;
    let members = chosen(&home, &options.nodes)?;
    let file = options.binary.clone().map_or_else(own_program::path, Ok)?;
    let (digest, size_bytes) = digest_of(&file)?;
    let platform = Platform::of(&file).with_context(|| file.display().to_string())?;
    let program = Program { file, digest, size_bytes, platform };
    let mut done: Vec<Result<Done, String>> = Vec::new();
    for member in &members {
        if done.iter().any(Result::is_err) {
            done.push(Ok(Done::Untried));
            continue;
        }
        let upgraded = upgrade(&home, member, &program, options, args.json);
        done.push(upgraded.map_err(|error| format!("{error:#}")));
    }
    show(args, &members, &program, &done);
    let failed = members.iter().zip(&done).find(|(_, done)| done.is_err());
    if let Some((member, Err(problem))) = failed {
        say(&format!("error: {}: {problem}", member.name));
        if members.len() > 1 {
            say(
                "hint: nodes after it were left as they are; the same command goes on where this one ended",
            );
        }
    }
    Ok(if failed.is_none() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

fn chosen(home: &Home, names: &[String]) -> Result<Vec<Member>, Failure> {
    if names.is_empty() {
        return Ok(home.members().to_vec());
    }
    let member = |name: &String| {
        home.member(name).cloned().ok_or_else(|| {
            Failure::from(anyhow!("{name} is not in cluster {}", home.cluster()))
                .hint("only members take a program; see `shardpack cluster list`")
        })
    };
    names.iter().map(member).collect()
}

fn connect(node: &Endpoint) -> anyhow::Result<NodeClient> {
    let client = NodeClient::connect(node, Timeouts::default())?;
    client.require(Feature::Upgrade)?;
    Ok(client)
}

fn upgrade(
    home: &Home,
    member: &Member,
    program: &Program,
    options: &UpgradeArgs,
    quiet: bool,
) -> anyhow::Result<Done> {
    let node = home.endpoint(member);
    let mut client = connect(&node)?;
    let state = client.operate(STATE, &Value::Null)?;
    if state["digest"] == json!(program.digest) && state["trial"] == false {
        return Ok(Done::Current);
    }
    let text = |key: &str| state[key].as_str().unwrap_or("?").to_owned();
    ensure!(
        text("platform") == program.platform.to_string(),
        "{} is {}, this node needs {}; give a program for it with --binary",
        program.file.display(),
        program.platform,
        text("platform")
    );
    let from = format!("{} (build {})", text("version"), text("build"));
    if options.dry_run {
        return Ok(Done::Planned { from });
    }
    let timeout = Duration::from_secs(options.timeout) + MARGIN;
    if state["digest"] == json!(program.digest) {
        // On trial, since a command that has ended: what is left is to confirm it.
        follow(&node, program.digest, timeout)?;
        return Ok(Done::Upgraded { from });
    }
    if !quiet {
        say(&format!("{}: sending the program", member.name));
    }
    let offer = SignedOffer::sign(program.digest, program.size_bytes, home.credentials())?;
    client.operate(BEGIN, &serde_json::to_value(offer)?)?;
    send(&mut client, program)?;
    if !quiet {
        say(&format!("{}: installing it", member.name));
    }
    let install = json!({
        "digest": program.digest,
        "force": options.force,
        "wait_seconds": options.wait,
        "confirm_seconds": options.timeout,
    });
    client.operate(INSTALL, &install)?;
    drop(client);
    follow(&node, program.digest, timeout)?;
    Ok(Done::Upgraded { from })
}

fn send(client: &mut NodeClient, program: &Program) -> anyhow::Result<()> {
    let shown = || format!("could not read {}", program.file.display());
    let mut file = File::open(&program.file).with_context(shown)?;
    let (mut offset, mut piece) = (0_u64, Vec::with_capacity(PIECE_BYTES));
    while offset < program.size_bytes {
        piece.clear();
        file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece).with_context(shown)?;
        ensure!(!piece.is_empty(), "{} became shorter", program.file.display());
        let data = Base64::encode_string(&piece);
        client
            .operate(PIECE, &json!({ "digest": program.digest, "offset": offset, "data": data }))?;
        offset += piece.len() as u64;
    }
    Ok(())
}

/// Waits until the node runs the program, and confirms it while it is on trial.
fn follow(node: &Endpoint, digest: Digest, timeout: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + timeout;
    let mut last = anyhow!("it did not answer");
    while Instant::now() < deadline {
        match look(node, digest) {
            Ok(Look::Done) => return Ok(()),
            Ok(Look::Back(reason)) => bail!("it went back to the program before: {reason}"),
            Ok(Look::Waits) => {}
            // It restarts.
            Err(error) => last = error,
        }
        thread::sleep(LOOK_AGAIN);
    }
    Err(last.context(format!(
        "it does not run the new program after {} s; see `shardpack cluster events`",
        timeout.as_secs()
    )))
}

/// A restarting node at a glance.
enum Look {
    Waits,
    Back(String),
    Done,
}

fn look(node: &Endpoint, digest: Digest) -> anyhow::Result<Look> {
    let mut client = connect(node)?;
    let state = client.operate(STATE, &Value::Null)?;
    let failed = &state["failed"];
    if state["digest"] != json!(digest) {
        let reason = failed["reason"].as_str().filter(|_| failed["digest"] == json!(digest));
        return Ok(reason.map_or(Look::Waits, |reason| Look::Back(reason.to_owned())));
    }
    if state["trial"] == false {
        return Ok(Look::Done);
    }
    // It is well if it knows its store.
    client.list()?;
    client.operate(CONFIRM, &json!({ "digest": digest }))?;
    Ok(Look::Waits)
}

fn show(args: &ClusterArgs, members: &[Member], program: &Program, done: &[Result<Done, String>]) {
    let state = |done: &Result<Done, String>| match done {
        Ok(Done::Current) => ("current", None),
        Ok(Done::Upgraded { from }) => ("upgraded", Some(from.clone())),
        Ok(Done::Planned { from }) => ("would be upgraded", Some(from.clone())),
        Ok(Done::Untried) => ("not tried", None),
        Err(_) => ("failed", None),
    };
    let rows = members.iter().zip(done);
    if args.json {
        let node = |(member, done): (&Member, &Result<Done, String>)| {
            let (state, from) = state(done);
            json!({
                "node": member.name, "state": state, "from": from,
                "error": done.as_ref().err(),
            })
        };
        let nodes: Vec<Value> = rows.map(node).collect();
        let ok = done.iter().all(Result::is_ok);
        result(&json!({ "ok": ok, "digest": program.digest, "nodes": nodes }).to_string());
        return;
    }
    let mut shown = vec![["node", "program", "before"].map(str::to_owned).to_vec()];
    for (member, done) in rows {
        let (state, from) = state(done);
        shown.push(vec![member.name.clone(), state.to_owned(), from.unwrap_or_default()]);
    }
    result(table(&shown).trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_as_base64_fits_a_message() {
        let data = Base64::encode_string(&vec![0xff; PIECE_BYTES]);
        let message = json!({ "digest": Digest::of(b""), "offset": u64::MAX, "data": data });
        assert!(message.to_string().len() as u64 <= shardpack_transfer::protocol::MAX_JSON_BYTES);
    }
}
