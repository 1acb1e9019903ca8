//! The hub's list of a repository's files.

use serde::Deserialize;
use shardpack_formats::hex;
use shardpack_http::Checksum;

/// Most files of one answer; the hub sends at most 1,000 to a page.
const MAX_ENTRIES: usize = 100_000;

/// An answer that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListingError {
    /// Not JSON of this shape.
    #[error("not the expected JSON")]
    Json(#[from] serde_json::Error),
    /// A field that makes no sense.
    #[error("{what}: {problem}")]
    Field {
        /// The file or field.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// One file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Path within the repository: plain names between single slashes.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Git's object id: the SHA-1 of the bytes behind git's header, unless `sha256` is stated. Absent where
    /// another program has left the file in the cache under its name alone.
    pub oid: Option<[u8; 20]>,
    /// SHA-256 of the bytes of a large file.
    pub sha256: Option<[u8; 32]>,
}

impl RepoFile {
    /// Its name within its folder.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// What the hub states of its bytes, where that is known.
    pub(super) fn checksum(&self) -> Option<Checksum> {
        self.sha256.map(Checksum::Sha256).or(self.oid.map(Checksum::Git))
    }

    /// Whether it is a weight file.
    pub(super) fn is_weights(&self) -> bool {
        self.path.ends_with(".safetensors")
    }
}

/// Whether this is the name of a commit.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Parses one page of a list of files; folders are left out, and files whose names cannot stand
/// below a folder of ours.
pub fn parse_tree(text: &[u8]) -> Result<Vec<RepoFile>, ListingError> {
    #[derive(Deserialize)]
    struct Lfs {
        oid: String,
        size: u64,
    }
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "type")]
        kind: String,
        path: String,
        #[serde(default)]
        size: u64,
        #[serde(default)]
        oid: String,
        #[serde(default)]
        lfs: Option<Lfs>,
    }
    let entries: Vec<Entry> = serde_json::from_slice(text)?;
    if entries.len() > MAX_ENTRIES {
        return Err(field("files", format!("more than {MAX_ENTRIES}")));
    }
    let mut files = Vec::new();
    for entry in entries {
        if entry.kind != "file" || !is_path(&entry.path) {
            continue;
        }
        let oid = fixed(&entry.oid)
            .ok_or_else(|| field(&entry.path, format!("{:?} is no object id", entry.oid)))?;
        let sha256 = match &entry.lfs {
            None => None,
            Some(lfs) if lfs.size != entry.size => {
                let problem = format!("two sizes, {} and {}", entry.size, lfs.size);
                return Err(field(&entry.path, problem));
            }
            Some(lfs) => {
                let problem = || field(&entry.path, format!("{:?} is no SHA-256", lfs.oid));
                Some(fixed(&lfs.oid).ok_or_else(problem)?)
            }
        };
        files.push(RepoFile { path: entry.path, size: entry.size, oid: Some(oid), sha256 });
    }
    Ok(files)
}

/// Plain names between single slashes: no way out of a folder.
fn is_path(path: &str) -> bool {
    let plain = |name: &str| {
        !name.is_empty()
            && name.len() <= 255
            && name != "."
            && name != ".."
            && !name.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'))
    };
    path.len() <= 1024 && path.split('/').all(plain)
}

fn fixed<const N: usize>(text: &str) -> Option<[u8; N]> {
    hex::decode(text)?.try_into().ok()
}

fn field(what: &str, problem: String) -> ListingError {
    ListingError::Field { what: what.to_owned(), problem }
}
