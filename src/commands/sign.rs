//! `shardpack sign`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::json;
use shardpack_manifests::signature::{
    KeyError, SIGNATURE_FILE, SignError, SigningKey, VerifyingKey, sign_package,
};

use super::{Outcome, package, threads};
use crate::{
    args::SignArgs,
    failure::Failure,
    progress::{Progress, result},
};

/// Runs the command.
pub(crate) fn run(args: &SignArgs) -> Outcome {
    let key = read_key(&args.key)?;
    let packages = packages(&args.path)?;
    let progress = Progress::bytes("sign", size_bytes(&packages));
    let sign = || {
        packages
            .iter()
            .try_for_each(|package| sign_package(package, &key, &|bytes| progress.add(bytes)))
    };
    threads::with(args.threads.count, sign)?.map_err(|error: SignError| {
        if error.is_wrong() { Failure::wrong(error) } else { error.into() }
    })?;
    progress.finish();
    let hint = key.verifying_key().hint();
    if args.form.json {
        let signed: Vec<PathBuf> =
            packages.iter().map(|package| package.join(SIGNATURE_FILE)).collect();
        result(&json!({ "ok": true, "signatures": signed, "hint": hint }).to_string());
    } else {
        result(&format!("signed: {} packages with key {hint:.12}", packages.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The packages of a set, or the package itself.
pub(super) fn packages(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if package::is_set(path) {
        let set = package::read_set(path)?;
        return Ok(package::folders(path, &set));
    }
    package::read_manifest(path)?;
    Ok(vec![path.to_owned()])
}

/// Bytes of the files that the packages' manifests list, for progress displays.
pub(super) fn size_bytes(packages: &[PathBuf]) -> u64 {
    let size = |package: &PathBuf| {
        let manifest = package::read_manifest(package).ok()?;
        Some(manifest.files.iter().map(|file| file.size).sum::<u64>())
    };
    packages.iter().filter_map(size).sum()
}

/// The private key in a file.
pub(super) fn read_key(path: &Path) -> Result<SigningKey, Failure> {
    SigningKey::read(path).map_err(key_failure)
}

/// The public key in a file.
pub(super) fn read_public_key(path: &Path) -> Result<VerifyingKey, Failure> {
    VerifyingKey::read(path).map_err(key_failure)
}

/// A bad key says nothing about the package: the command could not run.
fn key_failure(error: KeyError) -> Failure {
    let is_key = error.is_wrong();
    let failure = Failure::from(error);
    if is_key { failure.hint("make a pair with `shardpack keygen -o FILE`") } else { failure }
}
