//! The folder of a calibration or a distillation that is under way, beside the one that it will become.
//!
//! | file | content |
//! |---|---|
//! | `lock` | held by the process that works here |
//! | `key` | what was asked for; another request begins anew |
//! | `model/` | the model at 16 bits, if it was made here |
//! | `streams-N` | the hidden states of all sequences before layer N |
//! | `NAME.safetensors`, `NAME.json` | moments of a finished layer, and their entries of the index |
//! | `student/` | of a distillation: the model in groups |
//! | `params-N-G`, `steps.json` | of a distillation: what stage N has learned after an even or odd number of steps |
//! | `variants-T-N`, `variants-T-N.json` | with `--sensitivity T`: the hidden states of all variants before layer N, and what they are |

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use shardpack_containers::container::{self, TensorInfo};
use shardpack_engine::calibration::{Moments, Streams, float_bytes, float_bytes_mut};
use shardpack_formats::calibration::InputMoments;
use shardpack_manifests::Digest;
use shardpack_quantize::Dtype;

use super::{sensitivity::Variants, sync};
use crate::failure::Failure;

/// The folder, held by this process.
pub(in crate::commands) struct WorkFolder {
    folder: PathBuf,
    _lock: File,
}

impl WorkFolder {
    pub(in crate::commands) fn open(output: &Path, key: &str) -> Result<Self, Failure> {
        let mut folder = output.to_path_buf().into_os_string();
        folder.push(".part");
        let folder = PathBuf::from(folder);
        let shown = || folder.display().to_string();
        fs::create_dir_all(&folder).with_context(shown)?;
        let lock = File::create(folder.join("lock")).with_context(shown)?;
        if lock.try_lock().is_err() {
            return Err(anyhow!("{}: another process calibrates into it", folder.display()).into());
        }
        let path = folder.join("key");
        if fs::read_to_string(&path).is_ok_and(|found| found == key) {
            return Ok(Self { folder, _lock: lock });
        }
        for entry in fs::read_dir(&folder).with_context(shown)? {
            let path = entry.with_context(shown)?.path();
            if path.is_dir() {
                fs::remove_dir_all(&path).with_context(shown)?;
            } else if !path.ends_with("lock") {
                fs::remove_file(&path).with_context(shown)?;
            }
        }
        fs::write(&path, key).with_context(shown)?;
        Ok(Self { folder, _lock: lock })
    }

    /// Where the model at 16 bits is made.
    pub(in crate::commands) fn model(&self) -> PathBuf {
        self.folder.join("model")
    }

    /// The folder itself.
    pub(in crate::commands) fn path(&self) -> &Path {
        &self.folder
    }

    fn stream(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("streams-{layer}"))
    }

    /// Layers that an earlier run has finished.
    pub(super) fn finished(&self, layers: usize, lengths: &[usize]) -> usize {
        let bytes: u64 = lengths.iter().map(|len| *len as u64 * 4).sum();
        let is_there = |layer: &usize| {
            let entries = |layer: usize| self.folder.join(format!("layer-{layer:05}.json"));
            fs::metadata(self.stream(*layer)).is_ok_and(|file| file.len() == bytes)
                && (0..*layer).all(|layer| entries(layer).is_file())
        };
        (0..=layers).rev().find(is_there).unwrap_or(0)
    }

    /// The last layer before which all streams of so many bytes are there.
    pub(in crate::commands) fn streams_before(&self, layers: usize, bytes: u64) -> Option<usize> {
        let is_there =
            |layer: &usize| fs::metadata(self.stream(*layer)).is_ok_and(|it| it.len() == bytes);
        (0..=layers).rev().find(is_there)
    }

    /// Streams that are read before one layer and written before another; those before `layers` are
    /// never written again.
    pub(in crate::commands) fn streams(
        &self,
        from: Option<usize>,
        to: usize,
        lengths: &[usize],
    ) -> Result<FileStreams, Failure> {
        self.open_streams(from.map(|layer| self.stream(layer)), self.stream(to), lengths)
    }

    fn open_streams(
        &self,
        from: Option<PathBuf>,
        path: PathBuf,
        lengths: &[usize],
    ) -> Result<FileStreams, Failure> {
        let shown = || self.folder.display().to_string();
        let from = from.map(File::open).transpose();
        let temporary = path.with_extension("new");
        let file = BufWriter::new(File::create(&temporary).with_context(shown)?);
        Ok(FileStreams {
            from: from.with_context(shown)?,
            file,
            temporary,
            path,
            lengths: lengths.to_vec(),
        })
    }

    fn variant(&self, tokens: usize, layer: usize) -> PathBuf {
        self.folder.join(format!("variants-{tokens}-{layer}"))
    }

    /// Streams of all variants over so many tokens, read before one layer and written before another.
    pub(super) fn variant_streams(
        &self,
        tokens: usize,
        from: Option<usize>,
        to: usize,
        lengths: &[usize],
    ) -> Result<FileStreams, Failure> {
        let from = from.map(|layer| self.variant(tokens, layer));
        self.open_streams(from, self.variant(tokens, to), lengths)
    }

    /// Says what the variants before a layer are, whose streams are written.
    pub(super) fn write_variants(
        &self,
        tokens: usize,
        layer: usize,
        variants: &Variants,
    ) -> Result<(), Failure> {
        self.replace(&self.variant(tokens, layer).with_extension("json"), &variants.bytes()?)
    }

    /// Removes the variants before a finished layer.
    pub(super) fn forget_variants(&self, tokens: usize, layer: usize) -> Result<(), Failure> {
        let path = self.variant(tokens, layer);
        let shown = || path.display().to_string();
        fs::remove_file(path.with_extension("json")).with_context(shown)?;
        Ok(fs::remove_file(&path).with_context(shown)?)
    }

    /// The last layer before which an earlier run has written all variants, and these.
    pub(super) fn variants(
        &self,
        tokens: usize,
        layers: usize,
    ) -> Result<Option<(usize, Variants)>, Failure> {
        let is_there = |layer: &usize| {
            let path = self.variant(tokens, *layer);
            path.is_file() && path.with_extension("json").is_file()
        };
        let Some(layer) = (0..=layers).rev().find(is_there) else { return Ok(None) };
        let path = self.variant(tokens, layer).with_extension("json");
        Ok(Some((layer, Variants::read(&path)?)))
    }

    /// Removes the streams before a finished layer.
    pub(in crate::commands) fn forget_streams(&self, layer: usize) -> Result<(), Failure> {
        Ok(fs::remove_file(self.stream(layer))
            .with_context(|| self.folder.display().to_string())?)
    }

    /// Writes the moments of a layer, then what the index says of them.
    pub(super) fn write(&self, name: &str, moments: &[Moments]) -> Result<(), Failure> {
        let file_name = format!("{name}.safetensors");
        let path = self.folder.join(&file_name);
        let shown = || path.display().to_string();
        let entries: Vec<InputMoments> =
            moments.iter().map(|moments| entry(&file_name, moments)).collect();
        let info = |entry: &InputMoments| TensorInfo {
            name: entry.modules[0].clone(),
            dtype: Dtype::F32,
            shape: entry.shape().to_vec(),
            offset: 0,
            size: entry.shape().iter().product::<u64>() * 4,
        };
        let infos: Vec<TensorInfo> = entries.iter().map(info).collect();
        let mut file = BufWriter::new(File::create(&path).with_context(shown)?);
        file.write_all(&container::header(&infos)).with_context(shown)?;
        for moments in moments {
            for matrix in 0..moments.sums.len() {
                file.write_all(&moments.bytes(matrix)).with_context(shown)?;
            }
        }
        file.flush().with_context(shown)?;
        sync(&path)?;
        let text = serde_json::to_vec(&entries).context("entries of the index")?;
        self.replace(&self.folder.join(format!("{name}.json")), &text)
    }

    /// Writes a file whole or not at all.
    pub(in crate::commands) fn replace(&self, path: &Path, text: &[u8]) -> Result<(), Failure> {
        let shown = || self.folder.display().to_string();
        let temporary = path.with_extension("new");
        fs::write(&temporary, text).with_context(shown)?;
        sync(&temporary)?;
        Ok(fs::rename(&temporary, path).with_context(shown)?)
    }

    /// Entries of the index of all layers and the head.
    pub(super) fn entries(&self, layers: usize) -> Result<Vec<InputMoments>, Failure> {
        let names = (0..layers).map(|layer| format!("layer-{layer:05}.json"));
        let mut entries: Vec<InputMoments> = Vec::new();
        for name in names.chain(["head.json".to_owned()]) {
            let path = self.folder.join(name);
            let shown = || path.display().to_string();
            let text = fs::read(&path).with_context(shown)?;
            entries.extend(serde_json::from_slice::<Vec<InputMoments>>(&text).with_context(shown)?);
        }
        Ok(entries)
    }

    /// Gives the folder its final name, with these documents and without what is not part of it.
    pub(in crate::commands) fn publish(
        &self,
        output: &Path,
        documents: &[&str],
    ) -> Result<(), Failure> {
        let shown = || self.folder.display().to_string();
        for entry in fs::read_dir(&self.folder).with_context(shown)? {
            let path = entry.with_context(shown)?.path();
            let is_kept = documents.iter().any(|name| path.ends_with(name))
                || path.extension().is_some_and(|it| it == "safetensors");
            if path.is_dir() {
                fs::remove_dir_all(&path).with_context(shown)?;
            } else if !is_kept {
                fs::remove_file(&path).with_context(shown)?;
            }
        }
        fs::rename(&self.folder, output).with_context(shown)?;
        let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new(".")))
    }
}

fn entry(file: &str, moments: &Moments) -> InputMoments {
    let digest = |matrix| Digest::of_parallel(&moments.bytes(matrix), &|_| ()).to_string();
    InputMoments {
        file: file.to_owned(),
        modules: moments.modules.clone(),
        inputs: moments.inputs as u64,
        block: moments.block as u64,
        tokens: moments.tokens.clone(),
        blake3: (0..moments.sums.len()).map(digest).collect(),
    }
}

/// Streams in files, one sequence after the other.
pub(in crate::commands) struct FileStreams {
    from: Option<File>,
    file: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    lengths: Vec<usize>,
}

impl FileStreams {
    /// Gives what was written its name.
    pub(in crate::commands) fn finish(mut self) -> Result<(), Failure> {
        let shown = || self.path.display().to_string();
        self.file.flush().with_context(shown)?;
        sync(&self.temporary)?;
        Ok(fs::rename(&self.temporary, &self.path).with_context(shown)?)
    }
}

impl Streams for FileStreams {
    fn read(&mut self, sequence: usize) -> io::Result<Vec<f32>> {
        let file = self.from.as_ref().ok_or_else(|| io::Error::other("no streams to read"))?;
        let at: usize = self.lengths[..sequence].iter().sum();
        let mut values = vec![0.0; self.lengths[sequence]];
        file.read_exact_at(float_bytes_mut(&mut values), at as u64 * 4)?;
        Ok(values)
    }

    fn write(&mut self, _: usize, values: &[f32]) -> io::Result<()> {
        self.file.write_all(float_bytes(values))
    }
}
