//! Every byte of the packages that are served, read and compared with their manifests: those of this machine
//! here, those of nodes by the nodes.

use std::{path::PathBuf, thread};

use anyhow::Context as _;
use serde_json::to_value;
use shardpack_identity::Endpoint;
use shardpack_manifests::verify::{TensorCheck, VerifyOptions, verify_package};
use shardpack_server::{CheckedPackage, HostError, PackageCheck};
use shardpack_transfer::{
    protocol::{PackageKey, Timeouts},
    receive::{FsckOptions, FsckReport, NodeClient},
};

use crate::commands::{threads, verify};

/// The packages of a model.
pub(super) struct Packages {
    /// Those of this machine, in rank order.
    pub(super) folders: Vec<PathBuf>,
    /// Those of nodes, which are then the ones that are served.
    pub(super) remote: Vec<(Endpoint, PackageKey)>,
}

impl PackageCheck for Packages {
    /// Of a server of one model.
    fn check(&self, _: &str) -> Result<Vec<CheckedPackage>, HostError> {
        self.read().map_err(|error| HostError(format!("{error:#}")))
    }
}

impl Packages {
    /// Reads all of them.
    pub(super) fn read(&self) -> anyhow::Result<Vec<CheckedPackage>> {
        if self.remote.is_empty() {
            // Requests go on meanwhile.
            let threads = (threads::count(None) / 4).max(1);
            let read = || self.folders.iter().zip(0..).map(here).collect();
            return threads::with(Some(threads), read);
        }
        thread::scope(|scope| {
            let asking: Vec<_> = self
                .remote
                .iter()
                .map(|(node, key)| scope.spawn(move || there(node, *key)))
                .collect();
            let reports = asking.into_iter().map(|thread| {
                // A panic here is ours, and goes on in the caller's thread.
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            reports.collect()
        })
    }
}

fn here((folder, rank): (&PathBuf, u32)) -> CheckedPackage {
    let options = VerifyOptions { tensors: TensorCheck::Skip };
    let report = verify_package(folder, None, options, &|_| ());
    CheckedPackage {
        rank,
        place: folder.display().to_string(),
        read_bytes: report.read_bytes,
        findings: report.findings.iter().map(verify::message).collect(),
    }
}

fn there(node: &Endpoint, key: PackageKey) -> anyhow::Result<CheckedPackage> {
    let options = FsckOptions { rebuild: false, package: Some(key) };
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.operate("fsck", &to_value(options)?)?;
    let report: FsckReport = serde_json::from_value(answer)
        .with_context(|| format!("node {node}: its report on rank {}", key.rank))?;
    let checked = report.packages.into_iter().find(|checked| checked.package == key);
    let checked = checked
        .with_context(|| format!("node {node}: the package of rank {} was removed", key.rank))?;
    let (read_bytes, findings) = (checked.read_bytes, checked.findings);
    Ok(CheckedPackage { rank: key.rank, place: format!("node {node}"), read_bytes, findings })
}
