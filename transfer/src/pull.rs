//! Fetches packages from nodes into a folder of this machine.
//!
//! Chunks come into a store of their own beside the result, with all checks of a push: each is compared with
//! the manifest before it counts, what arrived is not fetched again by the next attempt, and a package gets its
//! name once all of it was read back and verified.
//!
//! Knows nodes and folders; does not know what a tensor means.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use shardpack_identity::Endpoint;
use shardpack_manifests::{
    Digest, Manifest, PackageSet, canonical,
    manifest::FORMAT,
    set::{PackageEntry, SET_FILE},
    verify::{TensorCheck, VerifyOptions, verify_package},
};

use crate::{
    protocol::{ChunkPlace, Failure, FailureCode, Incoming, Intent, Offer, PackageKey, Timeouts},
    receive::{
        ClientError, DOCUMENT, DocumentName, DocumentPiece, DocumentRequest, Intake, NodeClient,
        Store, StoreError, write_durably,
    },
};

/// Where packages are until they are whole, below the result.
const PARTIAL: &str = ".pull";

/// A package that is not fetched.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The node could not be asked, or refused.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The folder here.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the node says of its package contradicts itself.
    #[error("the package that the node offers is refused: {0}")]
    Refused(Failure),
    /// Another package than the one that was asked for.
    #[error(
        "the node's manifest of package {key} is {found}, the release's {expected}: push the release's set to it again"
    )]
    OtherManifest {
        /// The package.
        key: PackageKey,
        /// BLAKE3 that the release states.
        expected: Digest,
        /// BLAKE3 of what came.
        found: Digest,
    },
    /// Documents that do not end, or are not there.
    #[error("the node's {name} has {size_bytes} bytes, at most {limit_bytes} are read")]
    Document {
        /// `manifest.json` or `model.sig`.
        name: &'static str,
        /// As the node says.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Something else has the result's name.
    #[error("{} is there and is not this package: {problem}; remove it, or give another folder", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
        /// What is different.
        problem: String,
    },
}

/// Called with what happens to a package, from the thread that fetches it.
pub type PullObserver<'a> = &'a (dyn Fn(PullEvent) + Sync);

/// What happens to a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullEvent {
    /// Its manifest is here.
    Planned {
        /// The rank.
        rank: u32,
        /// Bytes to come.
        missing_bytes: u64,
    },
    /// A chunk was verified and written.
    Stored {
        /// The rank.
        rank: u32,
        /// Its bytes.
        size_bytes: u64,
    },
    /// All of it is here and is about to be verified.
    Verifying {
        /// The rank.
        rank: u32,
    },
}

/// A package that was fetched.
#[derive(Debug)]
pub struct Pulled {
    /// Its folder.
    pub path: PathBuf,
    /// Its rank.
    pub rank: u32,
    /// Bytes of its files.
    pub package_bytes: u64,
    /// Bytes that were here already.
    pub held_bytes: u64,
    /// Bytes that were fetched.
    pub fetched_bytes: u64,
    manifest: Manifest,
    digest: Digest,
}

/// A folder that packages are fetched into; one process at a time.
pub struct PullFolder {
    path: PathBuf,
    store: Arc<Store>,
}

impl PullFolder {
    /// Opens the folder, which is made if it is not there.
    pub fn open(path: &Path) -> Result<Self, PullError> {
        let store = Arc::new(Store::open(&path.join(PARTIAL))?);
        Ok(Self { path: path.to_owned(), store })
    }

    /// Fetches a package of a node; `expected` is the digest of its manifest where a release states it.
    pub fn pull(
        &self,
        node: &Endpoint,
        key: PackageKey,
        expected: Option<Digest>,
        timeouts: Timeouts,
        observer: PullObserver,
    ) -> Result<Pulled, PullError> {
        let mut client = NodeClient::connect(node, timeouts)?;
        let manifest = document(&mut client, key, DocumentName::Manifest)?;
        let signature = document(&mut client, key, DocumentName::Signature)?;
        let digest = Digest::of(&manifest);
        let offer = Offer { intent: Intent::Send, manifest, set: Vec::new(), signature };
        let incoming = Incoming::parse(offer).map_err(PullError::Refused)?;
        if incoming.key != key {
            let message = format!("it is package {}, expected {key}", incoming.key);
            return Err(PullError::Refused(Failure { code: FailureCode::Unknown, message }));
        }
        if let Some(expected) = expected.filter(|expected| *expected != digest) {
            return Err(PullError::OtherManifest { key, expected, found: digest });
        }
        let rank = key.rank;
        let manifest = Manifest::clone(&incoming.manifest);
        let package_bytes = manifest.files.iter().map(|file| file.size).sum();
        let path = self.path.join(directory_of(rank));
        let done = |fetched_bytes: u64| {
            let held_bytes = package_bytes - fetched_bytes;
            let path = path.clone();
            Pulled { path, rank, package_bytes, held_bytes, fetched_bytes, manifest, digest }
        };
        if path.symlink_metadata().is_ok() {
            check_there(&path, digest)?;
            return Ok(done(0));
        }
        let fetched_bytes = self.fetch(&mut client, incoming, observer)?;
        fs::rename(self.store.package(key)?.path, &path)
            .and_then(|()| fs::File::open(&self.path)?.sync_all())
            .map_err(|source| StoreError::Io { action: "move", path: path.clone(), source })?;
        Ok(done(fetched_bytes))
    }

    /// Fetches what is not here and seals the package; returns bytes that came.
    fn fetch(
        &self,
        client: &mut NodeClient,
        incoming: Incoming,
        observer: PullObserver,
    ) -> Result<u64, PullError> {
        let key = incoming.key;
        let intake = Intake::open(&self.store, incoming)?;
        let missing = intake.missing();
        let missing_bytes = missing.iter().map(|(.., size_bytes)| size_bytes).sum();
        observer(PullEvent::Planned { rank: key.rank, missing_bytes });
        let place = |(file, chunk, _): &(u32, u32, u64)| {
            let (file, chunk) = (*file, *chunk);
            ChunkPlace { package: key, file, chunk }
        };
        let places: Vec<ChunkPlace> = missing.iter().map(place).collect();
        let fetched = client.fetch_each::<PullError>(&places, |place, bytes| {
            let size_bytes = intake.store(place.file, place.chunk, &bytes)?;
            observer(PullEvent::Stored { rank: key.rank, size_bytes });
            Ok(())
        });
        // What has been stored counts, however it ended.
        let synced = intake.sync();
        fetched?;
        synced?;
        observer(PullEvent::Verifying { rank: key.rank });
        intake.seal()?;
        Ok(missing_bytes)
    }

    /// Ends the work in the folder. Writes `set.json` where every rank of one layout is there, and says so.
    pub fn finish(self, packages: &[Pulled]) -> Result<Option<Digest>, PullError> {
        let partial = self.path.join(PARTIAL);
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |source| PullError::Store(StoreError::Io { action, path, source })
        };
        let mut written = None;
        if let Some(set) = set_of(packages) {
            // The documents that it is made of are canonical JSON already.
            let text = canonical::to_string(&set).expect("a set has text keys") + "\n";
            let path = self.path.join(SET_FILE);
            write_durably(&path, text.as_bytes()).map_err(io("write", &path))?;
            written = Some(Digest::of(text.as_bytes()));
        }
        drop(self.store);
        fs::remove_dir_all(&partial).map_err(io("remove", &partial))?;
        Ok(written)
    }
}

fn directory_of(rank: u32) -> String {
    format!("node-{rank}")
}

/// Reads a document in as many pieces as it has.
fn document(
    client: &mut NodeClient,
    package: PackageKey,
    name: DocumentName,
) -> Result<Vec<u8>, PullError> {
    let mut text = String::new();
    loop {
        let request = DocumentRequest { package, name, offset: text.len() as u64 };
        let parameters = serde_json::to_value(request).expect("requests have text keys");
        let answer = client.operate(DOCUMENT, &parameters)?;
        let DocumentPiece { size_bytes, text: piece } =
            serde_json::from_value(answer).map_err(|error| client.wrong(error.to_string()))?;
        text.push_str(&piece);
        let (size, limit_bytes) = (text.len() as u64, name.limit_bytes());
        let is_endless = piece.is_empty() && size < size_bytes;
        if size_bytes > limit_bytes || size > size_bytes || is_endless {
            return Err(PullError::Document { name: name.file(), size_bytes, limit_bytes });
        }
        if size == size_bytes {
            return Ok(text.into_bytes());
        }
    }
}

/// Whether what has the result's name is the package, whole.
fn check_there(path: &Path, digest: Digest) -> Result<(), PullError> {
    let options = VerifyOptions { tensors: TensorCheck::Skip };
    let report = verify_package(path, Some(digest), options, &|_| {});
    match report.findings.first() {
        None => Ok(()),
        Some(finding) => {
            Err(PullError::Occupied { path: path.to_owned(), problem: finding.to_string() })
        }
    }
}

/// The document of a set with these packages, if they are one.
fn set_of(packages: &[Pulled]) -> Option<PackageSet> {
    let first = packages.iter().find(|package| package.rank == 0)?;
    let Manifest { requires, name, ids, source, quantization, layout, .. } = &first.manifest;
    let entry = |rank: u32| {
        let mut those = packages.iter();
        let pulled = those.find(|it| it.rank == rank && it.manifest.ids == *ids)?;
        let (manifest, size_bytes) = (pulled.digest, pulled.package_bytes);
        Some(PackageEntry { directory: directory_of(rank), manifest, size_bytes })
    };
    let packages = (0..layout.ranks).map(entry).collect::<Option<Vec<PackageEntry>>>()?;
    Some(PackageSet {
        format: FORMAT,
        requires: requires.clone(),
        name: name.clone(),
        ids: ids.clone(),
        source: source.clone(),
        quantization: quantization.clone(),
        packages,
    })
}
