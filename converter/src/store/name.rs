//! What a model is called in the store.

use std::{fs, io, path::Path};

use shardpack_manifests::Digest;

/// The ending of GGUF files, which is no part of a name.
const GGUF: &str = ".gguf";

/// Whether this is one plain name below the store. Hidden names are those of unfinished conversions.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// The name of what `origin` is called, at so many bits for so many nodes.
pub(super) fn converted(origin: &str, bits: u32, nodes: u32) -> String {
    let name = format!("{}-{bits}bit", plain(origin));
    if nodes == 1 { name } else { format!("{name}-{nodes}nodes") }
}

/// A plain name for a path or a name on the hub.
pub(super) fn plain(origin: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = origin.replace('/', "--").chars().map(plain).collect();
    name.trim_start_matches(['.', '-']).to_owned()
}

/// What a folder or file is called, without its place.
pub(super) fn of_file(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_suffix(GGUF).unwrap_or(&name).to_owned()
}

/// The same with what tells it from another one of this name, and from itself before it was
/// changed.
pub(super) fn of_local(path: &Path) -> io::Result<String> {
    let place = path.canonicalize()?;
    let marked = [place.join("config.json"), place.clone()];
    let mark = marked.iter().find(|path| path.is_file()).unwrap_or(&place);
    let changed = fs::metadata(mark)?.modified()?;
    let digest = Digest::of(format!("{} {changed:?}", place.display()).as_bytes()).to_string();
    Ok(format!("{}-{}", of_file(&place), &digest[..8]))
}
