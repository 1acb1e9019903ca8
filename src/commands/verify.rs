//! `shardpack verify`.

use std::{process::ExitCode, sync::OnceLock};

use serde_json::json;
use shardpack_manifests::verify::{
    Report, TensorCheck, VerifyEvent, VerifyOptions, verify_package, verify_set,
};

use super::{Outcome, package, threads};
use crate::{
    args::VerifyArgs,
    failure::Failure,
    progress::{Progress, result, say, size},
};

/// Carries the command out.
pub(crate) fn run(args: &VerifyArgs) -> Outcome {
    if !args.path.is_dir() {
        return Err(Failure::from(anyhow::anyhow!("{}: no such folder", args.path.display())));
    }
    let options = VerifyOptions { tensors: TensorCheck::Skip };
    let progress = OnceLock::new();
    let show = |event| match event {
        VerifyEvent::Planned { size_bytes } => {
            progress.get_or_init(|| Progress::bytes("verify", size_bytes));
        }
        VerifyEvent::Read { size_bytes } => {
            progress.get().into_iter().for_each(|progress| progress.add(size_bytes));
        }
    };
    let report = threads::with(args.threads, || {
        if package::is_set(&args.path) {
            verify_set(&args.path, options, &show)
        } else {
            verify_package(&args.path, None, options, &show)
        }
    })?;
    progress.get().into_iter().for_each(Progress::finish);
    if args.json {
        result(&json(&report).to_string());
    } else {
        for finding in &report.findings {
            say(&format!("wrong: {}", message(finding)));
        }
        result(&summary(&report));
    }
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// A finding with the chain of its causes.
fn message(finding: &shardpack_manifests::verify::Finding) -> String {
    let mut text = finding.to_string();
    let mut cause = std::error::Error::source(&finding.problem);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn summary(report: &Report) -> String {
    let rate = (report.read_bytes as f64 / report.seconds.max(1e-9)) as u64;
    let what = format!(
        "{} packages, {} files, {} chunks, {} in {:.2} s ({}/s)",
        report.packages,
        report.files,
        report.chunks,
        size(report.read_bytes),
        report.seconds,
        size(rate)
    );
    match report.findings.len() {
        0 => format!("verified: {what}"),
        count => format!("{count} wrong: {what}"),
    }
}

fn json(report: &Report) -> serde_json::Value {
    json!({
        "ok": report.is_clean(),
        "findings": report.findings.iter().map(message).collect::<Vec<_>>(),
        "packages": report.packages,
        "files": report.files,
        "chunks": report.chunks,
        "read_bytes": report.read_bytes,
        "seconds": report.seconds,
    })
}
