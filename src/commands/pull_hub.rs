//! `shardpack pull-hub`.

use std::process::ExitCode;

use anyhow::anyhow;
use serde_json::json;
use shardpack_manifests::verify::{TensorCheck, VerifyOptions, verify_package, verify_set};

use super::{Outcome, package, store, threads, verify};
use crate::{args::PullHubArgs, failure::Failure, progress::result};

/// Runs the command.
pub(crate) fn run(args: &PullHubArgs) -> Outcome {
    let name = &args.repository;
    let folder = store::fetch_set(name, args.rank)?.ok_or_else(|| {
        Failure::wrong(anyhow!("{name}: no package set: it has no set.json"))
            .hint(format!("a model is converted: shardpack convert {name} -o SET"))
    })?;
    // The hub vouches for each file; that they are one set, and this rank's, the manifests say.
    let options = VerifyOptions { tensors: TensorCheck::Skip };
    let set = package::read_set(&folder)?;
    let (path, report) = match args.rank {
        None => (folder.clone(), threads::with(None, || verify_set(&folder, options, &|_| ()))?),
        Some(rank) => {
            let package = set.packages.get(rank as usize).ok_or_else(|| {
                let count = set.packages.len();
                anyhow!("{name}: no rank {rank}: the set has {count} packages, counted from 0")
            })?;
            let path = folder.join(&package.directory);
            let expected = Some(package.manifest);
            let verified = || verify_package(&path, expected, options, &|_| ());
            let report = threads::with(None, verified)?;
            (path, report)
        }
    };
    if let Some(finding) = report.findings.first() {
        return Err(Failure::wrong(anyhow!("{name}: {}", verify::message(finding))));
    }
    if args.form.json {
        result(&json!({ "folder": path, "bytes": report.read_bytes }).to_string());
    } else {
        result(&path.display().to_string());
    }
    Ok(ExitCode::SUCCESS)
}
