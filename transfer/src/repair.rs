//! Repairs stored packages: asks nodes which chunks are damaged, and replaces these alone.
//!
//! A chunk is known by its value, so it comes from whoever has it: the node itself in another
//! package, another node with the same file or the same package, a set on this machine. Every hand
//! that it goes through checks it: the node that reads it, this program, the node that writes it.
//!
//! Knows nodes, chunks and sets; does not know why a chunk was damaged.

mod peers;
mod set;

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use shardpack_identity::Endpoint;

use crate::{
    protocol::{ChunkPlace, PackageKey, PutOutcome, Timeouts},
    receive::{CheckedPackage, ClientError, DamagedChunk, FsckOptions, FsckReport, NodeClient},
};
use peers::Peers;
use set::SetChunks;

/// Most reasons that are told of what was not repaired; the number of chunks is told besides.
const MAX_REASONS: usize = 20;

/// Where a repair takes chunks from, and what it repairs.
#[derive(Clone, Copy, Debug)]
pub struct RepairOptions<'a> {
    /// Nodes that may have the chunks; those that are repaired may be among them.
    pub peers: &'a [Endpoint],
    /// A set on this machine that may have them; asked last.
    pub set: Option<&'a Path>,
    /// The package to repair; all of a node without one.
    pub package: Option<PackageKey>,
    /// How long a node may keep this side waiting.
    pub timeouts: Timeouts,
}

/// Chunks that came from one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// How many.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What became of the packages of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// Chunks that were damaged.
    pub damaged_chunks: u64,
    /// Chunks that were replaced.
    pub repaired: Taken,
    /// The same by source: the name of a node, or the path of the set.
    pub sources: BTreeMap<String, Taken>,
    /// What is damaged still and why, at most twenty.
    pub remaining: Vec<String>,
}

impl RepairReport {
    /// Whether nothing is damaged any more.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.remaining.is_empty()
    }

    fn remain(&mut self, what: String) {
        if self.remaining.len() < MAX_REASONS {
            self.remaining.push(what);
        }
    }

    fn take(&mut self, source: String, size_bytes: u64) {
        for taken in [&mut self.repaired, self.sources.entry(source).or_default()] {
            taken.chunks += 1;
            taken.bytes += size_bytes;
        }
    }
}

/// Checks what a node stores and replaces the chunks that are damaged. Fails where the node cannot be
/// asked; what it could not be given stands in the report.
pub fn repair(node: &Endpoint, options: &RepairOptions) -> Result<RepairReport, ClientError> {
    let mut repair = Repair {
        client: NodeClient::connect(node.clone(), options.timeouts)?,
        node,
        options,
        peers: Peers::new(options.peers, options.timeouts),
        set: None,
        report: RepairReport::default(),
    };
    let mut checked = repair.check(options.package)?;
    loop {
        let before = repair.report.repaired.chunks;
        let mut again = Vec::new();
        for package in &checked {
            if repair.package(package)? == Next::CheckAgain {
                again.push(package.package);
            }
        }
        // Each round repairs something, or is the last.
        if again.is_empty() || repair.report.repaired.chunks == before {
            return Ok(repair.report);
        }
        checked.clear();
        for package in again {
            checked.extend(repair.check(Some(package))?);
        }
    }
}

/// What follows the repair of a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// All is known of it.
    Done,
    /// It has more damaged chunks than a node tells at a time.
    CheckAgain,
}

struct Repair<'a> {
    client: NodeClient,
    node: &'a Endpoint,
    options: &'a RepairOptions<'a>,
    peers: Peers,
    /// Read when the first chunk is looked for there.
    set: Option<SetChunks>,
    report: RepairReport,
}

impl Repair<'_> {
    fn check(&mut self, package: Option<PackageKey>) -> Result<Vec<CheckedPackage>, ClientError> {
        let options = FsckOptions { rebuild: false, package };
        let parameters = serde_json::to_value(options).expect("options have text keys");
        let answer = self.client.operate("fsck", &parameters)?;
        let report: FsckReport = serde_json::from_value(answer).map_err(|error| {
            let (address, problem) = (self.node.to_string(), error.to_string());
            ClientError::Answer { address, problem }
        })?;
        Ok(report.packages)
    }

    fn package(&mut self, checked: &CheckedPackage) -> Result<Next, ClientError> {
        let CheckedPackage { package, findings, damaged, more_damaged, .. } = checked;
        if findings.is_empty() {
            return Ok(Next::Done);
        }
        self.report.damaged_chunks += damaged.len() as u64;
        if checked.other_findings > 0 || (damaged.is_empty() && *more_damaged == 0) {
            let what = findings.join("; ");
            self.report.remain(format!("package {package}: {what}; push its set again"));
        }
        let mut repaired = 0;
        for some in damaged.chunks(peers::MAX_WANTED) {
            let places = self.peers.find(some);
            for (index, chunk) in some.iter().enumerate() {
                let place = ChunkPlace { package: *package, file: chunk.file, chunk: chunk.chunk };
                repaired += u64::from(self.chunk(place, chunk, places.of(index))?);
            }
        }
        if *more_damaged == 0 {
            return Ok(Next::Done);
        }
        if repaired == 0 {
            let more = format!("package {package}: {more_damaged} more damaged chunks");
            self.report.remain(more);
        }
        Ok(Next::CheckAgain)
    }

    /// Replaces one chunk from the first source that has it; whether it is right now.
    fn chunk(
        &mut self,
        place: ChunkPlace,
        chunk: &DamagedChunk,
        places: &[(usize, ChunkPlace)],
    ) -> Result<bool, ClientError> {
        let mut reasons = Vec::new();
        let mut found = None;
        for (peer, theirs) in places {
            // Its own place is what is damaged.
            if self.peers.is(*peer, self.node) && *theirs == place {
                continue;
            }
            match self.peers.fetch(*peer, *theirs, chunk) {
                Ok(bytes) => {
                    found = Some((bytes, self.peers.name(*peer)));
                    break;
                }
                Err(reason) => reasons.push(reason),
            }
        }
        if let (None, Some(path)) = (&found, self.options.set) {
            let set = self.set.get_or_insert_with(|| SetChunks::of(path));
            match set.read(chunk) {
                Ok(bytes) => found = Some((bytes, path.display().to_string())),
                Err(reason) => reasons.push(reason),
            }
        }
        if let Some((bytes, source)) = found {
            match self.client.put(place, bytes) {
                Ok(PutOutcome::Replaced) => {
                    self.report.take(source, chunk.size_bytes());
                    return Ok(true);
                }
                // Repaired by somebody else, or with a file that several packages share.
                Ok(PutOutcome::Intact) => return Ok(true),
                // A refusal ends the connection; the next chunk may be written.
                Err(error @ ClientError::Refused { .. }) => {
                    reasons.push(error.to_string());
                    self.client = NodeClient::connect(self.node.clone(), self.options.timeouts)?;
                }
                Err(error) => return Err(error),
            }
        }
        if reasons.is_empty() {
            reasons.push("no other node has it".to_owned());
        }
        let (name, number, reasons) = (&chunk.name, chunk.chunk, reasons.join("; "));
        let package = place.package;
        self.report.remain(format!("package {package}: {name}: chunk {number}: {reasons}"));
        Ok(false)
    }
}
