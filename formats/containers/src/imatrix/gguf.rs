//! The newer form: a GGUF file ([`crate::gguf`]) with `general.type` = `imatrix`.
//!
//! Keys: `imatrix.datasets` (strings), `imatrix.chunk_count` (u32), `imatrix.chunk_size` (u32).
//! Tensors, all F32: `<name>.in_sum2` `[in, matrices]` sums of squares, `<name>.counts`
//! `[1, matrices]` tokens seen, and in later files `<name>.in_sum`, which is not needed.

use std::collections::BTreeMap;

use super::{Entry, ImatrixError, MAX_ENTRIES, Raw, cursor::floats};
use crate::gguf::{self, GgufError, Kind, Tensor, Value};
use shardpack_quantize::dtype::Dtype;

/// Most names of calibration texts that are kept.
const MAX_DATASETS: usize = 64;

/// The two tensors of an entry.
#[derive(Default)]
struct Pair {
    sums: Option<Vec<f32>>,
    counts: Option<Vec<f32>>,
}

impl From<GgufError> for ImatrixError {
    fn from(error: GgufError) -> Self {
        match error {
            GgufError::Malformed { at, problem } => Self::Malformed { at, problem },
            GgufError::Tensor { tensor: entry, problem }
            | GgufError::Key { key: entry, problem } => Self::Entry { entry, problem },
            GgufError::Unread(found) => Self::Kind { found },
        }
    }
}

pub(super) fn parse(bytes: &[u8]) -> Result<Raw, ImatrixError> {
    let header = gguf::parse(bytes)?;
    let text = |key: &str| header.keys.get(key).and_then(Value::text);
    match text("general.type") {
        Some("imatrix") => {}
        kind => return Err(ImatrixError::Kind { found: kind.unwrap_or_default().to_owned() }),
    }
    let chunks = header.keys.get("imatrix.chunk_count").and_then(Value::integer);
    let datasets = match header.keys.get("imatrix.datasets") {
        Some(Value::Texts(texts)) => texts.iter().take(MAX_DATASETS).cloned().collect(),
        _ => Vec::new(),
    };
    let entries = read_entries(&header.tensors, bytes)?;
    if entries.len() as u64 > MAX_ENTRIES {
        let problem = format!("{} entries, expected at most {MAX_ENTRIES}", entries.len());
        return Err(ImatrixError::Malformed { at: 0, problem });
    }
    Ok(Raw { entries, chunks: chunks.and_then(|count| u32::try_from(count).ok()), datasets })
}

fn read_entries(tensors: &[Tensor], file: &[u8]) -> Result<Vec<Entry>, ImatrixError> {
    let mut pairs: BTreeMap<&str, Pair> = BTreeMap::new();
    for tensor in tensors {
        let (name, is_sums) = match tensor.name.rsplit_once('.') {
            Some((name, "in_sum2")) => (name, true),
            Some((name, "counts")) => (name, false),
            _ => continue,
        };
        if tensor.kind != Kind::Floats(Dtype::F32) {
            let problem = "its type is not F32".to_owned();
            return Err(ImatrixError::Entry { entry: tensor.name.clone(), problem });
        }
        let (start, end) = (tensor.offset as usize, (tensor.offset + tensor.size) as usize);
        let bytes = file.get(start..end).expect("tensors lie inside the file");
        let pair = pairs.entry(name).or_default();
        let place = if is_sums { &mut pair.sums } else { &mut pair.counts };
        *place = Some(floats(bytes));
    }
    let entries = pairs.into_iter().map(|(name, pair)| match (pair.sums, pair.counts) {
        (Some(sums), Some(counts)) => Ok(Entry { name: name.to_owned(), sums, counts }),
        (sums, _) => {
            let missing = if sums.is_none() { "in_sum2" } else { "counts" };
            let problem = format!("its tensor {missing} is missing");
            Err(ImatrixError::Entry { entry: name.to_owned(), problem })
        }
    });
    entries.collect()
}
