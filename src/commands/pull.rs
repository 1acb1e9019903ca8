//! `shardpack pull`.

use std::{collections::BTreeMap, process::ExitCode, sync::OnceLock, thread};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_identity::Endpoint;
use shardpack_manifests::Digest;
use shardpack_transfer::protocol::{PackageKey, Timeouts};
use shardpack_transfer::pull::{PullError, PullEvent, PullFolder, Pulled};
use shardpack_transfer::receive::{NodeClient, ReleaseInfo, StoreState};

use super::Outcome;
use crate::{
    args::PullArgs,
    cluster,
    failure::Failure,
    kill_points,
    progress::{Progress, result, say, size, table},
};

/// A package to fetch.
struct Wanted {
    node: Endpoint,
    package: PackageKey,
    /// BLAKE3 of its manifest, where a release states it.
    manifest: Option<Digest>,
}

/// Runs the command.
pub(crate) fn run(args: &PullArgs) -> Outcome {
    let nodes = cluster::nodes(&args.from, &args.cluster)?;
    let wanted = nodes.iter().map(|node| choose(node, args)).collect::<Result<Vec<_>, _>>()?;
    check_ranks(&wanted)?;
    let folder = PullFolder::open(&args.output)?;
    let progress: Vec<OnceLock<Progress>> = wanted.iter().map(|_| OnceLock::new()).collect();
    let pulled: Vec<Result<Pulled, PullError>> = thread::scope(|scope| {
        let folder = &folder;
        let pull = |(wanted, progress): (&Wanted, &OnceLock<Progress>)| {
            let Wanted { node, package, manifest } = wanted;
            let show = |event| show(event, progress);
            folder.pull(node, *package, *manifest, Timeouts::default(), &show)
        };
        let running: Vec<_> =
            wanted.iter().zip(&progress).map(|it| scope.spawn(move || pull(it))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            // A panic here is ours, and goes on in the caller's thread.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    });
    progress.iter().filter_map(OnceLock::get).for_each(Progress::finish);
    report(args, &wanted, folder, pulled)
}

/// Ends the work in the folder and tells what came of it.
fn report(
    args: &PullArgs,
    wanted: &[Wanted],
    folder: PullFolder,
    pulled: Vec<Result<Pulled, PullError>>,
) -> Outcome {
    let shown = |error: &PullError| {
        anyhow::Chain::new(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
    };
    let rows: Vec<Value> =
        wanted.iter().zip(&pulled).map(|(wanted, pulled)| json_of(wanted, pulled, shown)).collect();
    for (wanted, pulled) in wanted.iter().zip(&pulled) {
        if let Err(error) = pulled {
            let (node, rank) = (&wanted.node, wanted.package.rank);
            say(&format!("error: node {node} (rank {rank}): {}", shown(error)));
        }
    }
    let is_done = pulled.iter().all(Result::is_ok);
    let pulled: Vec<Pulled> = pulled.into_iter().flatten().collect();
    // What is there of the others is for the next attempt.
    let set = if is_done { folder.finish(&pulled)? } else { None };
    if args.form.json {
        let (folder, is_set) = (&args.output, set.is_some());
        let json = json!({ "ok": is_done, "folder": folder, "is_set": is_set, "packages": rows });
        result(&json.to_string());
    } else {
        result(text(&pulled).trim_end());
        if set.is_some() {
            result(&format!("{} is the whole set", args.output.display()));
        }
    }
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// Finds out which package of a node is meant.
fn choose(node: &Endpoint, args: &PullArgs) -> Result<Wanted, Failure> {
    let wanted = |package, manifest| Wanted { node: node.clone(), package, manifest };
    if let Some(package) = &args.package {
        if args.from.len() > 1 {
            return Err(
                anyhow!("--package names a package of one node, and several are given").into()
            );
        }
        let package = package
            .parse::<PackageKey>()
            .map_err(|error| anyhow!("--package {package}: {error}"))?;
        return Ok(wanted(package, None));
    }
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.operate("activation.state", &json!({ "model": args.model }))?;
    let StoreState { models } = serde_json::from_value(answer)
        .map_err(|error| anyhow!("{node}: its releases cannot be read: {error}"))?;
    let mut current: BTreeMap<String, ReleaseInfo> =
        models.into_iter().filter_map(|(name, model)| Some((name, model.current?))).collect();
    let names: Vec<String> = current.keys().cloned().collect();
    let Some((name, release)) = (names.len() < 2).then(|| current.pop_first()).flatten() else {
        let (what, hint) = match (&args.model, names.as_slice()) {
            (Some(model), _) => (format!("no current release of {model}"), "push its set first"),
            (None, []) => ("no current release".to_owned(), "give a package with --package"),
            (None, names) => {
                (format!("several models: {}", names.join(", ")), "name one with --model")
            }
        };
        return Err(Failure::from(anyhow!("{node} has {what}")).hint(hint));
    };
    let Some(record) = &release.record else { return Ok(wanted(release.package, None)) };
    if let Some(peer) = node.tls() {
        let verified = record.verify(&peer.credentials, record.release().time);
        verified
            .map_err(|error| Failure::wrong(error).hint(format!("{node}: release of {name}")))?;
    }
    let listed = record.release().package(release.package.rank);
    Ok(wanted(release.package, listed.map(|listed| listed.manifest)))
}

/// Two packages of one rank would have one name.
fn check_ranks(wanted: &[Wanted]) -> Result<(), Failure> {
    let mut seen: BTreeMap<u32, &Wanted> = BTreeMap::new();
    for each in wanted {
        let rank = each.package.rank;
        if let Some(other) = seen.insert(rank, each) {
            let (node, other) = (&each.node, &other.node);
            return Err(anyhow!(
                "{node} and {other} both have rank {rank}: fetch them into folders of their own"
            )
            .into());
        }
    }
    Ok(())
}

fn show(event: PullEvent, progress: &OnceLock<Progress>) {
    match event {
        PullEvent::Planned { rank, missing_bytes } => progress
            .get_or_init(|| Progress::bytes("pull", missing_bytes))
            .message(&format!("rank {rank}")),
        PullEvent::Stored { rank, size_bytes } => {
            progress.get().into_iter().for_each(|progress| progress.add(size_bytes));
            kill_points::at(|| format!("pull:stored:{rank}"));
        }
        PullEvent::Verifying { rank } => kill_points::at(|| format!("pull:verifying:{rank}")),
    }
}

fn text(pulled: &[Pulled]) -> String {
    let header = ["rank", "folder", "package", "held", "fetched"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for Pulled { path, rank, package_bytes, held_bytes, fetched_bytes, .. } in pulled {
        let sizes = [package_bytes, held_bytes, fetched_bytes].map(|bytes| size(*bytes));
        rows.push([vec![rank.to_string(), path.display().to_string()], sizes.to_vec()].concat());
    }
    table(&rows)
}

fn json_of(
    wanted: &Wanted,
    pulled: &Result<Pulled, PullError>,
    shown: impl Fn(&PullError) -> String,
) -> Value {
    let (node, rank) = (wanted.node.address(), wanted.package.rank);
    match pulled {
        Ok(Pulled { path, package_bytes, held_bytes, fetched_bytes, .. }) => json!({
            "rank": rank,
            "address": node,
            "folder": path,
            "package_bytes": package_bytes,
            "held_bytes": held_bytes,
            "fetched_bytes": fetched_bytes,
            "error": null,
        }),
        Err(error) => json!({ "rank": rank, "address": node, "error": shown(error) }),
    }
}
