//! The header: everything before the data. All integers are little-endian.
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
//! The file does not say how long its header is: it is read from the front until it is whole.
//!
//! Source: `docs/gguf.md` of ggml.

use std::collections::BTreeMap;

use super::{
    GgufError, Kind, Value,
    cursor::{Cursor, Stop},
    value::{NumberKind, Numbers},
};

/// First bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Longest header that is read: that of a model with 262,000 tokens, their merges and a chat
/// template has about 20 MB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Most tensors. Models of the time when experts were separate tensors have about 47,000 for 256
/// experts in 61 layers; importance files have three for each.
const MAX_TENSORS: u64 = 3 << 17;
/// Most keys: models have under a hundred.
const MAX_KEYS: u64 = 4096;
/// Longest name of a key or a tensor: llama.cpp's own limits are 64 and 65,535.
const MAX_NAME_BYTES: u64 = 256;
/// Longest string of a value: some files carry a whole `tokenizer.json` in one.
const MAX_STRING_BYTES: u64 = 64 << 20;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;
/// Where data begins unless a key says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment that is believed: a page of the largest kind in use.
const MAX_ALIGNMENT: i64 = 2 << 20;

/// The format's numbers of the value types that are no numbers.
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Keys and their values.
    pub keys: BTreeMap<String, Value>,
    /// Tensors as they are listed. They lie inside the file and share no bytes.
    pub tensors: Vec<Tensor>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// llama.cpp's name for it.
    pub name: String,
    /// How it is stored.
    pub kind: Kind,
    /// Shape, last dimension contiguous and a multiple of the kind's block.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// Parses a whole file.
pub fn parse(file: &[u8]) -> Result<Header, GgufError> {
    let size = file.len() as u64;
    match parse_header(&mut Cursor::new(file, size), size) {
        Ok(header) => Ok(header),
        Err(Stop::Wrong(error)) => Err(error),
        Err(Stop::More(_)) => unreachable!("nothing is needed beyond a whole file"),
    }
}

/// Parses the header of a file of `size` bytes by its first bytes. `Err(Ok(bytes))`: at least so
/// many bytes of the file are needed.
pub fn parse_start(start: &[u8], size: u64) -> Result<Header, Result<u64, GgufError>> {
    match parse_header(&mut Cursor::new(start, size), size) {
        Ok(header) => Ok(header),
        Err(Stop::More(needed)) if needed <= MAX_HEADER_BYTES => Err(Ok(needed)),
        Err(Stop::More(_)) => Err(Err(GgufError::Malformed {
            at: start.len() as u64,
            problem: format!("its header is longer than {MAX_HEADER_BYTES} bytes"),
        })),
        Err(Stop::Wrong(error)) => Err(Err(error)),
    }
}

fn parse_header(cursor: &mut Cursor, size: u64) -> Result<Header, Stop> {
    if cursor.take(MAGIC.len() as u64, "the magic")? != MAGIC {
        return Err(cursor.wrong("it does not begin with GGUF"));
    }
    let version = cursor.u32("the version")?;
    if matches!(version.swap_bytes(), 1..=3) {
        return Err(cursor.wrong(
            "the file is big-endian, little-endian is read; turn it with gguf-convert-endian of the Python package gguf (`gguf-convert-endian FILE little`), or take the little-endian file",
        ));
    }
    if !matches!(version, 2 | 3) {
        return Err(cursor.wrong(format!("GGUF version {version}, expected 2 or 3")));
    }
    let tensors = cursor.u64("the number of tensors")?;
    let keys = cursor.u64("the number of keys")?;
    if tensors > MAX_TENSORS || keys > MAX_KEYS {
        return Err(cursor.wrong(format!(
            "{tensors} tensors and {keys} keys, at most {MAX_TENSORS} and {MAX_KEYS} are read"
        )));
    }
    let keys = parse_keys(cursor, keys)?;
    let alignment = match keys.get("general.alignment").map(Value::integer) {
        None => DEFAULT_ALIGNMENT,
        Some(Some(value @ 1..=MAX_ALIGNMENT)) if value.count_ones() == 1 => value as u64,
        Some(value) => {
            let value = value.map_or_else(|| "no number".to_owned(), |value| value.to_string());
            return Err(cursor.wrong(format!("an alignment of {value} bytes")));
        }
    };
    let mut infos = Vec::new();
    for _ in 0..tensors {
        infos.push(parse_tensor(cursor)?);
    }
    let data = cursor.at().next_multiple_of(alignment);
    for tensor in &mut infos {
        let start = tensor.offset.checked_add(data);
        let end = start.and_then(|start| start.checked_add(tensor.size));
        match (start, end) {
            (Some(start), Some(end)) if end <= size => tensor.offset = start,
            _ => return Err(wrong(&tensor.name, "it does not lie inside the file").into()),
        }
    }
    check_apart(&infos)?;
    Ok(Header { keys, tensors: infos })
}

fn wrong(tensor: &str, problem: impl Into<String>) -> GgufError {
    GgufError::Tensor { tensor: tensor.to_owned(), problem: problem.into() }
}

/// Names are there once, and no two tensors have bytes in common: what is read out of a file is
/// never more than the file.
fn check_apart(tensors: &[Tensor]) -> Result<(), GgufError> {
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| &tensor.name);
    for pair in order.windows(2) {
        if pair[0].name == pair[1].name {
            return Err(wrong(&pair[1].name, "it stands in the file twice"));
        }
    }
    // Of those that begin together the first one listed stays first.
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].size > pair[1].offset {
            return Err(wrong(&pair[1].name, "it shares its bytes with another"));
        }
    }
    Ok(())
}

fn parse_keys(cursor: &mut Cursor, count: u64) -> Result<BTreeMap<String, Value>, Stop> {
    let mut keys = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.text(MAX_NAME_BYTES, "a key")?.to_owned();
        let kind = cursor.u32("the type of a value")?;
        let value = parse_value(cursor, &key, kind)?;
        if keys.contains_key(&key) {
            return Err(cursor.wrong(format!("key {key:?} is there twice")));
        }
        keys.insert(key, value);
    }
    Ok(keys)
}

fn parse_value(cursor: &mut Cursor, key: &str, kind: u32) -> Result<Value, Stop> {
    match kind {
        STRING => Ok(Value::Text(cursor.text(MAX_STRING_BYTES, "a string")?.to_owned())),
        ARRAY => parse_array(cursor, key),
        kind => {
            let Some(kind) = NumberKind::from_id(kind) else {
                return Err(cursor.wrong(format!("key {key:?} of the unknown type {kind}")));
            };
            let bytes = cursor.take(kind.size_bytes(), "a value")?.to_vec();
            Ok(Value::Number(Numbers { kind, bytes }))
        }
    }
}

fn parse_array(cursor: &mut Cursor, key: &str) -> Result<Value, Stop> {
    let kind = cursor.u32("the type of an array")?;
    let len = cursor.u64("the length of an array")?;
    if kind == STRING {
        // Every string takes at least the 8 bytes of its length, so this ends with the file.
        let mut texts = Vec::new();
        for _ in 0..len {
            texts.push(cursor.text(MAX_STRING_BYTES, "a string")?.to_owned());
        }
        return Ok(Value::Texts(texts));
    }
    let number = NumberKind::from_id(kind);
    let size = number.and_then(|kind| kind.size_bytes().checked_mul(len));
    match (number, size) {
        (Some(kind), Some(size)) => {
            let bytes = cursor.take(size, "an array")?.to_vec();
            Ok(Value::Numbers(Numbers { kind, bytes }))
        }
        _ => Err(cursor.wrong(format!("key {key:?}: an array of {len} values of type {kind}"))),
    }
}

/// A tensor whose offset counts from the data.
fn parse_tensor(cursor: &mut Cursor) -> Result<Tensor, Stop> {
    let name = cursor.text(MAX_NAME_BYTES, "a tensor's name")?.to_owned();
    let dimensions = cursor.u32("the number of dimensions")?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        let problem = format!("{dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}");
        return Err(wrong(&name, problem).into());
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(cursor.u64("a dimension")?);
    }
    // The file has the fastest dimension first.
    shape.reverse();
    let elements = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
    let elements = elements.ok_or_else(|| wrong(&name, "it has too many elements"))?;
    let id = cursor.u32("the type of a tensor")?;
    let offset = cursor.u64("the offset of a tensor")?;
    let kind = Kind::from_id(id).map_err(|kind| {
        wrong(&name, format!("it is stored as {kind}, which is not read; take a file in F16, BF16, Q8_0 or K-quants"))
    })?;
    if elements == 0 {
        return Err(wrong(&name, "it is empty").into());
    }
    let width = shape.last().copied().unwrap_or(1);
    if !width.is_multiple_of(kind.block_len()) {
        let problem = format!("its rows of {width} are not whole blocks of {kind}");
        return Err(wrong(&name, problem).into());
    }
    let size = (elements / kind.block_len()).checked_mul(kind.block_bytes());
    let size = size.ok_or_else(|| wrong(&name, "it is too large"))?;
    Ok(Tensor { name, kind, shape, offset, size })
}
