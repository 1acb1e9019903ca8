//! The newer form: a GGUF file with `general.type` = `imatrix`. All integers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | `GGUF` |
//! | 4 | u32 version, 2 or 3 |
//! | 8, 8 | u64 number of tensors, u64 number of keys |
//! | … | per key: string, u32 type, value; a string is a u64 length and its bytes |
//! | … | per tensor: string, u32 dimensions, u64 each (fastest first), u32 type, u64 offset |
//! | … | zeros up to a multiple of `general.alignment` (32) |
//! | … | data; offsets count from here |
//!
//! Keys: `imatrix.datasets` (strings), `imatrix.chunk_count` (u32), `imatrix.chunk_size` (u32).
//! Tensors, all F32: `<name>.in_sum2` `[in, matrices]` sums of squares, `<name>.counts`
//! `[1, matrices]` tokens seen, and in later files `<name>.in_sum`, which is not needed.

use std::collections::BTreeMap;

use super::{
    Entry, ImatrixError, MAX_ENTRIES, Raw,
    cursor::{Cursor, floats},
};

/// First bytes of every GGUF file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// Most keys: importance files have four; what quantizers add is under a hundred.
const MAX_KEYS: u64 = 4096;
/// Longest string of a key's value.
const MAX_STRING_BYTES: u64 = 1 << 20;
/// Most names of calibration texts that are kept.
const MAX_DATASETS: usize = 64;
/// Most dimensions of a tensor in GGUF.
const MAX_DIMENSIONS: u32 = 4;
/// Where data begins unless a key says otherwise.
const DEFAULT_ALIGNMENT: u32 = 32;
/// Largest alignment that is believed: a page of the largest kind in use.
const MAX_ALIGNMENT: u32 = 2 << 20;
/// GGML's number of the type F32.
const F32: u32 = 0;
/// GGUF's numbers of the value types that are looked into.
const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// What the keys say.
#[derive(Default)]
struct Keys {
    kind: Option<String>,
    alignment: Option<u32>,
    chunks: Option<u32>,
    datasets: Vec<String>,
}

/// Where a tensor's data is.
struct TensorInfo {
    name: String,
    elements: u64,
    dtype: u32,
    offset: u64,
}

/// The two tensors of an entry.
#[derive(Default)]
struct Pair {
    sums: Option<Vec<f32>>,
    counts: Option<Vec<f32>>,
}

pub(super) fn parse(bytes: &[u8]) -> Result<Raw, ImatrixError> {
    let mut cursor = Cursor::new(bytes);
    cursor.take(MAGIC.len() as u64, "the magic")?;
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        return Err(cursor.wrong(format!("GGUF version {version}, expected 2 or 3")));
    }
    let tensors = cursor.u64("the number of tensors")?;
    let keys = cursor.u64("the number of keys")?;
    // Up to three tensors per entry.
    if tensors > 3 * MAX_ENTRIES || keys > MAX_KEYS {
        return Err(cursor.wrong(format!("{tensors} tensors and {keys} keys")));
    }
    let keys = parse_keys(&mut cursor, keys)?;
    match keys.kind {
        Some(kind) if kind == "imatrix" => {}
        kind => return Err(ImatrixError::Kind { found: kind.unwrap_or_default() }),
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        infos.push(parse_info(&mut cursor)?);
    }
    let alignment = u64::from(keys.alignment.unwrap_or(DEFAULT_ALIGNMENT));
    let data = usize::try_from(cursor.at().next_multiple_of(alignment));
    let data = data.ok().and_then(|start| bytes.get(start..)).unwrap_or_default();
    let entries = read_entries(&infos, data)?;
    Ok(Raw { entries, chunks: keys.chunks, datasets: keys.datasets })
}

fn parse_keys(cursor: &mut Cursor, count: u64) -> Result<Keys, ImatrixError> {
    let mut keys = Keys::default();
    for _ in 0..count {
        let len = cursor.u64("the length of a key")?;
        let key = cursor.name(len)?;
        let kind = cursor.u32("the type of a value")?;
        match (key.as_str(), kind) {
            ("general.type", STRING) => keys.kind = Some(parse_string(cursor)?),
            ("general.alignment", U32) => {
                let alignment = cursor.u32("the alignment")?;
                if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
                    return Err(cursor.wrong(format!("an alignment of {alignment} bytes")));
                }
                keys.alignment = Some(alignment);
            }
            ("imatrix.chunk_count", U32) => keys.chunks = Some(cursor.u32("a value")?),
            ("imatrix.datasets", ARRAY) => {
                let strings = parse_array(cursor)?;
                keys.datasets.extend(strings.into_iter().take(MAX_DATASETS));
            }
            (_, ARRAY) => drop(parse_array(cursor)?),
            (_, STRING) => drop(parse_string(cursor)?),
            (_, kind) => {
                let Some(size) = scalar_bytes(kind) else {
                    return Err(cursor.wrong(format!("key {key:?} of the unknown type {kind}")));
                };
                cursor.take(size, "a value")?;
            }
        }
    }
    Ok(keys)
}

/// An array's strings; other elements are passed over.
fn parse_array(cursor: &mut Cursor) -> Result<Vec<String>, ImatrixError> {
    let kind = cursor.u32("the type of an array")?;
    let len = cursor.u64("the length of an array")?;
    let mut strings = Vec::new();
    if kind == STRING {
        // Every string takes at least the 8 bytes of its length, so this ends with the file.
        for _ in 0..len {
            strings.push(parse_string(cursor)?);
        }
        return Ok(strings);
    }
    let size = scalar_bytes(kind).and_then(|size| size.checked_mul(len));
    match size {
        Some(size) => cursor.take(size, "an array")?,
        None => return Err(cursor.wrong(format!("an array of {len} values of type {kind}"))),
    };
    Ok(strings)
}

fn parse_string(cursor: &mut Cursor) -> Result<String, ImatrixError> {
    let len = cursor.u64("the length of a string")?;
    if len > MAX_STRING_BYTES {
        return Err(cursor.wrong(format!("a string of {len} bytes")));
    }
    Ok(String::from_utf8_lossy(cursor.take(len, "a string")?).into_owned())
}

/// Bytes of a value that is neither a string nor an array.
const fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn parse_info(cursor: &mut Cursor) -> Result<TensorInfo, ImatrixError> {
    let len = cursor.u64("the length of a tensor's name")?;
    let name = cursor.name(len)?;
    let dimensions = cursor.u32("the number of dimensions")?;
    if dimensions > MAX_DIMENSIONS {
        return Err(cursor.wrong(format!("tensor {name:?} with {dimensions} dimensions")));
    }
    let mut elements = 1_u64;
    for _ in 0..dimensions {
        let dim = cursor.u64("a dimension")?;
        elements = elements
            .checked_mul(dim)
            .ok_or_else(|| cursor.wrong(format!("tensor {name:?} has too many elements")))?;
    }
    let dtype = cursor.u32("the type of a tensor")?;
    let offset = cursor.u64("the offset of a tensor")?;
    Ok(TensorInfo { name, elements, dtype, offset })
}

fn read_entries(infos: &[TensorInfo], data: &[u8]) -> Result<Vec<Entry>, ImatrixError> {
    let mut pairs: BTreeMap<&str, Pair> = BTreeMap::new();
    // Tensors may share bytes in a file that was made to harm: what is copied out is bounded by
    // what an honest file of this size holds.
    let mut budget = data.len() as u64;
    for info in infos {
        let (name, is_sums) = match info.name.rsplit_once('.') {
            Some((name, "in_sum2")) => (name, true),
            Some((name, "counts")) => (name, false),
            _ => continue,
        };
        let wrong = |problem: &str| ImatrixError::Entry {
            entry: info.name.clone(),
            problem: problem.to_owned(),
        };
        if info.dtype != F32 {
            return Err(wrong("its type is not F32"));
        }
        let size = info.elements.checked_mul(4).ok_or_else(|| wrong("it is too large"))?;
        let end = info.offset.checked_add(size);
        let range = end.and_then(|end| {
            data.get(usize::try_from(info.offset).ok()?..usize::try_from(end).ok()?)
        });
        let bytes = range.ok_or_else(|| wrong("it does not lie inside the file"))?;
        budget =
            budget.checked_sub(size).ok_or_else(|| wrong("it shares its bytes with another"))?;
        let pair = pairs.entry(name).or_default();
        let place = if is_sums { &mut pair.sums } else { &mut pair.counts };
        if place.replace(floats(bytes)).is_some() {
            return Err(wrong("it stands in the file twice"));
        }
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
