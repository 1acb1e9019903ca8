//! The directory of a node's packages.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use shardpack_manifests::{
    Digest, Manifest,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    verify::read_document,
};

use super::{active::ReleaseRefusal, stage::Stage, usage::Uses};
use crate::protocol::{FailureCode, PackageKey};

/// Free bytes that a push leaves: a full disk stops more than this program.
const RESERVE_BYTES: u64 = 256 << 20;

/// How long a store's lock is waited for: a node that has just ended may hold it for a moment
/// yet, through a process that it was starting.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval at which the lock is polled.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Something that the store could not do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system failed.
    #[error("could not {action} {}", path.display())]
    Io {
        /// The verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process uses the store.
    #[error("{} is in use by another process", path.display())]
    Locked {
        /// Its directory.
        path: PathBuf,
    },
    /// The disk is too small.
    #[error("{needed_bytes} bytes are needed, {free_bytes} are free")]
    NoSpace {
        /// Bytes to come, and a reserve.
        needed_bytes: u64,
        /// Free bytes.
        free_bytes: u64,
    },
    /// Another push fills the same package.
    #[error("package {key} is being received on another connection")]
    Busy {
        /// The package.
        key: PackageKey,
    },
    /// A further stream of a push that is over, or was none.
    #[error("package {key} is not under way on another connection")]
    NotUnderWay {
        /// The package.
        key: PackageKey,
    },
    /// No such package.
    #[error("package {key} is not here, or not yet prepared")]
    Unknown {
        /// The package.
        key: PackageKey,
    },
    /// A stored package whose manifest cannot be used.
    #[error("package {key} cannot be used: {problem}")]
    Unusable {
        /// The package.
        key: PackageKey,
        /// Why.
        problem: String,
    },
    /// A chunk that no manifest lists.
    #[error("package {key} has no chunk {chunk} of file number {file}")]
    NoSuchChunk {
        /// The package.
        key: PackageKey,
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
    },
    /// A chunk that was to be read.
    #[error(
        "{file}: chunk {chunk} of package {key} is damaged; repair it: shardpack cluster repair"
    )]
    DamagedChunk {
        /// The package.
        key: PackageKey,
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
    },
    /// A chunk that was to be replaced, with something else.
    #[error(
        "{file}: chunk {chunk} is not replaced: the BLAKE3 of what came is {found}, the manifest's \
         is {expected}"
    )]
    WrongBytes {
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
        /// Value that the manifest states.
        expected: Digest,
        /// Value of the bytes.
        found: Digest,
    },
    /// A chunk that another node sent, with something else.
    #[error(
        "other bytes came than those of {file}, chunk {chunk}: their BLAKE3 is {found}, the \
         manifest's is {expected}"
    )]
    OtherBytes {
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
        /// Value that the manifest states.
        expected: Digest,
        /// Value of the bytes.
        found: Digest,
    },
    /// The record of releases cannot be used.
    #[error(
        "{} cannot be used: {problem}; restore it from a backup, or have it made anew from the \
         packages: shardpack cluster fsck NODE --rebuild", path.display()
    )]
    Record {
        /// Its path.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A release without such a rank.
    #[error("the release has {ranks} packages, and none of rank {rank}")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Its packages.
        ranks: usize,
    },
    /// A package under the key of a release that is not the release's.
    #[error(
        "package {key} was replaced: its manifest is {found}, the release's {expected}; push the \
         release's set again"
    )]
    OtherManifest {
        /// The package.
        key: PackageKey,
        /// Digest that the release states.
        expected: Digest,
        /// Digest of the stored one.
        found: Digest,
    },
    /// A package of another model than the release's.
    #[error("package {key} is of model {found}, the release of {expected}")]
    OtherModel {
        /// The package.
        key: PackageKey,
        /// The release's model.
        expected: String,
        /// The package's.
        found: String,
    },
    /// A release that does not become pending or current.
    #[error(transparent)]
    Release(#[from] ReleaseRefusal),
    /// What was stored did not survive verification.
    #[error("{count} findings in the stored package, the first: {first}; push again to repair")]
    Damaged {
        /// How many.
        count: usize,
        /// The first.
        first: String,
    },
}

impl StoreError {
    /// Wraps an error of the file system.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// The failure code that a controller receives.
    #[must_use]
    pub fn code(&self) -> FailureCode {
        match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                FailureCode::NoSpace
            }
            Self::Io { .. } | Self::Locked { .. } | Self::Record { .. } => FailureCode::Storage,
            Self::NoSpace { .. } => FailureCode::NoSpace,
            Self::Busy { .. } => FailureCode::Busy,
            Self::Unknown { .. } | Self::NotUnderWay { .. } | Self::NoSuchChunk { .. } => {
                FailureCode::Unknown
            }
            Self::NoSuchRank { .. }
            | Self::WrongBytes { .. }
            | Self::OtherBytes { .. }
            | Self::OtherManifest { .. }
            | Self::OtherModel { .. }
            | Self::Release(_) => FailureCode::Refused,
            Self::Unusable { .. } | Self::Damaged { .. } | Self::DamagedChunk { .. } => {
                FailureCode::Damaged
            }
        }
    }
}

/// A prepared package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackageDir {
    /// Its name.
    pub key: PackageKey,
    /// Its directory.
    pub path: PathBuf,
}

impl PackageDir {
    /// Reads and checks its manifest; the other files are taken on trust.
    pub fn read_manifest(&self) -> Result<Manifest, StoreError> {
        let unusable = |problem: String| StoreError::Unusable { key: self.key, problem };
        let bytes = read_document(&self.path.join(MANIFEST_FILE), MAX_MANIFEST_BYTES)
            .map_err(|problem| unusable(problem.to_string()))?;
        Manifest::parse(&bytes).map_err(|error| unusable(error.to_string()))
    }
}

/// The directory of a node's packages, held by one process at a time.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    /// Free bytes that are left.
    pub(super) reserve_bytes: u64,
    /// Locked as long as it is open; the system unlocks it when the process dies.
    _lock: File,
    /// Packages that a push is filling.
    busy: Mutex<BTreeSet<PackageKey>>,
    /// Notified when one of them is released.
    freed: Condvar,
    /// Packages that further streams may join.
    under_way: Mutex<BTreeMap<PackageKey, Weak<Stage>>>,
    /// Held while the record of releases changes, or is relied upon.
    pub(super) record: Mutex<()>,
    /// Packages that run or are being read.
    pub(super) in_use: Mutex<Uses>,
    /// Held while packages are removed.
    pub(super) removal: Mutex<()>,
}

impl Store {
    /// Opens the store in `root`, which is made if it is not there.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        for directory in ["packages", "staging"] {
            let path = root.join(directory);
            fs::create_dir_all(&path).map_err(StoreError::io("make", &path))?;
        }
        let path = root.join("lock");
        let lock = File::create(&path).map_err(StoreError::io("open", &path))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(LOCK_PAUSE);
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(StoreError::Locked { path: root.to_owned() });
                }
                Err(TryLockError::Error(error)) => {
                    return Err(StoreError::io("lock", &path)(error));
                }
            }
        }
        Ok(Self {
            root: root.to_owned(),
            reserve_bytes: RESERVE_BYTES,
            _lock: lock,
            busy: Mutex::default(),
            freed: Condvar::new(),
            under_way: Mutex::default(),
            record: Mutex::default(),
            in_use: Mutex::default(),
            removal: Mutex::default(),
        })
    }

    /// Leaves this many bytes of the disk free, in place of 256 MiB.
    #[must_use]
    pub fn with_reserve(self, reserve_bytes: u64) -> Self {
        Self { reserve_bytes, ..self }
    }

    /// A prepared package.
    pub fn package(&self, key: PackageKey) -> Result<PackageDir, StoreError> {
        let path = self.package_path(key);
        if path.is_dir() { Ok(PackageDir { key, path }) } else { Err(StoreError::Unknown { key }) }
    }

    /// All prepared packages, sorted.
    pub fn packages(&self) -> Result<Vec<PackageDir>, StoreError> {
        let directory = self.root.join("packages");
        let unreadable = || StoreError::io("read", &directory);
        let mut packages = Vec::new();
        for entry in fs::read_dir(&directory).map_err(unreadable())? {
            let entry = entry.map_err(unreadable())?;
            // Whatever else lies here is not ours.
            if let Ok(key) = entry.file_name().to_string_lossy().parse() {
                packages.push(PackageDir { key, path: entry.path() });
            }
        }
        packages.sort_unstable_by_key(|package| package.key);
        Ok(packages)
    }

    /// Free bytes of the disk, for a user without privileges.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let free = rustix::fs::statvfs(&self.root)
            .map_err(|error| StoreError::io("measure", &self.root)(error.into()))?;
        Ok(free.f_bavail.saturating_mul(free.f_frsize))
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn package_path(&self, key: PackageKey) -> PathBuf {
        self.root.join("packages").join(key.to_string())
    }

    pub(super) fn staging_path(&self, key: PackageKey) -> PathBuf {
        self.root.join("staging").join(key.to_string())
    }

    /// Lets further streams of a push find it, as long as it lasts.
    pub(super) fn begin(&self, key: PackageKey, stage: &Arc<Stage>) {
        let mut all = locked(&self.under_way);
        all.retain(|_, stage| stage.strong_count() > 0);
        all.insert(key, Arc::downgrade(stage));
    }

    /// The push of a package that is under way.
    pub(super) fn under_way(&self, key: PackageKey) -> Option<Arc<Stage>> {
        locked(&self.under_way).get(&key)?.upgrade()
    }

    /// Whether a push fills a package.
    pub(super) fn is_busy(&self, key: PackageKey) -> bool {
        locked(&self.busy).contains(&key)
    }

    /// Claims a package for one push. Waits for another one that has it: most often that is the
    /// last attempt of the same controller, which has yet to notice its own end.
    pub(super) fn claim(
        self: &Arc<Self>,
        key: PackageKey,
        timeout: Duration,
    ) -> Result<Claim, StoreError> {
        let busy = locked(&self.busy);
        let (mut busy, _) = self
            .freed
            .wait_timeout_while(busy, timeout, |busy| busy.contains(&key))
            .unwrap_or_else(PoisonError::into_inner);
        if busy.insert(key) {
            Ok(Claim { store: Arc::clone(self), key })
        } else {
            Err(StoreError::Busy { key })
        }
    }
}

/// The right to fill a package, until dropped.
#[derive(Debug)]
pub(super) struct Claim {
    store: Arc<Store>,
    key: PackageKey,
}

impl Drop for Claim {
    fn drop(&mut self) {
        locked(&self.store.busy).remove(&self.key);
        self.store.freed.notify_all();
    }
}

/// Nothing that panics leaves what is locked halfway.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
