//! A checkpoint as Hugging Face publishes it: floats in safetensors, an index, the config without
//! quantization, the tokenizer's files.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use rayon::prelude::*;
use serde_json::{Value, json};
use shardpack_containers::container::{TensorInfo, header_for};
use shardpack_formats::normalise::View;
use shardpack_manifests::manifest::MatrixFormat;
use shardpack_quantize::{
    AffineFormat, Dtype,
    dequantize::{Floats, Quantized, float_groups, plain},
};

use super::{
    ExportError,
    published::{Form, Target, targets},
};
use crate::{
    convert::documents::pretty,
    package::{WriteError, at, sync_directory, write_small},
    plan::{BLOCK_BYTES, Plan, TensorConversion},
    reshard::{ReshardEvent, ReshardObserver, share_memory},
    unsharded::{Scratch, UnshardedModel},
};

/// A file is closed before it grows beyond this, as transformers does.
const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// One file of the checkpoint.
struct ModelFile {
    path: PathBuf,
    name: String,
    file: File,
    /// Its tensors with their writers.
    tensors: Vec<TensorInfo>,
}

/// Writes one tensor of a model file.
struct TensorWriter<'a> {
    file: &'a ModelFile,
    info: &'a TensorInfo,
}

impl TensorWriter<'_> {
    fn write(&self, bytes: &[u8], at_byte: u64) -> Result<(), WriteError> {
        assert!(at_byte + bytes.len() as u64 <= self.info.size, "within {}", self.info.name);
        at(&self.file.path, self.file.file.write_all_at(bytes, self.info.offset + at_byte))
    }
}

/// What one thread does at a time.
enum Job<'a> {
    /// Rows of a logical tensor as they come, to where each stands.
    Move(usize, &'a Form),
    /// A tensor of the checkpoint, matrix by matrix.
    Assemble(usize),
}

/// All that threads share.
struct Work<'a> {
    model: &'a UnshardedModel,
    plan: &'a Plan,
    targets: &'a [Target],
    forms: &'a [Form],
    writers: Vec<TensorWriter<'a>>,
    observe: ReshardObserver<'a>,
}

/// Writes the checkpoint into a directory; returns how many tensors it has.
pub(super) fn write(
    model: &UnshardedModel,
    plan: &Plan,
    dtype: Dtype,
    directory: &Path,
    observe: ReshardObserver,
) -> Result<usize, ExportError> {
    observe(ReshardEvent::Planned { size_bytes: model.size_bytes() });
    let (targets, forms) = targets(&plan.steps, dtype);
    let files = create(&targets, directory)?;
    let writers = files
        .iter()
        .flat_map(|file| file.tensors.iter().map(move |info| TensorWriter { file, info }));
    let writers = writers.collect();
    let work = Work { model, plan, targets: &targets, forms: &forms, writers, observe };
    let jobs = work.jobs();
    let workers = share_memory(model, plan).min(work.assemblers());
    let next = AtomicUsize::new(0);
    let results = rayon::broadcast(|context| {
        let mut buffers = Buffers::default();
        while context.index() < workers {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else { break };
            if let Err(error) = work.run(job, &mut buffers) {
                // The others stop at the end of the list.
                next.store(jobs.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    });
    results.into_iter().collect::<Result<(), ExportError>>()?;
    observe(ReshardEvent::Hashing);
    files.par_iter().try_for_each(|file| at(&file.path, file.file.sync_all()))?;
    write_documents(model, dtype, &files, directory)?;
    sync_directory(directory)?;
    Ok(targets.len())
}

/// Distributes the tensors over files, in their order, and writes the files' headers.
fn create(targets: &[Target], directory: &Path) -> Result<Vec<ModelFile>, WriteError> {
    let mut parts: Vec<Vec<TensorInfo>> = Vec::new();
    let mut filled = 0;
    for Target { name, shape, dtype, .. } in targets {
        let size = shape.iter().product::<u64>() * dtype.size_bytes() as u64;
        if parts.is_empty() || filled + size > MAX_FILE_BYTES {
            parts.push(Vec::new());
            filled = 0;
        }
        filled += size;
        let (name, shape) = (name.clone(), shape.clone());
        let info = TensorInfo { name, dtype: *dtype, shape, offset: 0, size };
        parts.last_mut().expect("a file was begun above").push(info);
    }
    let total = parts.len();
    let name = |index: usize| match total {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{total:05}.safetensors", index + 1),
    };
    parts
        .into_iter()
        .enumerate()
        .map(|(index, tensors)| create_file(directory, name(index), tensors))
        .collect()
}

fn create_file(
    directory: &Path,
    name: String,
    mut tensors: Vec<TensorInfo>,
) -> Result<ModelFile, WriteError> {
    let header = header_for("pt", &tensors);
    let mut offset = header.len() as u64;
    for info in &mut tensors {
        info.offset = offset;
        offset += info.size;
    }
    let path = directory.join(&name);
    let file = at(&path, File::create_new(&path))?;
    at(&path, file.set_len(offset).and_then(|()| file.write_all_at(&header, 0)))?;
    Ok(ModelFile { path, name, file, tensors })
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    parts: [Vec<u8>; 3],
    scratch: Scratch,
    floats: Floats,
    out: Vec<u8>,
    matrix: Vec<u8>,
}

impl Work<'_> {
    /// Every element once: tensors that are put together, and steps whose targets are not.
    fn jobs(&self) -> Vec<Job<'_>> {
        let is_moved = |form: &&Form| !self.targets[form.targets[0]].assembled;
        let moved = self.forms.iter().enumerate().filter(|(_, form)| is_moved(form));
        let assembled = (0..self.targets.len()).filter(|target| self.targets[*target].assembled);
        let moved = moved.map(|(step, form)| Job::Move(step, form));
        moved.chain(assembled.map(Job::Assemble)).collect()
    }

    /// Threads that may put tensors together at a time: each holds a matrix, and a part of it in
    /// floats and as it is written.
    fn assemblers(&self) -> usize {
        let views = self.forms.iter().filter(|form| self.targets[form.targets[0]].assembled);
        let largest = views.map(|form| form.view.rows * form.view.columns * 12).max();
        let half = self.plan.options.memory_bytes / 2;
        (half / largest.unwrap_or(1).max(1)).max(1).try_into().unwrap_or(usize::MAX)
    }

    fn run(&self, job: &Job<'_>, buffers: &mut Buffers) -> Result<(), ExportError> {
        match job {
            Job::Move(step, form) => self.move_rows(&self.plan.steps[*step], form, buffers),
            Job::Assemble(target) => self.assemble(*target, buffers),
        }
    }

    /// Writes one logical tensor, in blocks of rows.
    fn move_rows(
        &self,
        step: &TensorConversion,
        Form { view, targets }: &Form,
        buffers: &mut Buffers,
    ) -> Result<(), ExportError> {
        // A single number is a row of one.
        let rows = step.tensor.shape.first().copied().unwrap_or(1);
        let inner = step.tensor.shape.iter().skip(1).product::<u64>();
        // Counted in f32, the widest that a block becomes.
        let rows_per_block = (BLOCK_BYTES / (inner * 4).max(1)).clamp(1, rows);
        let dtype = self.targets[targets[0]].dtype;
        let row_bytes = view.columns * dtype.size_bytes() as u64;
        let mut row = 0;
        while row < rows {
            let count = rows_per_block.min(rows - row);
            self.floats(step, (row, count), dtype, buffers)?;
            let mut bytes = &buffers.out[..];
            for run in view.runs(row * inner / view.columns..(row + count) * inner / view.columns) {
                let (own, rest) = bytes.split_at((run.count * row_bytes) as usize);
                let writer = &self.writers[targets[run.source as usize]];
                writer.write(own, run.first * row_bytes)?;
                bytes = rest;
            }
            assert!(bytes.is_empty(), "every element of {} has a writer", step.tensor.name);
            row += count;
        }
        Ok(())
    }

    /// Writes one tensor of the checkpoint, in whole matrices.
    fn assemble(&self, target: usize, buffers: &mut Buffers) -> Result<(), ExportError> {
        let Target { dtype, parts, .. } = &self.targets[target];
        let View { blocks, rows, columns, .. } = self.forms[parts[0].0].view;
        let element = dtype.size_bytes() as u64;
        let mut matrix = std::mem::take(&mut buffers.matrix);
        matrix.resize((rows * columns * element) as usize, 0);
        for block in 0..blocks {
            for (step, source) in parts {
                let (step, view) = (&self.plan.steps[*step], self.forms[*step].view);
                let size = view.result().iter().product::<u64>();
                let first = (source * blocks + block) * size;
                // Rows of the first dimension that hold the block.
                let inner = step.tensor.shape[1..].iter().product::<u64>();
                let begin = first / inner;
                let end = (first + size).div_ceil(inner);
                self.floats(step, (begin, end - begin), *dtype, buffers)?;
                let skip = ((first - begin * inner) * element) as usize;
                let bytes = &buffers.out[skip..][..(size * element) as usize];
                view.put_block(bytes, element as usize, &mut matrix);
            }
            self.writers[target].write(&matrix, block * matrix.len() as u64)?;
        }
        buffers.matrix = matrix;
        Ok(())
    }

    /// Reads rows of a logical tensor as floats of a type.
    fn floats(
        &self,
        step: &TensorConversion,
        rows: (u64, u64),
        dtype: Dtype,
        buffers: &mut Buffers,
    ) -> Result<(), ExportError> {
        let Buffers { parts, scratch, floats, out, .. } = buffers;
        let mut moved = 0;
        for (part, bytes) in step.parts.iter().zip(parts.iter_mut()) {
            self.model.rows(&part.name, rows, bytes, scratch)?;
            moved += bytes.len() as u64;
        }
        let result = match step.format {
            MatrixFormat::Plain => plain(step.parts[0].dtype, &parts[0], dtype, out),
            MatrixFormat::Affine { bits, group_size } => {
                let format = AffineFormat::new(bits, group_size);
                let format = format.expect("the packages were checked");
                let [packed, scales, biases] = &*parts;
                let parts = [&packed[..], scales, biases];
                let stored = self.plan.quantization.dtype;
                Quantized { format, dtype: stored, parts }.dequantize(dtype, out, floats)
            }
            MatrixFormat::Float(format) => {
                float_groups(format, [&parts[0], &parts[1]], dtype, out, floats)
            }
        };
        result.map_err(|problem| ExportError::Weight {
            tensor: step.tensor.name.clone(),
            problem: format!("from row {} on, {problem}", rows.0),
        })?;
        (self.observe)(ReshardEvent::Moved { size_bytes: moved });
        Ok(())
    }
}

fn write_documents(
    model: &UnshardedModel,
    dtype: Dtype,
    files: &[ModelFile],
    directory: &Path,
) -> Result<(), ExportError> {
    for (name, bytes) in model.texts.iter().filter(|(name, _)| *name != "config.json") {
        write_small(directory, name, bytes)?;
    }
    let config = pretty(&config(&model.config, dtype))?;
    write_small(directory, "config.json", config.as_bytes())?;
    if files.len() > 1 {
        let all =
            || files.iter().flat_map(|file| file.tensors.iter().map(move |info| (file, info)));
        let total: u64 = all().map(|(_, info)| info.size).sum();
        let map: BTreeMap<&str, &str> =
            all().map(|(file, info)| (info.name.as_str(), file.name.as_str())).collect();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let text = format!("{index:#}\n");
        write_small(directory, "model.safetensors.index.json", text.as_bytes())?;
    }
    Ok(())
}

/// The configuration, which states the type of the weights as the source does: in the older key,
/// the newer one, or both.
fn config(config: &Value, dtype: Dtype) -> BTreeMap<String, Value> {
    let name = match dtype {
        Dtype::F16 => "float16",
        Dtype::F32 => "float32",
        _ => "bfloat16",
    };
    let mut config: BTreeMap<String, Value> =
        config.as_object().into_iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
    if config.contains_key("dtype") {
        config.insert("dtype".to_owned(), name.into());
    }
    if config.contains_key("torch_dtype") || !config.contains_key("dtype") {
        config.insert("torch_dtype".to_owned(), name.into());
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_stands_in_the_keys_that_the_source_uses() {
        let check = |source: Value, expected: Value| {
            let found = serde_json::to_value(config(&source, Dtype::F16)).unwrap();
            assert_eq!(found, expected);
        };
        check(json!({}), json!({"torch_dtype": "float16"}));
        check(json!({"dtype": "bfloat16"}), json!({"dtype": "float16"}));
        check(
            json!({"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
            json!({"dtype": "float16", "torch_dtype": "float16"}),
        );
    }
}
