//! `shardpack cluster`.

mod ask;
mod events;
mod fronts;
mod handover;
mod health;
mod metrics;
mod network;
mod releases;
mod repair;
mod secret;
mod server;
mod status;
mod storage;
mod token;
mod upgrade;

pub(crate) use releases::tell_finished;
pub(crate) use server::ranks as rank_table;

use std::{process::ExitCode, time::Duration};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_identity::{Home, HomeError, JoinToken, Member, date};
use shardpack_transfer::receive::{FsckOptions, GcOptions};

use super::{Outcome, cabling};
use crate::{
    args::{self, ClusterAction, ClusterArgs, Command},
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
            let token = token::read(token.as_deref(), token_file.as_deref())?;
            add(args, address.as_deref(), &token, name.as_deref())
        }
        ClusterAction::Discover { seconds } => discover(args, *seconds),
        ClusterAction::List => list(args),
        ClusterAction::Status { nodes, watch, front } => status::run(args, nodes, *watch, front),
        ClusterAction::Health { nodes, front } => health::run(args, nodes, front),
        ClusterAction::Events { nodes, since, kinds } => events::run(args, nodes, *since, kinds),
        ClusterAction::Stats { network: _, server, key } => {
            network::run(args, server, key.as_deref())
        }
        ClusterAction::Metrics { nodes, front } => metrics::run(args, nodes, front),
        ClusterAction::Doctor { nodes, server, key } => {
            cabling::doctor(args, nodes, server.as_deref(), key.as_deref())
        }
        ClusterAction::Wire { nodes } => cabling::wire(args, nodes),
        ClusterAction::Rollback { model, nodes, to } => {
            releases::rollback(args, model.as_deref(), nodes, *to)
        }
        ClusterAction::Gc { nodes, dry_run, keep, older_than } => {
            let older_than_seconds = older_than.saturating_mul(60 * 60);
            let options = GcOptions { keep: *keep, older_than_seconds, dry_run: *dry_run };
            storage::gc(args, nodes, options)
        }
        ClusterAction::Fsck { nodes, rebuild } => {
            storage::fsck(args, nodes, FsckOptions { rebuild: *rebuild, package: None })
        }
        ClusterAction::Repair { nodes, set } => repair::repair(args, nodes, set.as_deref()),
        ClusterAction::Serve { arguments } => serve(args, arguments),
        ClusterAction::Fronts { nodes } => fronts::list(args, nodes),
        ClusterAction::Start { front } => {
            fronts::change(args, "front.start", &front.name, &front.nodes)
        }
        ClusterAction::Stop { front, forget } => {
            let operation = if *forget { "front.remove" } else { "front.stop" };
            fronts::change(args, operation, &front.name, &front.nodes)
        }
        ClusterAction::Restart { front } => {
            fronts::change(args, "front.restart", &front.name, &front.nodes)
        }
        ClusterAction::Logs { front, lines, follow } => {
            fronts::logs(args, &front.name, &front.nodes, (*lines, *follow))
        }
        ClusterAction::ExportController { file, passphrase } => {
            handover::export(args, file, passphrase)
        }
        ClusterAction::ImportController { file, passphrase } => {
            handover::import(args, file, passphrase)
        }
        ClusterAction::Handover { name, force } => {
            handover::handover(args, name.as_deref(), *force)
        }
        ClusterAction::Upgrade(options) => upgrade::run(args, options),
        ClusterAction::Renew { nodes } => renew(args, nodes),
        ClusterAction::Move { node, address } => relocate(args, node, address),
        ClusterAction::Remove { node, force } => remove(args, node, *force),
    }
}

/// Adds a node to the cluster: the one at `address`, or one that announces itself.
fn add(
    args: &ClusterArgs,
    address: Option<&str>,
    token: &JoinToken,
    name: Option<&str>,
) -> Outcome {
    let mut home = cluster::open(&args.cluster)?;
    let member = match address {
        Some(address) => home.add(address, token, name).map_err(explained)?,
        None => add_found(&mut home, token, name)?,
    };
    if args.json {
        result(&json!({ "ok": true, "member": member }).to_string());
    } else {
        result(&format!("{} ({}) is in the cluster", member.name, member.address));
    }
    Ok(ExitCode::SUCCESS)
}

/// Notes that a node has another address.
fn relocate(args: &ClusterArgs, node: &str, address: &str) -> Outcome {
    let mut home = cluster::open(&args.cluster)?;
    let member = home.relocate(node, address).map_err(explained)?;
    if args.json {
        result(&json!({ "ok": true, "member": member }).to_string());
    } else {
        result(&format!("{} is at {}", member.name, member.address));
    }
    Ok(ExitCode::SUCCESS)
}

/// `serve`, which takes the same arguments.
fn serve(args: &ClusterArgs, arguments: &[String]) -> Outcome {
    let mut line = vec!["shardpack".to_owned(), "serve".to_owned()];
    line.extend_from_slice(arguments);
    if let Some(folder) = &args.cluster.folder {
        line.push(format!("--cluster={}", folder.display()));
    }
    if args.json {
        line.push("--json".to_owned());
    }
    match args::parse_or_exit(line) {
        Command::Serve(serve_args) if serve_args.on.is_some() => super::serve::run(&serve_args),
        _ => {
            let error = anyhow!("--on NODE says which node is to serve");
            Err(Failure::from(error).hint("`shardpack serve` serves from this machine"))
        }
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
        HomeError::Known { .. } => Failure::from(error)
            .hint("leave --name out, or remove it first: shardpack cluster remove NAME"),
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
}
