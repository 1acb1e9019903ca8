//! Files of `torch.save` as a source: the pickle of each is read whole, the tensors' bytes by
//! position like all others. Nothing of a pickle is run, see `shardpack_containers::pickle`.

use std::{collections::BTreeMap, path::Path};

use shardpack_containers::{
    pickle::{
        self, MAX_PICKLE_BYTES, PickleError, PickledTensor,
        zip::{self, Entry},
    },
    stored::{self, Grouped, StoredConfig},
};

use super::{
    SourceError, Weights, choice, file_names, foreign, indexed_files, weights::WeightFile,
};
use crate::checkpoint::{PICKLE_INDEX, is_pickle, is_safetensors};

/// The weight files of a folder, if it has files of `torch.save` and no `.safetensors`: those of
/// the index; else those called `pytorch_model`; else the only one.
pub(super) fn files(folder: &Path) -> Result<Option<Vec<String>>, SourceError> {
    let present = file_names(folder)?;
    if present.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(None);
    }
    let all = present.iter().filter(|name| is_pickle(name));
    let all: Vec<&String> = all.filter(|name| !is_safetensors(folder, name)).collect();
    let indexed = indexed_files(folder, PICKLE_INDEX, &present)?;
    let mut usual: Vec<&String> =
        all.iter().copied().filter(|name| name.starts_with("pytorch_model")).collect();
    usual.retain(|name| !indexed.contains(*name));
    usual.sort_by_key(|name| choice::rank(name));
    let names: Vec<String> = indexed.iter().chain(usual).cloned().collect();
    match all.as_slice() {
        [] => Ok(None),
        _ if !names.is_empty() => Ok(Some(names)),
        [only] => Ok(Some(vec![(*only).clone()])),
        [one, other, ..] => {
            let problem = format!(
                "has several files of torch.save, such as {one:?} and {other:?}, none called pytorch_model; leave those of the model"
            );
            Err(SourceError::Folder { path: folder.to_owned(), problem })
        }
    }
}

/// Opens the named files of `folder`.
pub(super) fn open(
    folder: &Path,
    names: Vec<String>,
    precision: Option<&StoredConfig>,
) -> Result<(Weights, Grouped), SourceError> {
    let mut weights = Weights::default();
    let mut tensors = Vec::new();
    for name in names {
        let file = WeightFile::open(folder, name.clone())?;
        let path = folder.join(&name);
        let mut magic = [0; 4];
        if file.size < 4 || read(&path, &file, &mut magic, 0).is_err() || magic != *b"PK\x03\x04" {
            let what = foreign::describe(folder, [&name]).unwrap_or_default();
            return Err(SourceError::Folder { path: folder.to_owned(), problem: what });
        }
        let found = open_file(&path, &file)?;
        let stored: Vec<_> = found.iter().map(|tensor| tensor.stored.clone()).collect();
        if weights.is_copy(&name, &stored) {
            continue;
        }
        weights.add_tensors(file, stored)?;
        tensors.extend(found);
    }
    if precision.is_some() {
        let problem = "has quantized weights in files of torch.save, which are read as plain floats only; convert them to safetensors first";
        let problem = problem.to_owned();
        return Err(SourceError::Folder { path: folder.to_owned(), problem });
    }
    let grouped = stored::group_pickled(&tensors)
        .map_err(|source| SourceError::Stored { path: folder.to_owned(), source })?;
    Ok((weights, grouped))
}

fn read(path: &Path, file: &WeightFile, buffer: &mut [u8], offset: u64) -> Result<(), SourceError> {
    file.read(buffer, offset).map_err(|source| SourceError::Read { path: path.to_owned(), source })
}

/// The tensors of one archive.
fn open_file(path: &Path, file: &WeightFile) -> Result<Vec<PickledTensor>, SourceError> {
    let wrong = |source| SourceError::Pickle { path: path.to_owned(), source };
    let mut tail = vec![0; file.size.min(zip::TAIL_BYTES) as usize];
    let start = file.size - tail.len() as u64;
    read(path, file, &mut tail, start)?;
    let directory = zip::find_directory(&tail, file.size).map_err(wrong)?;
    let mut bytes = vec![0; directory.size as usize];
    read(path, file, &mut bytes, directory.offset)?;
    let entries = zip::parse_directory(&bytes, directory).map_err(wrong)?;
    let pickles: Vec<&Entry> = entries.iter().filter(|entry| is_description(entry)).collect();
    let [pickle] = pickles.as_slice() else {
        let problem = format!("it has {} files data.pkl, expected one", pickles.len());
        return Err(wrong(PickleError::Archive(problem)));
    };
    if pickle.size > MAX_PICKLE_BYTES {
        let problem = format!("its pickle has {} bytes, at most {MAX_PICKLE_BYTES}", pickle.size);
        return Err(wrong(PickleError::Archive(problem)));
    }
    let root = pickle.name.strip_suffix("data.pkl").unwrap_or_default();
    let archive = Archive { path, file };
    if let Some(order) = entries.iter().find(|entry| entry.name == format!("{root}byteorder"))
        && archive.whole(order, 16)? != b"little"
    {
        let problem = "its data is not little-endian".to_owned();
        return Err(wrong(PickleError::Archive(problem)));
    }
    let saved = pickle::parse(&archive.whole(pickle, MAX_PICKLE_BYTES)?).map_err(wrong)?;
    let by_name: BTreeMap<&str, &Entry> =
        entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    let mut tensors = Vec::new();
    for saved in &saved {
        let name = format!("{root}data/{}", saved.storage);
        let entry = by_name.get(name.as_str()).ok_or_else(|| {
            let problem = format!("its storage {name:?} is missing");
            wrong(PickleError::Tensor { tensor: saved.name.clone(), problem })
        })?;
        let start = archive.start(entry)?;
        tensors.push(pickle::place(saved, start, entry.size).map_err(wrong)?);
    }
    Ok(tensors)
}

fn is_description(entry: &Entry) -> bool {
    entry.name.rsplit('/').next() == Some("data.pkl")
}

/// An open archive.
struct Archive<'a> {
    path: &'a Path,
    file: &'a WeightFile,
}

impl Archive<'_> {
    /// Where a file's bytes begin.
    fn start(&self, entry: &Entry) -> Result<u64, SourceError> {
        let wrong = |source| SourceError::Pickle { path: self.path.to_owned(), source };
        let mut local = [0; zip::LOCAL_BYTES as usize];
        if entry.offset.checked_add(zip::LOCAL_BYTES).is_none_or(|end| end > self.file.size) {
            let problem = format!("file {:?} does not lie inside it", entry.name);
            return Err(wrong(PickleError::Archive(problem)));
        }
        read(self.path, self.file, &mut local, entry.offset)?;
        zip::data_offset(entry, &local, self.file.size).map_err(wrong)
    }

    /// A file of at most `limit` bytes.
    fn whole(&self, entry: &Entry, limit: u64) -> Result<Vec<u8>, SourceError> {
        let start = self.start(entry)?;
        let mut bytes = vec![0; entry.size.min(limit) as usize];
        read(self.path, self.file, &mut bytes, start)?;
        Ok(bytes)
    }
}
