//! `shardpack verify`.

use std::{path::Path, process::ExitCode, sync::OnceLock};

use serde_json::json;
use shardpack_manifests::{
    signature::{VerifyingKey, verify_signature},
    verify::{Report, TensorCheck, VerifyEvent, VerifyOptions, verify_package, verify_set},
};

use super::{Outcome, package, sign, store, threads};
use crate::{
    args::VerifyArgs,
    failure::Failure,
    progress::{Progress, result, say, size},
};

/// Runs the command.
pub(crate) fn run(args: &VerifyArgs) -> Outcome {
    let path = &store::packed(&args.path)?;
    if !path.is_dir() {
        return Err(Failure::from(anyhow::anyhow!("{}: no such folder", path.display())));
    }
    let key = args.key.as_deref().map(sign::read_public_key).transpose()?;
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
    let report = threads::with(args.threads.count, || {
        if package::is_set(path) {
            verify_set(path, options, &show)
        } else {
            verify_package(path, None, options, &show)
        }
    })?;
    progress.get().into_iter().for_each(Progress::finish);
    let mut wrong: Vec<String> = report.findings.iter().map(message).collect();
    if let Some(key) = &key {
        wrong.extend(threads::with(args.threads.count, || signatures(path, key))?);
    }
    if args.form.json {
        result(&json(&report, &wrong, key.is_some()).to_string());
    } else {
        for finding in &wrong {
            say(&format!("wrong: {finding}"));
        }
        result(&summary(&report, wrong.len(), key.as_ref()));
    }
    Ok(if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// What is wrong with the signatures of a package, or of every package of a set.
fn signatures(path: &Path, key: &VerifyingKey) -> Vec<String> {
    // A set that cannot be read is among the findings already.
    let packages = sign::packages(path).unwrap_or_default();
    let progress = Progress::bytes("signature", sign::size_bytes(&packages));
    let problems = |package: &std::path::PathBuf| {
        let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        verify_signature(package, key, &|bytes| progress.add(bytes))
            .into_iter()
            .map(move |problem| format!("{name}: {problem}"))
    };
    let wrong = packages.iter().flat_map(problems).collect();
    progress.finish();
    wrong
}

/// A finding with the chain of its causes.
pub(super) fn message(finding: &shardpack_manifests::verify::Finding) -> String {
    let mut text = finding.to_string();
    let mut cause = std::error::Error::source(&finding.problem);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn summary(report: &Report, wrong: usize, key: Option<&VerifyingKey>) -> String {
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
    match wrong {
        0 => match key {
            Some(key) => format!("verified: {what}, signed with key {:.12}", key.hint()),
            None => format!("verified: {what}"),
        },
        count => format!("{count} wrong: {what}"),
    }
}

fn json(report: &Report, wrong: &[String], signed: bool) -> serde_json::Value {
    json!({
        "ok": wrong.is_empty(),
        "findings": wrong,
        "signed": signed && wrong.is_empty(),
        "packages": report.packages,
        "files": report.files,
        "chunks": report.chunks,
        "read_bytes": report.read_bytes,
        "seconds": report.seconds,
    })
}
