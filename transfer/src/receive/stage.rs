//! A package that is being received: from the offer to a verified directory.

mod peers;

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    fs::{self, File, OpenOptions},
    io, mem,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use shardpack_manifests::{
    Digest,
    digest::chunk_range,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    verify::{Problem, TensorCheck, VerifyEvent, VerifyOptions, read_document, verify_package},
};

use super::{
    files,
    journal::Journal,
    reuse::{Donors, is_intact, read_checked},
    store::{Claim, Store, StoreError},
};
use crate::protocol::{ChunkMap, Incoming, Join, SharedMap};

pub(super) use peers::Staged;

/// Chunks between two syncs: 64 MiB are what a crash may cost, and enough that a sync's own cost
/// does not show.
const SYNC_CHUNKS: usize = 16;

/// Tensors are parts of files, whose every chunk is read.
pub(super) const VERIFY: VerifyOptions = VerifyOptions { tensors: TensorCheck::Skip };

/// Progress of a long action, in bytes.
#[derive(Default)]
pub(super) struct Meter {
    pub(super) done_bytes: AtomicU64,
    pub(super) total_bytes: AtomicU64,
    /// Whether whoever asked for the action has gone.
    pub(super) is_cancelled: AtomicBool,
}

impl Meter {
    pub(super) fn add(&self, size_bytes: u64) {
        self.done_bytes.fetch_add(size_bytes, Ordering::Relaxed);
    }

    pub(super) fn verified(&self, event: VerifyEvent) {
        match event {
            VerifyEvent::Planned { size_bytes } => {
                self.total_bytes.fetch_add(size_bytes, Ordering::Relaxed);
            }
            VerifyEvent::Read { size_bytes } => self.add(size_bytes),
        }
    }
}

/// A package that is being received, filled by all streams of a push. Dropped with the last stream.
#[derive(Debug)]
pub(super) struct Stage {
    store: Arc<Store>,
    /// Released when the package is sealed, even if a stream has yet to notice.
    claim: Mutex<Option<Claim>>,
    incoming: Box<Incoming>,
    held: SharedMap,
    /// Bytes that were taken from other packages of the node.
    pub(super) reused_bytes: u64,
    /// Invariant: files of the package change only while somebody holds this for reading and it
    /// is `Receiving`; sealing the package sets it to `Sealed` first.
    state: RwLock<StageState>,
    written: Mutex<Written>,
    /// Absent when the package is stored already. Held while chunks are made durable.
    journal: Mutex<Option<Journal>>,
    /// Whether the package was stored already when it was offered.
    was_stored: bool,
    /// Fetches from other nodes that are under way.
    relays: AtomicUsize,
}

/// Whether chunks are still accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StageState {
    Receiving,
    Sealed,
}

/// What has been written and not yet made durable.
#[derive(Debug, Default)]
struct Written {
    /// Files with such bytes; few, because each sync closes them.
    open: HashMap<u32, Arc<File>>,
    unlisted: Vec<Unlisted>,
}

/// A chunk that the journal does not list.
#[derive(Debug)]
struct Unlisted {
    file: u32,
    chunk: u32,
    /// Where its bytes went, if they are yet to be synced. Invariant: the very file that they were
    /// written to, since `open` may have been emptied meanwhile.
    opened: Option<Arc<File>>,
}

impl Stage {
    /// Prepares to store the package: resumes what was begun, takes what other packages hold,
    /// checks that the rest fits on the disk. Waits up to `timeout` for another connection to
    /// release the package.
    pub(super) fn open(
        store: &Arc<Store>,
        incoming: Box<Incoming>,
        timeout: Duration,
        meter: &Meter,
    ) -> Result<Arc<Self>, StoreError> {
        let key = incoming.key;
        let claim = store.claim(key, timeout)?;
        let mut stage = Self {
            store: Arc::clone(store),
            claim: Mutex::new(Some(claim)),
            held: SharedMap::new(ChunkMap::empty(&incoming.manifest)),
            incoming,
            reused_bytes: 0,
            state: RwLock::new(StageState::Receiving),
            written: Mutex::default(),
            journal: Mutex::new(None),
            was_stored: false,
            relays: AtomicUsize::new(0),
        };
        stage.prepare(meter)?;
        let stage = Arc::new(stage);
        store.begin(key, &stage);
        Ok(stage)
    }

    /// The package that a further stream is to carry chunks of.
    pub(super) fn find(store: &Store, join: Join) -> Result<Arc<Self>, StoreError> {
        let stage = store.under_way(join.package).filter(|stage| {
            stage.incoming.manifest_digest == join.manifest && stage.enter().is_ok()
        });
        stage.ok_or(StoreError::NotUnderWay { key: join.package })
    }

    fn prepare(&mut self, meter: &Meter) -> Result<(), StoreError> {
        let store = Arc::clone(&self.store);
        if is_prepared(&store, &self.incoming) {
            let path = store.package_path(self.incoming.key);
            let report = verify_package(&path, None, VERIFY, &|event| meter.verified(event));
            if report.is_clean() {
                let all = complete(&self.held.lock());
                *self.held.lock() = all;
                self.was_stored = true;
                return Ok(());
            }
            // Staged anew; its good chunks are reused like those of any other package.
        }
        self.resume()?;
        let donors = Donors::of(&store)?;
        self.link_files(&donors, meter)?;
        let needed_bytes = self.held.lock().missing_bytes().saturating_add(store.reserve_bytes);
        let free_bytes = store.free_bytes()?;
        if needed_bytes > free_bytes {
            return Err(StoreError::NoSpace { needed_bytes, free_bytes });
        }
        self.size_files()?;
        self.copy_chunks(&donors, meter)
    }

    /// What [`Self::open`] would find, according to the manifests: the chunks held and the bytes
    /// among them that other packages hold. Changes nothing.
    pub(super) fn ask(store: &Store, incoming: &Incoming) -> Result<(ChunkMap, u64), StoreError> {
        let mut held = ChunkMap::empty(&incoming.manifest);
        if is_prepared(store, incoming) {
            return Ok((complete(&held), 0));
        }
        let path = store.staging_path(incoming.key).join("journal");
        let listed = Journal::read(&path, incoming.manifest_digest)
            .map_err(StoreError::io("read", &path))?;
        for (file, chunk) in listed.unwrap_or_default() {
            if held.exists(file, chunk) {
                held.insert(file, chunk);
            }
        }
        let donors = Donors::of(store)?;
        let mut reused_bytes = 0;
        for (file, chunk, size_bytes) in held.clone().missing() {
            let entry = &incoming.manifest.files[file as usize];
            if donors.file(entry).is_some() || donors.claims_chunk(entry, chunk) {
                held.insert(file, chunk);
                reused_bytes += size_bytes;
            }
        }
        Ok((held, reused_bytes))
    }

    /// Chunks that are held.
    pub(super) fn held(&self) -> &SharedMap {
        &self.held
    }

    /// What was offered.
    pub(super) fn incoming(&self) -> &Incoming {
        &self.incoming
    }

    /// Keeps the package from being sealed, unless it has been.
    fn enter(&self) -> Result<RwLockReadGuard<'_, StageState>, StoreError> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let key = self.incoming.key;
        if *state == StageState::Receiving {
            Ok(state)
        } else {
            Err(StoreError::NotUnderWay { key })
        }
    }

    /// Writes a chunk that has been verified.
    pub(super) fn write(
        &self,
        file: u32,
        chunk: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        self.put(file, chunk, |opened| opened.write_all_at(bytes, offset))
    }

    /// Lets `write` put a chunk into its file.
    fn put(
        &self,
        file: u32,
        chunk: u32,
        write: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let _open = self.enter()?;
        let path = self.file_path(file);
        let opened = match lock(&self.written).open.entry(file) {
            Entry::Occupied(entry) => Arc::clone(entry.get()),
            Entry::Vacant(entry) => {
                let opened = open_alone(&path).map_err(StoreError::io("open", &path))?;
                Arc::clone(entry.insert(Arc::new(opened)))
            }
        };
        write(&opened).map_err(StoreError::io("write", &path))?;
        self.held.lock().insert(file, chunk);
        let unlisted = {
            let mut written = lock(&self.written);
            written.unlisted.push(Unlisted { file, chunk, opened: Some(opened) });
            written.unlisted.len()
        };
        if unlisted >= SYNC_CHUNKS { self.sync() } else { Ok(()) }
    }

    /// Makes everything written durable, then lists it.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        let mut journal = lock(&self.journal);
        let Written { unlisted, .. } = mem::take(&mut *lock(&self.written));
        let mut synced = BTreeSet::new();
        for Unlisted { file, opened, .. } in &unlisted {
            if let Some(opened) = opened.as_ref().filter(|_| synced.insert(*file)) {
                opened.sync_data().map_err(StoreError::io("sync", &self.file_path(*file)))?;
            }
        }
        let path = self.directory().join("journal");
        let listed: Vec<(u32, u32)> = unlisted.iter().map(|it| (it.file, it.chunk)).collect();
        match journal.as_mut().filter(|_| !listed.is_empty()) {
            Some(journal) => journal.append(&listed).map_err(StoreError::io("write", &path)),
            None => Ok(()),
        }
    }

    /// Verifies the whole package and moves it into the store. No chunk is accepted from then on,
    /// whatever comes of it: the controller may offer again.
    pub(super) fn seal(&self, meter: &Meter) -> Result<(), StoreError> {
        // Waits for a chunk that comes a second time on another stream.
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if mem::replace(&mut *state, StageState::Sealed) == StageState::Sealed {
            return Err(StoreError::NotUnderWay { key: self.incoming.key });
        }
        drop(state);
        let _claim = lock(&self.claim).take();
        if lock(&self.journal).is_none() {
            return Ok(());
        }
        self.sync()?;
        let package = self.package();
        let documents = [
            (MANIFEST_FILE, &self.incoming.manifest_bytes),
            ("model.sig", &self.incoming.signature),
        ];
        for (name, bytes) in documents.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let path = package.join(name);
            files::write_durably(&path, bytes).map_err(StoreError::io("write", &path))?;
        }
        let expected = Some(self.incoming.manifest_digest);
        let report = verify_package(&package, expected, VERIFY, &|event| meter.verified(event));
        if let Some(first) = report.findings.first() {
            let damaged =
                StoreError::Damaged { count: report.findings.len(), first: first.to_string() };
            for finding in &report.findings {
                self.forget(&finding.problem);
            }
            self.begin_journal()?;
            return Err(damaged);
        }
        let target = self.store.package_path(self.incoming.key);
        let replaced = self.directory().join("replaced");
        files::remove_directory(&replaced).map_err(StoreError::io("remove", &replaced))?;
        if target.exists() {
            // Another package under the same key, or a damaged one: out of the way first. A crash
            // between the two renames leaves the new one staged and complete.
            files::rename(&target, &replaced).map_err(StoreError::io("move", &target))?;
        }
        files::rename(&package, &target).map_err(StoreError::io("move", &package))?;
        let parent = target.parent().unwrap_or(&target);
        files::sync_directory(parent).map_err(StoreError::io("sync", parent))?;
        *lock(&self.journal) = None;
        let directory = self.directory();
        files::remove_directory(&directory).map_err(StoreError::io("remove", &directory))
    }

    /// Takes up what an earlier connection left, or begins anew.
    fn resume(&mut self) -> Result<(), StoreError> {
        let (directory, package) = (self.directory(), self.package());
        let path = directory.join("journal");
        let listed = Journal::read(&path, self.incoming.manifest_digest)
            .map_err(StoreError::io("read", &path))?;
        match listed {
            Some(chunks) => {
                for (file, chunk) in chunks {
                    let mut held = self.held.lock();
                    if held.exists(file, chunk) {
                        held.insert(file, chunk);
                    }
                }
            }
            // Of another package, or of none.
            None => {
                files::remove_directory(&directory)
                    .map_err(StoreError::io("remove", &directory))?;
            }
        }
        fs::create_dir_all(&package).map_err(StoreError::io("make", &package))?;
        for entry in fs::read_dir(&package).map_err(StoreError::io("read", &package))? {
            let entry = entry.map_err(StoreError::io("read", &package))?;
            let name = entry.file_name();
            if self.incoming.manifest.file(&name.to_string_lossy()).is_none() {
                // Left by an interrupted seal, or a stranger.
                let path = entry.path();
                fs::remove_file(&path).map_err(StoreError::io("remove", &path))?;
            }
        }
        for (index, entry) in self.incoming.manifest.files.iter().enumerate() {
            let metadata = package.join(&entry.name).symlink_metadata();
            if !metadata.is_ok_and(|found| found.is_file() && found.len() == entry.size) {
                self.held.lock().remove_file(index as u32);
            }
        }
        self.begin_journal()
    }

    /// Links whole files that another package holds.
    fn link_files(&mut self, donors: &Donors, meter: &Meter) -> Result<(), StoreError> {
        let missing: Vec<(u32, u32, u64)> = self.held.lock().missing().collect();
        let mut linked = false;
        for (index, entry) in self.incoming.manifest.files.iter().enumerate() {
            let lacks = |(file, ..): &&(u32, u32, u64)| *file == index as u32;
            let lacking: Vec<_> = missing.iter().filter(lacks).collect();
            let Some(donor) = donors.file(entry).filter(|_| !lacking.is_empty()) else { continue };
            meter.total_bytes.fetch_add(entry.size, Ordering::Relaxed);
            if !is_intact(donor, entry, &|size_bytes| meter.add(size_bytes)) {
                continue;
            }
            let path = self.file_path(index as u32);
            let sibling = path.with_file_name(".link.new");
            let _ = fs::remove_file(&sibling);
            // Where links are not possible, the chunks are copied below.
            if fs::hard_link(donor, &sibling).is_err() {
                continue;
            }
            files::rename(&sibling, &path).map_err(StoreError::io("link", &path))?;
            for (file, chunk, size_bytes) in lacking {
                self.held.lock().insert(*file, *chunk);
                let unlisted = Unlisted { file: *file, chunk: *chunk, opened: None };
                lock(&self.written).unlisted.push(unlisted);
                self.reused_bytes += size_bytes;
            }
            linked = true;
        }
        if linked {
            let package = self.package();
            files::sync_directory(&package).map_err(StoreError::io("sync", &package))?;
        }
        self.sync()
    }

    /// Gives every file its length, so that chunks can be written in any order.
    fn size_files(&mut self) -> Result<(), StoreError> {
        for (index, entry) in self.incoming.manifest.files.iter().enumerate() {
            let path = self.file_path(index as u32);
            let metadata = path.symlink_metadata();
            if metadata.as_ref().is_ok_and(|found| found.is_file() && found.len() == entry.size) {
                continue;
            }
            if metadata.is_ok() {
                fs::remove_file(&path).map_err(StoreError::io("remove", &path))?;
            }
            File::create_new(&path)
                .and_then(|file| file.set_len(entry.size))
                .map_err(StoreError::io("make", &path))?;
        }
        let package = self.package();
        files::sync_directory(&package).map_err(StoreError::io("sync", &package))
    }

    /// Takes single chunks that another package holds at the same offset: shares their blocks where the
    /// file system can, else copies them.
    fn copy_chunks(&mut self, donors: &Donors, meter: &Meter) -> Result<(), StoreError> {
        let missing: Vec<(u32, u32, u64)> = self.held.lock().missing().collect();
        for (file, chunk, size_bytes) in missing {
            let entry = &self.incoming.manifest.files[file as usize];
            let Some((donor, bytes)) = donors.read_chunk(entry, chunk) else { continue };
            let offset = chunk_range(entry.size, u64::from(chunk)).start;
            self.put(file, chunk, |opened| files::copy_range(&donor, opened, offset, &bytes))?;
            self.reused_bytes += size_bytes;
            meter.add(size_bytes);
        }
        self.sync()
    }

    /// Notes that what a finding names is not held.
    fn forget(&self, problem: &Problem) {
        let index_of = |name: &str| {
            let files = &self.incoming.manifest.files;
            files.iter().position(|entry| entry.name == name).map(|index| index as u32)
        };
        match problem {
            Problem::ChunkChanged { file, chunk, .. } => {
                if let Some(index) = index_of(file) {
                    self.held.lock().remove(index, *chunk as u32);
                }
            }
            Problem::Missing { file }
            | Problem::Length { file, .. }
            | Problem::NotRegular { file, .. }
            | Problem::Unreadable { file, .. } => {
                if let Some(index) = index_of(file) {
                    self.held.lock().remove_file(index);
                }
            }
            _ => {}
        }
    }

    fn begin_journal(&self) -> Result<(), StoreError> {
        let path = self.directory().join("journal");
        let journal = Journal::create(&path, self.incoming.manifest_digest, &self.held.lock());
        *lock(&self.journal) = Some(journal.map_err(StoreError::io("write", &path))?);
        Ok(())
    }

    fn directory(&self) -> PathBuf {
        self.store.staging_path(self.incoming.key)
    }

    fn package(&self) -> PathBuf {
        self.directory().join("package")
    }

    fn file_path(&self, index: u32) -> PathBuf {
        self.package().join(&self.incoming.manifest.files[index as usize].name)
    }
}

/// Nothing that panics leaves these halfway.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a file for writing that no other package shares.
fn open_alone(path: &Path) -> io::Result<File> {
    // Invariant: a prepared package is never written to, but where a chunk of it is damaged. A file that was linked from one, and
    // turned out damaged later, is copied before it is repaired.
    if path.symlink_metadata()?.nlink() > 1 {
        let sibling = path.with_file_name(".copy.new");
        fs::copy(path, &sibling)?;
        files::rename(&sibling, path)?;
    }
    OpenOptions::new().write(true).open(path)
}

/// Whether the node lists this very package.
fn is_prepared(store: &Store, incoming: &Incoming) -> bool {
    let path = store.package_path(incoming.key).join(MANIFEST_FILE);
    read_document(&path, MAX_MANIFEST_BYTES)
        .is_ok_and(|bytes| Digest::of(&bytes) == incoming.manifest_digest)
}

fn complete(held: &ChunkMap) -> ChunkMap {
    let mut all = held.clone();
    held.missing().for_each(|(file, chunk, _)| all.insert(file, chunk));
    all
}
