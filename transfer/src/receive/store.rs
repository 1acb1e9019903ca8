//! The directory of a node's packages.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use shardpack_manifests::{
    Manifest,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    verify::read_document,
};

use super::{
    active::{Active, model_name},
    stage::Stage,
};
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
    /// The record of current packages cannot be used.
    #[error("{} cannot be used: {problem}", path.display())]
    Record {
        /// Its path.
        path: PathBuf,
        /// Why.
        problem: String,
    },
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
            Self::Unknown { .. } | Self::NotUnderWay { .. } => FailureCode::Unknown,
            Self::Unusable { .. } | Self::Damaged { .. } => FailureCode::Damaged,
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
    /// Held while the record of current packages changes.
    record: Mutex<()>,
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

    /// The current packages.
    pub fn active(&self) -> Result<Active, StoreError> {
        Active::read(&self.root.join("active.json"))
    }

    /// Makes a prepared package the current one of its model; returns the one before, which is
    /// kept. To go back, activate that one.
    pub fn activate(&self, key: PackageKey) -> Result<Option<PackageKey>, StoreError> {
        let manifest = self.package(key)?.read_manifest()?;
        let _guard = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let mut active = self.active()?;
        let previous = active.activate(model_name(&manifest), key);
        active.write(&self.root.join("active.json"))?;
        Ok(previous)
    }

    /// Free bytes of the disk, for a user without privileges.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let free = rustix::fs::statvfs(&self.root)
            .map_err(|error| StoreError::io("measure", &self.root)(error.into()))?;
        Ok(free.f_bavail.saturating_mul(free.f_frsize))
    }

    pub(super) fn package_path(&self, key: PackageKey) -> PathBuf {
        self.root.join("packages").join(key.to_string())
    }

    pub(super) fn staging_path(&self, key: PackageKey) -> PathBuf {
        self.root.join("staging").join(key.to_string())
    }

    /// Lets further streams of a push find it, as long as it lasts.
    pub(super) fn begin(&self, key: PackageKey, stage: &Arc<Stage>) {
        let mut all = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, stage| stage.strong_count() > 0);
        all.insert(key, Arc::downgrade(stage));
    }

    /// The push of a package that is under way.
    pub(super) fn under_way(&self, key: PackageKey) -> Option<Arc<Stage>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).get(&key)?.upgrade()
    }

    /// Claims a package for one push. Waits for another one that has it: most often that is the
    /// last attempt of the same controller, which has yet to notice its own end.
    pub(super) fn claim(
        self: &Arc<Self>,
        key: PackageKey,
        timeout: Duration,
    ) -> Result<Claim, StoreError> {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.store.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        self.store.freed.notify_all();
    }
}
