//! Reading the documents of sets and packages, with errors for people.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use shardpack_manifests::{
    Manifest, PackageSet,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    set::{MAX_SET_BYTES, SET_FILE},
};

use crate::failure::Failure;

/// The hint for a folder that is neither a set nor a package.
const HINT: &str =
    "give a package set (a folder with set.json) or a package (a folder with manifest.json)";

/// Whether a folder is a set (and not a package, or something else).
pub(crate) fn is_set(folder: &Path) -> bool {
    folder.join(SET_FILE).is_file()
}

/// Whether a folder is a package.
pub(crate) fn is_package(folder: &Path) -> bool {
    folder.join(MANIFEST_FILE).is_file()
}

/// The document of a set.
pub(crate) fn read_set(folder: &Path) -> Result<PackageSet, Failure> {
    let path = folder.join(SET_FILE);
    let bytes = read(&path, MAX_SET_BYTES)?;
    PackageSet::parse(&bytes).map_err(|error| wrong(&path, error))
}

/// The document of a package.
pub(crate) fn read_manifest(folder: &Path) -> Result<Manifest, Failure> {
    let path = folder.join(MANIFEST_FILE);
    let bytes = read(&path, MAX_MANIFEST_BYTES)?;
    Manifest::parse(&bytes).map_err(|error| wrong(&path, error))
}

/// The name of a set, or of the one package of a one-node set, and the packages' folders in rank
/// order.
pub(crate) fn members(folder: &Path) -> Result<(Option<String>, Vec<PathBuf>), Failure> {
    if is_package(folder) && !is_set(folder) {
        let manifest = read_manifest(folder)?;
        if manifest.layout.ranks == 1 {
            return Ok((manifest.name, vec![folder.to_owned()]));
        }
    }
    let set = read_set(folder)?;
    let folders = folders(folder, &set);
    Ok((set.name, folders))
}

/// The packages' folders of a set, in rank order.
pub(crate) fn folders(set_folder: &Path, set: &PackageSet) -> Vec<PathBuf> {
    set.packages.iter().map(|package| set_folder.join(&package.directory)).collect()
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let shown = || path.display().to_string();
    let size = fs::metadata(path).map_err(|error| misplaced(path, error))?.len();
    if size > limit {
        return Err(Failure::wrong(anyhow!(
            "{}: {size} bytes, at most {limit} are read",
            path.display()
        )));
    }
    Ok(fs::read(path).with_context(shown)?)
}

/// The error for a missing document, with a hint that depends on what is there instead.
fn misplaced(path: &Path, error: io::Error) -> Failure {
    let folder = path.parent().unwrap_or(path);
    if !folder.exists() {
        return Failure::from(anyhow!("{}: no such folder", folder.display())).hint(HINT);
    }
    let failure = Failure::from(anyhow::Error::new(error).context(path.display().to_string()));
    let has = |name: &str| folder.join(name).is_file();
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    if folder.is_file() {
        let shown = parent.unwrap_or(Path::new(".")).display();
        return failure.hint(format!("give the folder that it is in: {shown}"));
    }
    if has(MANIFEST_FILE) && path.ends_with(SET_FILE) {
        return failure.hint("this is one package; give the folder of its set, which has set.json");
    }
    if has("config.json") && !has(MANIFEST_FILE) {
        let shown = folder.display();
        let convert = format!("shardpack convert {shown} -o SET");
        return failure.hint(format!("this is a model; make a package set of it first: {convert}"));
    }
    failure.hint(HINT)
}

fn wrong(path: &Path, error: impl Into<anyhow::Error>) -> Failure {
    Failure::wrong(error.into().context(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(path: &Path) -> String {
        format!("{:?}", read_set(path).unwrap_err())
    }

    #[test]
    fn what_is_there_instead_of_a_set_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "{}").unwrap();
            path
        };
        assert!(hint(&folder.path().join("nowhere")).contains("no such folder"));
        assert!(hint(file("model/config.json").parent().unwrap()).contains("convert"));
        assert!(hint(file("node-0/manifest.json").parent().unwrap()).contains("one package"));
        let given = hint(&file("set/set.json"));
        assert!(given.contains("give the folder that it is in") && given.contains("/set"));
        fs::create_dir(folder.path().join("empty")).unwrap();
        assert!(hint(&folder.path().join("empty")).contains("give a package set"));
    }
}
