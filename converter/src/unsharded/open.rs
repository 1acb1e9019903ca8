//! Finds all packages of a set, and checks that they belong together.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use shardpack_manifests::{
    Digest, Manifest, PackageSet,
    manifest::{FileEntry, MANIFEST_FILE, MAX_MANIFEST_BYTES},
    set::{MAX_SET_BYTES, SET_FILE},
    verify::{Problem, check_member, read_document},
};

use super::{Member, SetReport, UnshardError};

/// Largest text file: the largest published `tokenizer.json` has 33 MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Largest `report.json`: a million tensors at 250 bytes.
const MAX_REPORT_BYTES: u64 = 256 << 20;

/// What follows from the weights and is written anew.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// All packages of a set, in rank order.
pub(super) struct Opened {
    pub(super) members: Vec<Member>,
    pub(super) report: Option<SetReport>,
}

pub(super) fn open(paths: &[PathBuf]) -> Result<Opened, UnshardError> {
    if let [path] = paths {
        if path.join(SET_FILE).is_file() {
            return open_set(path);
        }
        if !path.join(MANIFEST_FILE).is_file() {
            return Ok(Opened { members: arrange(subfolders(path)?)?, report: None });
        }
    }
    Ok(Opened { members: arrange(paths.to_vec())?, report: None })
}

fn open_set(folder: &Path) -> Result<Opened, UnshardError> {
    let wrong = |source| UnshardError::Package { package: folder.to_owned(), source };
    let bytes = read_document(&folder.join(SET_FILE), MAX_SET_BYTES).map_err(wrong)?;
    let set = PackageSet::parse_any_format(&bytes)
        .map_err(|source| wrong(Problem::Document { file: SET_FILE.to_owned(), source }))?;
    let directories: Vec<PathBuf> =
        set.packages.iter().map(|entry| folder.join(&entry.directory)).collect();
    let is_folder =
        |path: &PathBuf| path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    if let Some(missing) = directories.iter().find(|path| !is_folder(path)) {
        let (package, source) = (missing.clone(), Problem::DirectoryMissing);
        return Err(UnshardError::Package { package, source });
    }
    let members = arrange(directories)?;
    for (rank, (entry, member)) in set.packages.iter().zip(&members).enumerate() {
        let problem = check_member(&set, rank as u32, &member.manifest, None).into_iter().next();
        let bytes = read(&member.directory, MANIFEST_FILE, MAX_MANIFEST_BYTES)?;
        let (expected, found) = (entry.manifest, Digest::of(&bytes));
        let differs = (expected != found).then_some(Problem::ManifestDiffers { expected, found });
        if let Some(source) = differs.or(problem) {
            return Err(UnshardError::Package { package: member.directory.clone(), source });
        }
    }
    // Nothing vouches for it, and nothing but the new report is made of it.
    let report = read(folder, "report.json", MAX_REPORT_BYTES).ok();
    Ok(Opened { members, report: report.and_then(|bytes| serde_json::from_slice(&bytes).ok()) })
}

/// The packages in a folder without `set.json`, as they come back from nodes.
fn subfolders(folder: &Path) -> Result<Vec<PathBuf>, UnshardError> {
    let nothing = || UnshardError::NoPackages(folder.to_owned());
    let entries = fs::read_dir(folder).map_err(|_| nothing())?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join(MANIFEST_FILE).is_file())
        .collect();
    // The order in which a file system lists them must not decide which error is told.
    found.sort();
    if found.is_empty() { Err(nothing()) } else { Ok(found) }
}

/// Reads the manifests and puts the packages in rank order. They must be all packages of one set.
fn arrange(directories: Vec<PathBuf>) -> Result<Vec<Member>, UnshardError> {
    let mut by_rank: BTreeMap<u32, Member> = BTreeMap::new();
    for directory in directories {
        if !directory.join(MANIFEST_FILE).is_file() && !directory.is_dir() {
            return Err(UnshardError::NoPackages(directory));
        }
        let bytes = read(&directory, MANIFEST_FILE, MAX_MANIFEST_BYTES)?;
        let manifest =
            Manifest::parse_any_format(&bytes).map_err(|source| UnshardError::Package {
                package: directory.clone(),
                source: Problem::Document { file: MANIFEST_FILE.to_owned(), source },
            })?;
        if let Some(first) = by_rank.values().next() {
            belongs(first, &directory, &manifest)?;
        }
        let (rank, member) = (manifest.rank, Member { directory, manifest });
        if let Some(first) = by_rank.get(&rank) {
            let (first, second) = (first.directory.clone(), member.directory);
            return Err(UnshardError::Twice { rank, first, second });
        }
        by_rank.insert(rank, member);
    }
    let ranks = by_rank.values().next().map_or(0, |member| member.manifest.layout.ranks);
    let missing: Vec<u32> =
        // A count from outside: no more are named than a person reads.
        (0..ranks).filter(|rank| !by_rank.contains_key(rank)).take(16).collect();
    if !missing.is_empty() {
        return Err(UnshardError::Incomplete { ranks, missing });
    }
    Ok(by_rank.into_values().collect())
}

/// Packages of one set agree in everything but their own weights.
fn belongs(first: &Member, package: &Path, manifest: &Manifest) -> Result<(), UnshardError> {
    let one = &first.manifest;
    let shared =
        |manifest: &Manifest| -> Vec<FileEntry> { text_files(manifest).cloned().collect() };
    let differs = [
        ("the weights id", one.ids.weights != manifest.ids.weights),
        ("the model id", one.ids.model != manifest.ids.model),
        ("the layout id", one.ids.layout != manifest.ids.layout),
        ("the layout", one.layout != manifest.layout),
        ("the name", one.name != manifest.name),
        ("the source", one.source != manifest.source),
        ("the architecture", one.architecture != manifest.architecture),
        ("the quantization", one.quantization != manifest.quantization),
        ("a text file", shared(one) != shared(manifest)),
    ];
    match differs.iter().find(|(_, differs)| *differs) {
        Some((what, _)) => Err(UnshardError::Different {
            package: package.to_owned(),
            first: first.directory.clone(),
            what,
        }),
        None => Ok(()),
    }
}

/// Files that hold no weights and do not follow from them.
fn text_files(manifest: &Manifest) -> impl Iterator<Item = &FileEntry> {
    let mut weights: Vec<&str> =
        manifest.tensors.iter().map(|tensor| tensor.file.as_str()).collect();
    weights.sort_unstable();
    let is_text = move |file: &&FileEntry| {
        file.name != INDEX_FILE && weights.binary_search(&file.name.as_str()).is_err()
    };
    manifest.files.iter().filter(is_text)
}

/// Reads a package's text files, each as its manifest lists it.
pub(super) fn texts(member: &Member) -> Result<BTreeMap<String, Vec<u8>>, UnshardError> {
    let mut texts = BTreeMap::new();
    for entry in text_files(&member.manifest) {
        let bytes = read(&member.directory, &entry.name, MAX_TEXT_BYTES)?;
        let (file, found) = (entry.name.clone(), bytes.len() as u64);
        let problem = if found != entry.size {
            Problem::Length { file, expected: entry.size, found }
        } else if Digest::of(&bytes) != entry.blake3 {
            Problem::ChunkChanged { file, chunk: 0, start: 0, end: found, tensors: Vec::new() }
        } else {
            texts.insert(entry.name.clone(), bytes);
            continue;
        };
        return Err(UnshardError::Package { package: member.directory.clone(), source: problem });
    }
    Ok(texts)
}

fn read(directory: &Path, file: &str, limit: u64) -> Result<Vec<u8>, UnshardError> {
    read_document(&directory.join(file), limit)
        .map_err(|source| UnshardError::Package { package: directory.to_owned(), source })
}
