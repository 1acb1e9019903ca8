//! A package on its way: from an offer to a verified directory.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use shardpack_manifests::{
    Digest,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    transfer::{ChunkMap, Incoming},
    verify::{Problem, TensorCheck, VerifyEvent, VerifyOptions, read_document, verify_package},
};

use super::{
    files,
    journal::Journal,
    reuse::{Donors, is_intact},
    store::{Claim, Store, StoreError},
};

/// Chunks between two syncs: 64 MiB are what a crash may cost, and enough that a sync's own cost
/// does not show.
const SYNC_CHUNKS: usize = 16;

const VERIFY: VerifyOptions = VerifyOptions { tensors: TensorCheck::Skip };

/// How far a long step has come, in bytes.
#[derive(Default)]
pub(super) struct Meter {
    pub(super) done_bytes: AtomicU64,
    pub(super) total_bytes: AtomicU64,
}

impl Meter {
    fn add(&self, size_bytes: u64) {
        self.done_bytes.fetch_add(size_bytes, Ordering::Relaxed);
    }

    fn verified(&self, event: VerifyEvent) {
        match event {
            VerifyEvent::Planned { size_bytes } => {
                self.total_bytes.fetch_add(size_bytes, Ordering::Relaxed);
            }
            VerifyEvent::Read { size_bytes } => self.add(size_bytes),
        }
    }
}

/// A package on its way.
pub(super) struct Stage<'a> {
    store: &'a Store,
    _claim: Claim<'a>,
    incoming: Box<Incoming>,
    held: ChunkMap,
    /// Bytes that were taken from other packages of the node.
    pub(super) reused_bytes: u64,
    /// Absent when the package is in its place already.
    journal: Option<Journal>,
    /// Files with bytes that are not synced; few, because each sync closes them.
    open: HashMap<u32, File>,
    /// Chunks that are written and not yet listed.
    unlisted: Vec<(u32, u32)>,
}

impl<'a> Stage<'a> {
    /// Prepares to store the package: resumes what was begun, takes what other packages hold,
    /// checks that the rest fits on the disk. Waits so long for another connection to let go.
    pub(super) fn open(
        store: &'a Store,
        incoming: Box<Incoming>,
        patience: Duration,
        meter: &Meter,
    ) -> Result<Self, StoreError> {
        let claim = store.claim(incoming.key, patience)?;
        let mut stage = Self {
            store,
            _claim: claim,
            held: ChunkMap::empty(&incoming.manifest),
            incoming,
            reused_bytes: 0,
            journal: None,
            open: HashMap::new(),
            unlisted: Vec::new(),
        };
        if is_prepared(store, &stage.incoming) {
            let path = store.package_path(stage.incoming.key);
            let report = verify_package(&path, None, VERIFY, &|event| meter.verified(event));
            if report.is_clean() {
                stage.held = complete(&stage.held);
                return Ok(stage);
            }
            // Staged anew; its good chunks are reused like those of any other package.
        }
        stage.resume()?;
        let donors = Donors::of(store)?;
        stage.link_files(&donors, meter)?;
        let needed_bytes = stage.held.missing_bytes().saturating_add(store.reserve_bytes);
        let free_bytes = store.free_bytes()?;
        if needed_bytes > free_bytes {
            return Err(StoreError::NoSpace { needed_bytes, free_bytes });
        }
        stage.size_files()?;
        stage.copy_chunks(&donors, meter)?;
        Ok(stage)
    }

    /// What [`Self::open`] would find, by the manifests' word: the chunks held and the bytes among
    /// them that other packages hold. Changes nothing.
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
    pub(super) fn held(&self) -> &ChunkMap {
        &self.held
    }

    /// Writes a chunk that has been verified.
    pub(super) fn write(
        &mut self,
        file: u32,
        chunk: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let path = self.file_path(file);
        let opened = match self.open.entry(file) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(open_alone(&path).map_err(StoreError::io("open", &path))?)
            }
        };
        opened.write_all_at(bytes, offset).map_err(StoreError::io("write", &path))?;
        self.held.insert(file, chunk);
        self.unlisted.push((file, chunk));
        if self.unlisted.len() >= SYNC_CHUNKS { self.sync() } else { Ok(()) }
    }

    /// Makes everything written durable, then lists it.
    pub(super) fn sync(&mut self) -> Result<(), StoreError> {
        for (index, file) in std::mem::take(&mut self.open) {
            file.sync_data().map_err(StoreError::io("sync", &self.file_path(index)))?;
        }
        let path = self.directory().join("journal");
        if let Some(journal) = self.journal.as_mut().filter(|_| !self.unlisted.is_empty()) {
            journal.append(&self.unlisted).map_err(StoreError::io("write", &path))?;
        }
        self.unlisted.clear();
        Ok(())
    }

    /// Verifies the whole package and moves it to its place.
    pub(super) fn seal(&mut self, meter: &Meter) -> Result<(), StoreError> {
        if self.journal.is_none() {
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
            fs::rename(&target, &replaced).map_err(StoreError::io("move", &target))?;
        }
        fs::rename(&package, &target).map_err(StoreError::io("move", &package))?;
        let parent = target.parent().unwrap_or(&target);
        files::sync_directory(parent).map_err(StoreError::io("sync", parent))?;
        self.journal = None;
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
                    if self.held.exists(file, chunk) {
                        self.held.insert(file, chunk);
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
                self.held.remove_file(index as u32);
            }
        }
        self.begin_journal()
    }

    /// Links whole files that another package holds.
    fn link_files(&mut self, donors: &Donors, meter: &Meter) -> Result<(), StoreError> {
        let missing: Vec<(u32, u32, u64)> = self.held.missing().collect();
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
            fs::rename(&sibling, &path).map_err(StoreError::io("link", &path))?;
            for (file, chunk, size_bytes) in lacking {
                self.held.insert(*file, *chunk);
                self.unlisted.push((*file, *chunk));
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

    /// Copies single chunks that another package holds at the same place.
    fn copy_chunks(&mut self, donors: &Donors, meter: &Meter) -> Result<(), StoreError> {
        for (file, chunk, size_bytes) in self.held.missing().collect::<Vec<_>>() {
            let entry = &self.incoming.manifest.files[file as usize];
            let Some(bytes) = donors.read_chunk(entry, chunk) else { continue };
            let offset = shardpack_manifests::digest::chunk_range(entry.size, u64::from(chunk));
            self.write(file, chunk, offset.start, &bytes)?;
            self.reused_bytes += size_bytes;
            meter.add(size_bytes);
        }
        self.sync()
    }

    /// Notes that what a finding names is not held.
    fn forget(&mut self, problem: &Problem) {
        let index_of = |name: &str| {
            let files = &self.incoming.manifest.files;
            files.iter().position(|entry| entry.name == name).map(|index| index as u32)
        };
        match problem {
            Problem::ChunkChanged { file, chunk, .. } => {
                if let Some(index) = index_of(file) {
                    self.held.remove(index, *chunk as u32);
                }
            }
            Problem::Missing { file }
            | Problem::Length { file, .. }
            | Problem::NotRegular { file, .. }
            | Problem::Unreadable { file, .. } => {
                if let Some(index) = index_of(file) {
                    self.held.remove_file(index);
                }
            }
            _ => {}
        }
    }

    fn begin_journal(&mut self) -> Result<(), StoreError> {
        let path = self.directory().join("journal");
        let journal = Journal::create(&path, self.incoming.manifest_digest, &self.held);
        self.journal = Some(journal.map_err(StoreError::io("write", &path))?);
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

/// Opens a file for writing that no other package shares.
fn open_alone(path: &Path) -> io::Result<File> {
    // Invariant: a prepared package is never written to. A file that was linked from one, and
    // turned out damaged later, is copied before it is repaired.
    if path.symlink_metadata()?.nlink() > 1 {
        let sibling = path.with_file_name(".copy.new");
        fs::copy(path, &sibling)?;
        fs::rename(&sibling, path)?;
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
