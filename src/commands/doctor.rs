//! `shardpack doctor`: checks a machine, or every node of a set.

pub(super) mod apple;
mod disk;
mod links;
mod machine;
mod mlx_lm;
mod numerics;
mod pair;
mod private;
mod probes;
mod process;
mod report;
mod self_tests;
mod speed;

use std::{
    env, fs,
    io::Read as _,
    path::Path,
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use shardpack_identity::Endpoint;
use shardpack_manifests::Manifest;
use shardpack_transfer::protocol::{PackageKey, Timeouts};
use shardpack_transfer::receive::NodeClient;

use super::{Outcome, cabling::Facts, package, ranks::RankParameters};
use crate::{
    args::DoctorArgs,
    cluster,
    failure::Failure,
    progress::{result, say},
};
pub(super) use machine::{ask, memory_bytes};
use private::Private;
pub(super) use probes::run as run_probe;
use report::Report;
use speed::Verse;

/// Longest check of one machine.
const MACHINE_TIMEOUT: Duration = Duration::from_mins(10);

/// Longest report of a node; one has a few kilobytes.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> Outcome {
    let reports = match &args.set {
        Some(set) => of_nodes(set, args)?,
        None => vec![of_this_machine(args.self_test)?],
    };
    let failed = reports.iter().any(Report::has_failed);
    let private = Private::of_this_machine();
    let page = report::markdown(&reports) + &report::bug_report(&reports, &private);
    if let Some(path) = &args.report {
        fs::write(path, &page).with_context(|| path.display().to_string())?;
        say(&format!("doctor: the report is in {}", path.display()));
    }
    if args.json {
        let version = env!("CARGO_PKG_VERSION");
        let cabling = args.set.is_none().then(Facts::gather);
        let json =
            json!({ "ok": !failed, "version": version, "reports": reports, "cabling": cabling });
        result(&json.to_string());
    } else if args.report.is_none() {
        result(page.trim_end());
    }
    Ok(if failed { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn of_this_machine(self_test: bool) -> anyhow::Result<Report> {
    let mut report = Report::new("this machine");
    let has_mlx = machine::look(&mut report);
    if self_test {
        let folder = tempfile::Builder::new().prefix("shardpack-doctor-").tempdir()?;
        self_tests::run(&mut report, folder.path(), has_mlx)?;
    }
    Ok(report)
}

/// The report of every node, and of the network between them.
fn of_nodes(set: &Path, args: &DoctorArgs) -> Result<Vec<Report>, Failure> {
    let document = package::read_set(set)?;
    let manifests = package::folders(set, &document)
        .iter()
        .map(|folder| package::read_manifest(folder))
        .collect::<Result<Vec<Manifest>, _>>()?;
    if manifests.len() != args.nodes.names.len() {
        let (packages, nodes) = (manifests.len(), args.nodes.names.len());
        let error = anyhow::anyhow!("the set has {packages} packages and {nodes} nodes were given");
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    // One after the other: on one machine they would disturb each other's measurements.
    let mut reports = Vec::new();
    for (node, manifest) in
        cluster::nodes(&args.nodes.names, &args.nodes.cluster)?.iter().zip(&manifests)
    {
        say(&format!("doctor: node {node}"));
        let name = format!("node {node}");
        reports.push(match of_node(node, manifest, args.self_test) {
            Ok(report) => Report { of: name, ..report },
            Err(error) => {
                let mut report = Report::new(name);
                report.add_result("node", Err(error));
                report
            }
        });
    }
    let mut between = Report::new("between the nodes");
    if args.self_test {
        let nodes = &args.nodes.names;
        let cluster: Vec<String> = match &args.nodes.cluster.folder {
            Some(folder) => vec!["--cluster".to_owned(), folder.to_string_lossy().into_owned()],
            None => Vec::new(),
        };
        let own = speed::check(set, nodes, &cluster, Verse::Unknown);
        between.add_result("tokens per second", own);
        match &args.network.hostfile {
            Some(file) => {
                let port = args.network.collectives_port.to_string();
                let file = file.to_string_lossy().into_owned();
                for layer in ["ring", "jaccl"] {
                    let options = ["--engine", "mlx", "--collectives", layer, "--hostfile"];
                    let mut options: Vec<String> = options.map(str::to_owned).to_vec();
                    options.extend([file.clone(), "--collectives-port".to_owned(), port.clone()]);
                    options.extend_from_slice(&cluster);
                    let found = speed::check(set, nodes, &options, Verse::Unknown);
                    between.add_result(&format!("tokens per second, {layer}"), found);
                }
            }
            None => between.skip("ring and JACCL", "needs --hostfile"),
        }
    }
    reports.push(between);
    Ok(reports)
}

fn of_node(node: &Endpoint, manifest: &Manifest, self_test: bool) -> anyhow::Result<Report> {
    let key = PackageKey { layout: manifest.ids.layout, rank: manifest.rank };
    let parameters = serde_json::to_value(RankParameters::Doctor { self_test })?;
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.start_rank(key, &parameters)?;
    let reports: Vec<Report> = serde_json::from_value(answer["reports"].clone())
        .context("the node did not answer with a report")?;
    reports.into_iter().next().context("the node's report is empty")
}

/// The report of this machine, made in a process of its own, so that a hang or crash does not
/// affect this one.
pub(super) fn in_a_process(self_test: bool) -> anyhow::Result<Value> {
    let mut command = Command::new(env::current_exe().context("cannot find this program's file")?);
    command.args(["doctor", "--json"]).stdin(Stdio::null()).stdout(Stdio::piped());
    if self_test {
        command.arg("--self-test");
    }
    let mut child = command.spawn().context("the doctor's process cannot be started")?;
    let output = child.stdout.take().context("its output is a pipe")?;
    let reading = thread::spawn(move || {
        let mut text = String::new();
        output.take(MAX_REPORT_BYTES).read_to_string(&mut text).map(|_| text)
    });
    let deadline = Instant::now() + MACHINE_TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the checks did not end within {} s", MACHINE_TIMEOUT.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    }
    let text = reading.join().map_err(|_| anyhow::anyhow!("the report cannot be read"))??;
    serde_json::from_str(&text).context("the doctor's process gave no report")
}
