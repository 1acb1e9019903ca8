//! What is in a package's directory, before a byte of its weights is read.

use std::{
    collections::BTreeMap,
    fs::{self, File, FileType},
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use super::{Problem, TensorCheck};
use crate::{
    digest::Digest,
    ids::{self, TEXT_FILES, TextFiles},
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest},
    set::{MAX_SET_BYTES, PackageSet, SET_FILE},
};

/// Files that a package may hold beside those that its manifest lists. Names that start with a
/// dot are allowed too: file managers leave them, and nothing of ours reads them.
pub const EXTRA_FILES: &[&str] = &[MANIFEST_FILE, "model.sig"];

/// A package as its directory presents itself.
pub(super) struct Survey {
    pub(super) directory: PathBuf,
    pub(super) name: String,
    /// Absent when it cannot be used; then nothing else was looked at.
    pub(super) manifest: Option<Manifest>,
    /// Indices of the listed files that are regular files of the right length.
    pub(super) readable: Vec<usize>,
    pub(super) problems: Vec<Problem>,
}

impl Survey {
    /// Looks at the package in `directory`, which the caller chose and which may be a link.
    pub(super) fn of(directory: &Path, name: &str, expected: Option<Digest>) -> Self {
        let mut survey = Self {
            directory: directory.to_owned(),
            name: name.to_owned(),
            manifest: None,
            readable: Vec::new(),
            problems: Vec::new(),
        };
        match list(directory) {
            Ok(entries) => survey.look(&entries, expected),
            Err(problem) => survey.problems.push(problem),
        }
        survey
    }

    /// Looks at a package that a set names: a real directory beside its `set.json`.
    pub(super) fn of_member(directory: &Path, name: &str, expected: Digest) -> Self {
        match fs::symlink_metadata(directory) {
            Ok(metadata) if metadata.is_symlink() => Self {
                directory: directory.to_owned(),
                name: name.to_owned(),
                manifest: None,
                readable: Vec::new(),
                problems: vec![Problem::NotRegular { file: name.to_owned(), kind: "a link" }],
            },
            _ => Self::of(directory, name, Some(expected)),
        }
    }

    fn look(&mut self, entries: &BTreeMap<String, FileType>, expected: Option<Digest>) {
        let manifest = match self.read_manifest(expected) {
            Ok(manifest) => manifest,
            Err(problem) => return self.problems.push(problem),
        };
        for (index, entry) in manifest.files.iter().enumerate() {
            let file = entry.name.clone();
            match entries.get(&entry.name) {
                None => self.problems.push(Problem::Missing { file }),
                Some(kind) if !kind.is_file() => {
                    self.problems.push(Problem::NotRegular { file, kind: name_of(*kind) });
                }
                Some(_) => match fs::symlink_metadata(self.directory.join(&entry.name)) {
                    Ok(metadata) if metadata.len() == entry.size => self.readable.push(index),
                    Ok(metadata) => self.problems.push(Problem::Length {
                        file,
                        expected: entry.size,
                        found: metadata.len(),
                    }),
                    Err(source) => self.problems.push(Problem::Unreadable { file, source }),
                },
            }
        }
        for (name, kind) in entries {
            let file = name.clone();
            if name.starts_with('.') || manifest.file(name).is_some() {
                continue;
            }
            if !EXTRA_FILES.contains(&name.as_str()) {
                self.problems.push(Problem::Extra { file });
            } else if !kind.is_file() {
                self.problems.push(Problem::NotRegular { file, kind: name_of(*kind) });
            }
        }
        self.problems.extend(check_ids(&manifest));
        self.manifest = Some(manifest);
    }

    fn read_manifest(&self, expected: Option<Digest>) -> Result<Manifest, Problem> {
        let file = MANIFEST_FILE.to_owned();
        let bytes = read_document(&self.directory.join(MANIFEST_FILE), MAX_MANIFEST_BYTES)?;
        let found = Digest::of(&bytes);
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            return Err(Problem::ManifestDiffers { expected, found });
        }
        Manifest::parse(&bytes).map_err(|source| Problem::Document { file, source })
    }

    /// Bytes that hashing will read.
    pub(super) fn planned_bytes(&self, tensors: TensorCheck) -> u64 {
        let Some(manifest) = &self.manifest else { return 0 };
        let readable = || self.readable.iter().map(|index| &manifest.files[*index]);
        let chunks: u64 = readable().map(|file| file.size).sum();
        if tensors == TensorCheck::Skip {
            return chunks;
        }
        let names: Vec<&str> = readable().map(|file| file.name.as_str()).collect();
        let held = manifest.tensors.iter().filter(|t| names.contains(&t.file.as_str()));
        chunks + held.map(|tensor| tensor.size).sum::<u64>()
    }
}

/// Reads a document of at most `limit` bytes, which must be a regular file.
pub fn read_document(path: &Path, limit: u64) -> Result<Vec<u8>, Problem> {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match fs::symlink_metadata(path).map(|metadata| metadata.file_type()) {
        // Opening a pipe would wait for its writer.
        Ok(kind) if !kind.is_file() => {
            return Err(Problem::NotRegular { file, kind: name_of(kind) });
        }
        _ => {}
    }
    let read = || -> io::Result<(u64, Vec<u8>)> {
        let opened = File::open(path)?;
        let size_bytes = opened.metadata()?.len();
        let mut bytes = Vec::new();
        // One more than allowed, so that a file that grows meanwhile is noticed.
        opened.take(limit + 1).read_to_end(&mut bytes)?;
        Ok((size_bytes.max(bytes.len() as u64), bytes))
    };
    match read() {
        Ok((found, _)) if found > limit => Err(Problem::TooLarge { file, limit, found }),
        Ok((_, bytes)) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Problem::Missing { file }),
        Err(source) => Err(Problem::Unreadable { file, source }),
    }
}

/// Reads the document of the set in `directory`, parsed and as it is stored.
pub fn read_set(directory: &Path) -> Result<(PackageSet, Vec<u8>), Problem> {
    let bytes = read_document(&directory.join(SET_FILE), MAX_SET_BYTES)?;
    match PackageSet::parse(&bytes) {
        Ok(set) => Ok((set, bytes)),
        Err(source) => Err(Problem::Document { file: SET_FILE.to_owned(), source }),
    }
}

/// Says in what `manifest` differs from what the set says of its package of `rank`. `other` is
/// another package of the set, with which it must share the layout.
#[must_use]
pub fn check_member(
    set: &PackageSet,
    rank: u32,
    manifest: &Manifest,
    other: Option<&Manifest>,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut compare = |what, expected: String, found: String| {
        if expected != found {
            problems.push(Problem::NotOfThisSet { what, expected, found });
        }
    };
    let text = |digest: Digest| digest.to_string();
    compare("weights id", text(set.ids.weights), text(manifest.ids.weights));
    compare("model id", text(set.ids.model), text(manifest.ids.model));
    compare("layout id", text(set.ids.layout), text(manifest.ids.layout));
    compare("rank", rank.to_string(), manifest.rank.to_string());
    compare("ranks", set.packages.len().to_string(), manifest.layout.ranks.to_string());
    if let Some(entry) = set.packages.get(rank as usize) {
        let found: u64 = manifest.files.iter().map(|file| file.size).sum();
        compare("size in bytes", entry.size_bytes.to_string(), found.to_string());
    }
    if let Some(other) = other.filter(|other| other.layout != manifest.layout) {
        let ranges = |manifest: &Manifest| {
            let layout = &manifest.layout;
            if layout.stages == other.layout.stages {
                format!("{:?}", layout.axes)
            } else {
                format!("{:?}", layout.stages)
            }
        };
        compare("layout", ranges(other), ranges(manifest));
    }
    problems
}

/// Recomputes the ids that follow from the manifest alone. The weights id does not: it names the
/// unsharded tensors.
fn check_ids(manifest: &Manifest) -> Vec<Problem> {
    let digest_of = |name: &&str| manifest.file(name).map(|file| ((*name).to_owned(), file.blake3));
    let texts: TextFiles = TEXT_FILES.iter().filter_map(digest_of).collect();
    let claims = [
        ("model", ids::model_id(manifest.ids.weights, &texts), manifest.ids.model),
        ("layout", ids::layout_id(manifest.ids.model, &manifest.layout), manifest.ids.layout),
    ];
    claims
        .into_iter()
        .filter_map(|(what, expected, found)| match expected {
            Ok(expected) if expected != found => Some(Problem::WrongId { what, expected, found }),
            // Parsed from JSON without floats, so it has a canonical form or integers that no
            // writer of ours produces; those digests differ anyway.
            _ => None,
        })
        .collect()
}

/// Names in `directory` and what each is, without following links.
fn list(directory: &Path) -> Result<BTreeMap<String, FileType>, Problem> {
    let unreadable = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Problem::DirectoryMissing,
        _ => Problem::Unreadable { file: String::new(), source },
    };
    let mut entries = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let kind = entry.file_type().map_err(unreadable)?;
        entries.insert(entry.file_name().to_string_lossy().into_owned(), kind);
    }
    Ok(entries)
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_symlink() {
        "a link"
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}
