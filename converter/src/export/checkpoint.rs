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
use shardpack_formats::{
    AffineFormat, Dtype, StoredAs,
    container::{TensorInfo, header_for},
};
use shardpack_manifests::manifest::MatrixFormat;

use super::{
    ExportError,
    dequantize::{Floats, Quantized, plain},
};
use crate::{
    convert::documents::pretty,
    joined::{Joined, Scratch},
    package::{WriteError, at, merged, sync_directory, write_small},
    plan::{BLOCK_BYTES, Plan, Step, stacks},
    reshard::{ReshardEvent, ReshardObserver, share_memory},
};

/// A file is closed before it grows beyond this, as transformers does.
const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// One file of the checkpoint.
struct ModelFile<'a> {
    path: PathBuf,
    name: String,
    file: File,
    /// Tensors with their places.
    tensors: Vec<(&'a Step, TensorInfo)>,
    /// The same as the header lists them.
    listed: Vec<TensorInfo>,
}

/// Tensors of a file, each with how the header lists it, if that is otherwise.
type Contents<'a> = Vec<(&'a Step, TensorInfo, Option<&'a StoredAs>)>;

/// Writes the checkpoint into a directory.
pub(super) fn write(
    joined: &Joined,
    plan: &Plan,
    dtype: Dtype,
    directory: &Path,
    observe: ReshardObserver,
) -> Result<(), ExportError> {
    observe(ReshardEvent::Planned { size_bytes: joined.size_bytes() });
    let files = create(plan, dtype, directory)?;
    let tensors: Vec<(&ModelFile, &Step, &TensorInfo)> = files
        .iter()
        .flat_map(|file| file.tensors.iter().map(move |(step, info)| (file, *step, info)))
        .collect();
    let workers = share_memory(joined, plan);
    let next = AtomicUsize::new(0);
    let results = rayon::broadcast(|context| {
        let mut buffers = Buffers::default();
        while context.index() < workers {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((file, step, info)) = tensors.get(index) else { break };
            if let Err(error) = fill(joined, plan, step, (file, info), &mut buffers, observe) {
                // The others stop at the end of the list.
                next.store(tensors.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    });
    results.into_iter().collect::<Result<(), ExportError>>()?;
    observe(ReshardEvent::Hashing);
    files.par_iter().try_for_each(|file| at(&file.path, file.file.sync_all()))?;
    write_documents(joined, dtype, &files, directory)?;
    Ok(sync_directory(directory)?)
}

/// Distributes the tensors over files and writes the files' headers.
fn create<'a>(
    plan: &'a Plan,
    dtype: Dtype,
    directory: &Path,
) -> Result<Vec<ModelFile<'a>>, WriteError> {
    let mut parts: Vec<Contents<'a>> = Vec::new();
    let mut filled = 0;
    for stack in stacks(&plan.steps) {
        let planned = stack.steps.iter().map(|step| {
            let shape = step.tensor.shape.clone();
            // What the source holds in full is no less exact here.
            let exact = step.tensor.exact && step.parts[0].dtype == Dtype::F32;
            let dtype = if exact { Dtype::F32 } else { dtype };
            let size = shape.iter().product::<u64>() * dtype.size_bytes() as u64;
            let name = step.tensor.name.clone();
            (*step, TensorInfo { name, dtype, shape, offset: 0, size }, stack.stored_as)
        });
        let planned: Contents = planned.collect();
        let size: u64 = planned.iter().map(|(_, info, _)| info.size).sum();
        if parts.is_empty() || filled + size > MAX_FILE_BYTES {
            parts.push(Vec::new());
            filled = 0;
        }
        filled += size;
        parts.last_mut().expect("a file was begun above").extend(planned);
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

fn create_file<'a>(
    directory: &Path,
    name: String,
    tensors: Contents<'a>,
) -> Result<ModelFile<'a>, WriteError> {
    let listed = merged(tensors.iter().map(|(_, info, stored_as)| (info, *stored_as)));
    let header = header_for("pt", &listed);
    let mut offset = header.len() as u64;
    let place = |(step, info, _): (&'a Step, TensorInfo, _)| {
        let info = TensorInfo { offset, ..info };
        offset += info.size;
        (step, info)
    };
    let tensors = tensors.into_iter().map(place).collect();
    let path = directory.join(&name);
    let file = at(&path, File::create_new(&path))?;
    at(&path, file.set_len(offset).and_then(|()| file.write_all_at(&header, 0)))?;
    Ok(ModelFile { path, name, file, tensors, listed })
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    parts: [Vec<u8>; 3],
    scratch: Scratch,
    floats: Floats,
    out: Vec<u8>,
}

/// Writes one tensor, in blocks of rows.
fn fill(
    joined: &Joined,
    plan: &Plan,
    step: &Step,
    (file, info): (&ModelFile<'_>, &TensorInfo),
    buffers: &mut Buffers,
    observe: ReshardObserver,
) -> Result<(), ExportError> {
    let stored = plan.quantization.dtype;
    let rows = info.shape[0];
    // Counted in f32, the widest that a block becomes.
    let row_bytes = info.shape[1..].iter().product::<u64>() * 4;
    let rows_per_block = (BLOCK_BYTES / row_bytes.max(1)).clamp(1, rows);
    let (mut row, mut written) = (0, 0);
    while row < rows {
        let count = rows_per_block.min(rows - row);
        let Buffers { parts, scratch, floats, out } = buffers;
        let mut moved = 0;
        for (part, bytes) in step.parts.iter().zip(parts.iter_mut()) {
            joined.rows(&part.name, (row, count), bytes, scratch)?;
            moved += bytes.len() as u64;
        }
        let result = match step.format {
            MatrixFormat::Plain => plain(step.parts[0].dtype, &parts[0], info.dtype, out),
            MatrixFormat::Affine { bits, group_size } => {
                let format = AffineFormat::new(bits, group_size);
                let format = format.expect("the joined packages were checked");
                let [packed, scales, biases] = &*parts;
                let parts = [&packed[..], scales, biases];
                Quantized { format, dtype: stored, parts }.dequantize(info.dtype, out, floats)
            }
        };
        result.map_err(|problem| ExportError::Weight {
            tensor: info.name.clone(),
            problem: format!("from row {row} on, {problem}"),
        })?;
        at(&file.path, file.file.write_all_at(out, info.offset + written))?;
        written += out.len() as u64;
        row += count;
        observe(ReshardEvent::Moved { size_bytes: moved });
    }
    assert_eq!(written, info.size, "{} is as long as planned", info.name);
    Ok(())
}

fn write_documents(
    joined: &Joined,
    dtype: Dtype,
    files: &[ModelFile<'_>],
    directory: &Path,
) -> Result<(), ExportError> {
    for (name, bytes) in joined.texts.iter().filter(|(name, _)| *name != "config.json") {
        write_small(directory, name, bytes)?;
    }
    let config = pretty(&config(&joined.config, dtype))?;
    write_small(directory, "config.json", config.as_bytes())?;
    if files.len() > 1 {
        let all = || files.iter().flat_map(|file| file.listed.iter().map(move |info| (file, info)));
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
