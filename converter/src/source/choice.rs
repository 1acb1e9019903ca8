//! Which of a folder's files hold the model, and which are second copies of it: by names as
//! transformers chooses, and by what the files hold where names say nothing.

use std::{collections::BTreeSet, path::Path};

use super::{SourceError, Weights, file_names, foreign, index_map, indexed_files};
use crate::checkpoint::{INDEX, is_safetensors};

/// The file that transformers takes before all others.
const SINGLE: &str = "model.safetensors";

/// The ending of safetensors files.
const ENDING: &str = ".safetensors";

/// Weights in the names of Mistral's own programs: a second copy of every model.
const VENDORS: &str = "consolidated";

/// Opens the weight files of a folder, and says what was left aside: `model.safetensors`; else what
/// the index names; and `model*.safetensors` beside either (published indexes are known to forget
/// some). Other `.safetensors` files (a vendor's second copy, test data) count only when there is
/// nothing else. A file whose tensors are all in those before it is a second copy.
pub(super) fn open(folder: &Path) -> Result<Weights, SourceError> {
    let present = file_names(folder)?;
    let is_container = |name: &&String| name.ends_with(ENDING);
    let containers: Vec<&String> = present.iter().filter(is_container).collect();
    let mut names = first(folder, &present)?;
    let mut usual: Vec<&String> =
        containers.iter().copied().filter(|name| name.starts_with("model")).collect();
    usual.sort_by_key(|name| rank(name));
    names.extend(usual.into_iter().cloned());
    if names.is_empty() {
        let own = |name: &&String| !name.starts_with(VENDORS);
        let mut own: Vec<&String> = containers.iter().copied().filter(own).collect();
        own.sort_by_key(|name| rank(name));
        names = own.into_iter().cloned().collect();
    }
    if names.is_empty() {
        names = present.iter().filter(|name| is_safetensors(folder, name)).cloned().collect();
    }
    if names.is_empty() {
        let problem = match foreign::describe(folder, &present) {
            Some(other) => format!("has no .safetensors files; {other}"),
            None => "has no .safetensors files".to_owned(),
        };
        return Err(SourceError::Folder { path: folder.to_owned(), problem });
    }
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let mut weights = Weights::open_first(folder, names)?;
    for name in containers.iter().filter(|name| name.starts_with(VENDORS)) {
        if weights.files.iter().all(|file| file.name != **name) {
            let what = "the vendor's second copy of the weights";
            weights.leave_aside(format!("{name} is left aside: it is {what}"));
        }
    }
    Ok(weights)
}

/// The files that come first: `model.safetensors` where it holds everything that the index names,
/// as after shards were joined; else those of the index.
fn first(folder: &Path, present: &BTreeSet<String>) -> Result<Vec<String>, SourceError> {
    let map = index_map(folder, INDEX)?;
    let is_named = map.values().any(|file| file == SINGLE);
    if present.contains(SINGLE) && !is_named {
        let single = Weights::open(folder, [SINGLE.to_owned()])?;
        if map.keys().all(|tensor| single.find(tensor).is_some()) {
            return Ok(vec![SINGLE.to_owned()]);
        }
    }
    Ok(indexed_files(folder, INDEX, present)?.into_iter().collect())
}

/// Plain names before those of variants, such as `model.fp16.safetensors`.
pub(super) fn rank(name: &str) -> (usize, &str) {
    (name.matches('.').count(), name)
}

/// The weight file that somebody has named, or the files of its index.
pub(super) fn open_named(folder: &Path, name: &str) -> Result<Weights, SourceError> {
    let map = index_map(folder, INDEX)?;
    if map.values().any(|file| file == name) {
        return open(folder);
    }
    Weights::open(folder, [name.to_owned()])
}
