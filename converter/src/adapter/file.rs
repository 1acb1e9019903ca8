//! The weight file of an adapter: read by position, since a large one does not fit the memory
//! budget of a conversion.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use shardpack_containers::container::{self, TensorInfo};
use shardpack_manifests::{
    ChunkHasher,
    manifest::{AdapterRecord, SourceFile},
};

use super::{AdapterError, config::Config, widen};
use crate::checkpoint::is_safetensors;

/// Bytes of one read while hashing.
const STEP_BYTES: u64 = 4 << 20;

/// Elements that are compared at a time.
const COMPARED: u64 = 1 << 20;

/// One adapter's files.
pub(crate) struct AdapterFile {
    pub(super) folder: PathBuf,
    name: &'static str,
    form: &'static str,
    pub(super) keeps_ties: bool,
    file: File,
    pub(super) size: u64,
    pub(super) modified: String,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
}

impl AdapterFile {
    /// Opens the weight file that belongs to the form of `config`.
    pub(super) fn open(folder: &Path, config: &Config) -> Result<Self, AdapterError> {
        let refuse = |problem: String| AdapterError::Refused { folder: folder.to_owned(), problem };
        let (form, name, pickle) = match config {
            Config::Peft(_) => ("peft", "adapter_model.safetensors", "adapter_model.bin"),
            Config::Mlx(_) => ("mlx", "adapters.safetensors", "adapters.npz"),
        };
        // What it holds counts, not what it is called.
        let is_named = folder.join(name).is_file() || !is_safetensors(folder, pickle);
        let name = if is_named { name } else { pickle };
        let path = folder.join(name);
        if !path.is_file() {
            let problem = if folder.join(pickle).is_file() {
                format!("{pickle} is not read; save the adapter as {name}")
            } else {
                format!("has no {name}")
            };
            return Err(refuse(problem));
        }
        let read = |source| AdapterError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        let (size, modified) = (metadata.len(), format!("{:?}", metadata.modified().ok()));
        let mut start = vec![0; size.min(8) as usize];
        file.read_exact_at(&mut start, 0).map_err(read)?;
        let mut header = vec![0; container::header_bytes(&start, size) as usize];
        file.read_exact_at(&mut header, 0).map_err(read)?;
        let found = container::parse_header(&header, size)
            .map_err(|error| refuse(format!("{name}: {error}")))?;
        if let Some(other) = found.iter().find(|info| !info.dtype.is_float()) {
            let problem = format!("{:?} is stored as {}, not as floats", other.name, other.dtype);
            return Err(refuse(problem));
        }
        let tensors = found.into_iter().map(|info| (info.name.clone(), info)).collect();
        let (folder, keeps_ties) = (folder.to_owned(), config.keeps_ties());
        Ok(Self { folder, name, form, keeps_ties, file, size, modified, tensors })
    }

    /// Elements from `first` on of a tensor, widened to f32.
    pub(super) fn read(
        &self,
        tensor: &str,
        first: u64,
        out: &mut [f32],
    ) -> Result<(), AdapterError> {
        let info = &self.tensors[tensor];
        let width = info.dtype.size_bytes() as u64;
        let mut bytes = vec![0; out.len() * width as usize];
        self.read_at(&mut bytes, info.offset + first * width)?;
        widen(info.dtype, &bytes, out);
        Ok(())
    }

    /// Whether a tensor has the shape and values of another one.
    pub(super) fn is_same(
        &self,
        tensor: &str,
        (other, theirs): (&Self, &str),
    ) -> Result<bool, AdapterError> {
        let shape = &self.tensors[tensor].shape;
        if *shape != other.tensors[theirs].shape {
            return Ok(false);
        }
        let count = shape.iter().product::<u64>();
        let mut at = 0;
        while at < count {
            let len = COMPARED.min(count - at) as usize;
            let mut values = [vec![0.0; len], vec![0.0; len]];
            self.read(tensor, at, &mut values[0])?;
            other.read(theirs, at, &mut values[1])?;
            if values[0] != values[1] {
                return Ok(false);
            }
            at += len as u64;
        }
        Ok(true)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), AdapterError> {
        let read = self.file.read_exact_at(bytes, offset);
        read.map_err(|source| self.error(source))
    }

    fn error(&self, source: io::Error) -> AdapterError {
        AdapterError::Read { path: self.folder.join(self.name), source }
    }

    /// The adapter as manifests record it.
    pub(super) fn record(&self) -> Result<AdapterRecord, AdapterError> {
        let mut hasher = ChunkHasher::new();
        let mut buffer = Vec::new();
        let mut done = 0;
        while done < self.size {
            buffer.resize(STEP_BYTES.min(self.size - done) as usize, 0);
            self.read_at(&mut buffer, done)?;
            hasher.update(&buffer);
            done += buffer.len() as u64;
        }
        let config_path = self.folder.join("adapter_config.json");
        let config = std::fs::read(&config_path)
            .map_err(|source| AdapterError::Read { path: config_path.clone(), source })?;
        let of = |name: &str, size, blake3| SourceFile {
            name: name.to_owned(),
            size,
            blake3,
            sha256: None,
        };
        let mut text = ChunkHasher::new();
        text.update(&config);
        Ok(AdapterRecord {
            form: self.form.to_owned(),
            files: vec![
                of("adapter_config.json", config.len() as u64, text.finish().digest),
                of(self.name, self.size, hasher.finish().digest),
            ],
        })
    }
}
