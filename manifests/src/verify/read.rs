//! Reads files in whole chunks on all cores and hashes them.

use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt, path::Path};

use rayon::prelude::*;

use super::{Problem, VerifyEvent, VerifyObserver};
use crate::{
    digest::{CHUNK_BYTES, Digest, chunk_range, read_chunk_value},
    manifest::{FileEntry, Manifest, TensorEntry},
};

/// What hashing came to.
#[derive(Default)]
pub(super) struct Hashed {
    pub(super) problems: Vec<Problem>,
    pub(super) chunks: u64,
    pub(super) read_bytes: u64,
}

impl Hashed {
    fn merge(mut self, other: Self) -> Self {
        self.problems.extend(other.problems);
        self.chunks += other.chunks;
        self.read_bytes += other.read_bytes;
        self
    }

    fn problem(problem: Problem) -> Self {
        Self { problems: vec![problem], ..Self::default() }
    }
}

/// Hashes every chunk of the `readable` files.
pub(super) fn hash_files(
    directory: &Path,
    manifest: &Manifest,
    readable: &[usize],
    observer: VerifyObserver,
) -> Hashed {
    let mut tensors: BTreeMap<&str, Vec<&TensorEntry>> = BTreeMap::new();
    for tensor in &manifest.tensors {
        tensors.entry(&tensor.file).or_default().push(tensor);
    }
    readable
        .par_iter()
        .map(|index| {
            let entry = &manifest.files[*index];
            let held = tensors.get(entry.name.as_str()).map_or(&[][..], Vec::as_slice);
            // Opened here and not before: a process may hold few files open at once.
            match File::open(directory.join(&entry.name)) {
                Ok(file) => hash_file(&file, entry, held, observer),
                Err(source) => {
                    Hashed::problem(Problem::Unreadable { file: entry.name.clone(), source })
                }
            }
        })
        // Sequential in the end, so that findings stand in the manifest's order.
        .collect::<Vec<_>>()
        .into_iter()
        .fold(Hashed::default(), Hashed::merge)
}

fn hash_file(
    file: &File,
    entry: &FileEntry,
    tensors: &[&TensorEntry],
    observer: VerifyObserver,
) -> Hashed {
    let hashed: Vec<Result<Option<Problem>, io::Error>> = entry
        .chunks
        .par_iter()
        .enumerate()
        .map_init(Vec::new, |buffer, (index, expected)| {
            let range = chunk_range(entry.size, index as u64);
            let read = |bytes: &mut [u8], at| file.read_exact_at(bytes, at);
            let found = read_chunk_value(read, (entry.size, index as u64), buffer)?;
            observer(VerifyEvent::Read { size_bytes: range.end - range.start });
            if found == *expected {
                return Ok(None);
            }
            Ok(Some(Problem::ChunkChanged {
                file: entry.name.clone(),
                chunk: index as u64,
                start: range.start,
                end: range.end,
                tensors: Vec::new(),
            }))
        })
        .collect();
    let mut total = Hashed::default();
    for (index, result) in hashed.into_iter().enumerate() {
        let range = chunk_range(entry.size, index as u64);
        match result {
            Ok(problem) => {
                total.problems.extend(problem);
                total.chunks += 1;
                total.read_bytes += range.end - range.start;
            }
            Err(source) => {
                total.problems.push(Problem::Unreadable { file: entry.name.clone(), source });
                // One line per file: the rest of it will say the same.
                break;
            }
        }
    }
    name_changed_tensors(file, tensors, &mut total);
    total
}

/// Says which tensors a changed chunk has damaged: those with bytes in it that do not have their
/// own digest any more. None at all means the header or the space before the data.
fn name_changed_tensors(file: &File, tensors: &[&TensorEntry], hashed: &mut Hashed) {
    let changed_chunks: Vec<(u64, u64)> = hashed
        .problems
        .iter()
        .filter_map(|problem| match problem {
            Problem::ChunkChanged { start, end, .. } => Some((*start, *end)),
            _ => None,
        })
        .collect();
    let touches = |tensor: &TensorEntry, (start, end): (u64, u64)| {
        tensor.offset < end && tensor.offset + tensor.size > start
    };
    let changed: Vec<&TensorEntry> = tensors
        .par_iter()
        .filter(|tensor| changed_chunks.iter().any(|chunk| touches(tensor, *chunk)))
        .filter(|tensor| {
            let found = hash_range(file, tensor, &mut Vec::new(), &|_| ());
            // What cannot be read is not as it should be either.
            found.map_or(true, |found| found != tensor.blake3)
        })
        .copied()
        .collect();
    for problem in &mut hashed.problems {
        if let Problem::ChunkChanged { start, end, tensors, .. } = problem {
            let touched = changed.iter().filter(|tensor| touches(tensor, (*start, *end)));
            *tensors = touched.map(|tensor| tensor.name.clone()).collect();
        }
    }
}

/// Hashes every tensor in the `readable` files.
pub(super) fn hash_tensors(
    directory: &Path,
    manifest: &Manifest,
    readable: &[usize],
    observer: VerifyObserver,
) -> Hashed {
    let names: Vec<&str> =
        readable.iter().map(|index| manifest.files[*index].name.as_str()).collect();
    manifest
        .tensors
        .par_iter()
        .filter(|tensor| names.contains(&tensor.file.as_str()))
        .map_init(Vec::new, |buffer, tensor| {
            let path = directory.join(&tensor.file);
            match File::open(path).and_then(|file| hash_range(&file, tensor, buffer, observer)) {
                Ok(found) if found == tensor.blake3 => {
                    Hashed { read_bytes: tensor.size, ..Hashed::default() }
                }
                Ok(_) => Hashed {
                    read_bytes: tensor.size,
                    ..Hashed::problem(Problem::TensorChanged {
                        file: tensor.file.clone(),
                        tensor: tensor.name.clone(),
                        start: tensor.offset,
                        end: tensor.offset + tensor.size,
                    })
                },
                Err(source) => {
                    Hashed::problem(Problem::Unreadable { file: tensor.file.clone(), source })
                }
            }
        })
        .collect::<Vec<_>>()
        .into_iter()
        .fold(Hashed::default(), Hashed::merge)
}

fn hash_range(
    file: &File,
    tensor: &TensorEntry,
    buffer: &mut Vec<u8>,
    observer: VerifyObserver,
) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut done = 0;
    while done < tensor.size {
        buffer.resize((tensor.size - done).min(CHUNK_BYTES) as usize, 0);
        file.read_exact_at(buffer, tensor.offset + done)?;
        hasher.update(buffer);
        done += buffer.len() as u64;
        observer(VerifyEvent::Read { size_bytes: buffer.len() as u64 });
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}
