//! `shardpack cluster`.

mod token;

use std::{process::ExitCode, thread, time::Duration};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_identity::{Home, HomeError, JoinToken, Member, date};
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::receive::NodeClient;

use super::Outcome;
use crate::{
    args::{ClusterAction, ClusterArgs},
    cluster,
    discovery::{self, Found},
    failure::Failure,
    progress::{result, say, table},
};

/// Runs the command.
pub(crate) fn run(args: &ClusterArgs) -> Outcome {
    match &args.action {
        ClusterAction::Init => init(args),
        ClusterAction::Add { address, token, token_file, name } => {
            let mut home = cluster::open(&args.cluster)?;
            let token = token::read(token.as_deref(), token_file.as_deref())?;
            let member = match address {
                Some(address) => home.add(address, &token, name.as_deref()).map_err(explained)?,
                None => add_found(&mut home, &token, name.as_deref())?,
            };
            if args.json {
                result(&json!({ "ok": true, "member": member }).to_string());
            } else {
                result(&format!("{} ({}) is in the cluster", member.name, member.address));
            }
            Ok(ExitCode::SUCCESS)
        }
        ClusterAction::Discover { seconds } => discover(args, *seconds),
        ClusterAction::List => list(args),
        ClusterAction::Status => status(args),
        ClusterAction::Renew { nodes } => renew(args, nodes),
        ClusterAction::Move { node, address } => {
            let mut home = cluster::open(&args.cluster)?;
            let member = home.relocate(node, address).map_err(explained)?;
            if args.json {
                result(&json!({ "ok": true, "member": member }).to_string());
            } else {
                result(&format!("{} is at {}", member.name, member.address));
            }
            Ok(ExitCode::SUCCESS)
        }
        ClusterAction::Remove { node, force } => remove(args, node, *force),
    }
}

fn init(args: &ClusterArgs) -> Outcome {
    let folder = cluster::folder(&args.cluster)?;
    let home = Home::init(&folder).map_err(|error| match error {
        HomeError::Exists { .. } => Failure::from(error)
            .hint("use it as it is, or create another one in another folder with --cluster"),
        error => error.into(),
    })?;
    if args.json {
        let json = json!({ "ok": true, "cluster": home.cluster(), "folder": folder });
        result(&json.to_string());
        return Ok(ExitCode::SUCCESS);
    }
    result(&format!("cluster {}, its keys in {}", home.cluster(), folder.display()));
    say("On each machine that is to hold a part of the model, run:");
    say("  shardpack node --listen ADDRESS:7420 --store FOLDER");
    say(
        "and on this machine the `shardpack cluster add` command that it prints; it asks for the token.",
    );
    Ok(ExitCode::SUCCESS)
}

/// Timeout for finding a node whose key is known; it answers within a second.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Most addresses that are tried for one node: announcements are not authenticated.
const MAX_TRIES: usize = 8;

/// Adds the node that issued the token, at an address found on the local network.
fn add_found(home: &mut Home, token: &JoinToken, name: Option<&str>) -> Result<Member, Failure> {
    let found = discovery::find(SEARCH_TIMEOUT, |node| node.key == token.key())?;
    let mut last = None;
    for node in found.iter().filter(|node| node.key == token.key()).take(MAX_TRIES) {
        match home.add(&node.address.to_string(), token, name) {
            Ok(member) => return Ok(member),
            // Another address could be the right one.
            Err(HomeError::Connect(error)) => last = Some(HomeError::Connect(error)),
            Err(error) => return Err(explained(error)),
        }
    }
    Err(last.map_or_else(
        || {
            let seconds = SEARCH_TIMEOUT.as_secs();
            Failure::from(anyhow!("no node with this token's key was found within {seconds} s"))
                .hint(
                    "start it with --announce, or give its address: shardpack cluster add HOST:PORT",
                )
        },
        explained,
    ))
}

fn discover(args: &ClusterArgs, seconds: u64) -> Outcome {
    let found = discovery::find(Duration::from_secs(seconds), |_| false)?;
    if args.json {
        result(&discovered(&found).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    if found.is_empty() {
        result("no node that waits for a cluster was found");
        say("hint: only nodes started with --announce can be found");
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["address", "key"].map(str::to_owned).to_vec()];
    rows.extend(found.iter().map(|node| vec![node.address.to_string(), node.key.to_string()]));
    result(table(&rows).trim_end());
    say("hint: shardpack cluster add ADDRESS; it asks for the token that the node printed");
    Ok(ExitCode::SUCCESS)
}

/// What `discover --json` prints.
fn discovered<'a>(found: impl IntoIterator<Item = &'a Found>) -> Value {
    let node = |node: &Found| json!({ "address": node.address, "key": node.key });
    json!({ "ok": true, "nodes": found.into_iter().map(node).collect::<Vec<_>>() })
}

/// Adds a hint to errors that do not say what to do.
fn explained(error: HomeError) -> Failure {
    match error {
        HomeError::Taken { .. } => Failure::from(error)
            .hint("choose another --name, or remove the old node: shardpack cluster remove NAME"),
        HomeError::Unknown { .. } => Failure::from(error).hint("see `shardpack cluster list`"),
        error => error.into(),
    }
}

fn list(args: &ClusterArgs) -> Outcome {
    let home = cluster::open(&args.cluster)?;
    if args.json {
        let json = json!({ "ok": true, "cluster": home.cluster(), "members": home.members() });
        result(&json.to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["node", "address", "member until", "key"].map(str::to_owned).to_vec()];
    for Member { name, address, key, expires } in home.members() {
        rows.push(vec![name.clone(), address.clone(), date(*expires), key.to_string()]);
    }
    show_members(&home, &rows);
    Ok(ExitCode::SUCCESS)
}

/// Prints a table with a header, or a line that says that there are no members.
fn show_members(home: &Home, rows: &[Vec<String>]) {
    if home.members().is_empty() {
        result(&format!("cluster {} has no members yet", home.cluster()));
        say("hint: see `shardpack cluster --help` for how to add a node");
    } else {
        result(table(rows).trim_end());
    }
}

/// The state of a member.
struct State {
    program: String,
    listing: Value,
}

fn status(args: &ClusterArgs) -> Outcome {
    let home = cluster::open(&args.cluster)?;
    let ask = |member: &Member| -> Result<State, String> {
        let asked = || {
            let mut client = NodeClient::connect(home.endpoint(member), Timeouts::default())?;
            let (program, listing) = (client.program().to_owned(), client.list()?);
            anyhow::Ok(State { program, listing })
        };
        asked().map_err(|error| format!("{error:#}"))
    };
    // In parallel, so that timeouts do not add up.
    let states: Vec<Result<State, String>> = thread::scope(|scope| {
        let asking: Vec<_> =
            home.members().iter().map(|member| scope.spawn(|| ask(member))).collect();
        let gone = |_| Err("asking it failed".to_owned());
        asking.into_iter().map(|thread| thread.join().unwrap_or_else(gone)).collect()
    });
    let well = states.iter().all(Result::is_ok);
    if args.json {
        let members = home.members().iter().zip(&states).map(|(member, state)| {
            let mut json = json!(member);
            json["reachable"] = state.is_ok().into();
            match state {
                Ok(State { program, listing }) => {
                    json["program"] = program.as_str().into();
                    json["packages"] = listing["packages"].clone();
                    json["active"] = listing["active"].clone();
                }
                Err(problem) => json["problem"] = problem.as_str().into(),
            }
            json
        });
        let members: Vec<Value> = members.collect();
        result(&json!({ "ok": well, "cluster": home.cluster(), "members": members }).to_string());
    } else {
        show_status(&home, &states);
    }
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn show_status(home: &Home, states: &[Result<State, String>]) {
    let header = ["node", "address", "program", "package", "member until"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for (member, state) in home.members().iter().zip(states) {
        let (program, active) = match state {
            Ok(State { program, listing }) => (program.clone(), active(listing)),
            Err(_) => ("not reached".to_owned(), String::new()),
        };
        let Member { name, address, expires, .. } = member;
        rows.push(vec![name.clone(), address.clone(), program, active, date(*expires)]);
    }
    show_members(home, &rows);
    if rows.iter().flatten().any(|cell| cell.starts_with(NO_NAME)) {
        say(&format!("{NO_NAME}: set a name with convert --name"));
    }
    for (member, state) in home.members().iter().zip(states) {
        if let Err(problem) = state {
            say(&format!("{}: {problem}", member.name));
        }
    }
}

/// Name that nodes report for a model without a name.
const UNNAMED: &str = "default";

/// How a model without a name is shown.
const NO_NAME: &str = "(no name)";

/// The active packages as one line.
fn active(listing: &Value) -> String {
    let models = listing["active"].as_object().into_iter().flatten();
    let word = |(model, entry): (&String, &Value)| {
        let layout: String =
            entry["current"]["layout"].as_str().unwrap_or("?").chars().take(12).collect();
        let model = if model == UNNAMED { NO_NAME } else { model };
        format!("{model}: rank {} of layout {layout}", entry["current"]["rank"])
    };
    let words = models.map(word).collect::<Vec<_>>();
    if words.is_empty() { "none yet".to_owned() } else { words.join("; ") }
}

fn renew(args: &ClusterArgs, nodes: &[String]) -> Outcome {
    let mut home = cluster::open(&args.cluster)?;
    let names: Vec<String> = if nodes.is_empty() {
        home.members().iter().map(|member| member.name.clone()).collect()
    } else {
        nodes.to_vec()
    };
    if names.is_empty() && !args.json {
        say("there are no members to renew");
    }
    let mut failed = Vec::new();
    let mut renewed = Vec::new();
    for name in names {
        match home.renew(&name) {
            Ok(member) => {
                if !args.json {
                    say(&format!("{}: member until {}", member.name, date(member.expires)));
                }
                renewed.push(member);
            }
            Err(error) => {
                let text = format!("{:#}", anyhow::Error::from(error));
                say(&format!("error: {name}: {text}"));
                failed.push(json!({ "node": name, "error": text }));
            }
        }
    }
    if args.json {
        let ok = failed.is_empty();
        result(&json!({ "ok": ok, "renewed": renewed, "failed": failed }).to_string());
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

fn remove(args: &ClusterArgs, node: &str, force: bool) -> Outcome {
    let mut home = cluster::open(&args.cluster)?;
    let told = match home.dismiss(node) {
        Ok(()) => true,
        Err(error @ HomeError::Unknown { .. }) => return Err(explained(error)),
        Err(error) if !force => {
            return Err(Failure::from(error).hint(
                "--force removes it without contacting it; it keeps its certificate, but no controller connects to it and no rank accepts its key",
            ));
        }
        Err(error) => {
            say(&format!("{node} was not contacted: {:#}", anyhow::Error::from(error)));
            false
        }
    };
    home.forget(node)?;
    if args.json {
        result(&json!({ "ok": true, "removed": node, "told": told }).to_string());
    } else {
        result(&format!("{node} was removed from the cluster"));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discovered_nodes_are_told_as_json_by_address_and_key() {
        assert_eq!(discovered(&[]), json!({"ok": true, "nodes": []}));
        let key = "A".repeat(43);
        let node = |address: &str| Found {
            key: shardpack_identity::PeerKey::parse(&key).unwrap(),
            address: address.parse().unwrap(),
        };
        let found = [node("192.168.1.11:7420"), node("[2001:db8::7]:7421")];
        let expected = json!({"ok": true, "nodes": [
            {"address": "192.168.1.11:7420", "key": key},
            {"address": "[2001:db8::7]:7421", "key": key},
        ]});
        assert_eq!(discovered(&found), expected);
    }

    #[test]
    fn current_packages_are_told_by_name_and_rank() {
        let layout = "0123456789abcdef";
        let entry = |rank| json!({"current": {"layout": layout, "rank": rank}, "previous": null});
        assert_eq!(active(&json!({"active": {}})), "none yet");
        let listing = json!({"active": {"default": entry(0), "tiny": entry(1)}});
        assert_eq!(
            active(&listing),
            "(no name): rank 0 of layout 0123456789ab; tiny: rank 1 of layout 0123456789ab"
        );
    }
}
