//! The safetensors container: eight bytes of header length (little-endian), a JSON header, data.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `n`: length of the header |
//! | `n` | JSON object: name → `{dtype, shape, data_offsets}`, and `__metadata__`; may end in spaces |
//! | rest | the tensors' bytes, in the order and at the offsets of the header, without gaps |
//!
//! Files that we write have their data section on a 16 KiB boundary, so that a tensor's position
//! in a page is the same in the file and in memory.

use safetensors::tensor::Metadata;
use serde_json::{Map, Value, json};

use shardpack_quantize::dtype::Dtype;

/// Where the data section of our files begins: a multiple of the page size of Apple silicon.
pub const DATA_ALIGNMENT: u64 = 16 << 10;

/// Longest header that is read, as the format's own reader has it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, last dimension contiguous.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// A header that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// Not a container, or cut short.
    #[error("not a safetensors file: {0}")]
    Malformed(String),
    /// Shorter or longer than its header says.
    #[error(
        "the header describes {expected} bytes, the file has {found}: the download or copy is incomplete"
    )]
    Size {
        /// Bytes by the header.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A tensor of a type that this version does not read.
    #[error("tensor {tensor:?} has dtype {dtype}, which this version does not read")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
    },
}

/// Bytes from the start of a file of `size` bytes to the end of its header, by its first eight
/// bytes; what cannot be is cut to what [`parse_header`] needs to refuse it.
#[must_use]
pub fn header_bytes(start: &[u8], size: u64) -> u64 {
    let length = start.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    length.min(MAX_HEADER_BYTES + 1).saturating_add(8).min(size)
}

/// Reads the header of a whole file in memory; tensors in file order.
pub fn parse(file: &[u8]) -> Result<Vec<TensorInfo>, ContainerError> {
    let size = file.len() as u64;
    parse_header(&file[..header_bytes(file, size) as usize], size)
}

/// Reads a header: the first [`header_bytes`] of a file of `size` bytes. Tensors in file order.
pub fn parse_header(header: &[u8], size: u64) -> Result<Vec<TensorInfo>, ContainerError> {
    let malformed = |what: &str| ContainerError::Malformed(what.to_owned());
    let Some(length) = header.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)) else {
        return Err(malformed("shorter than its first field"));
    };
    if length > MAX_HEADER_BYTES {
        return Err(malformed("its header is longer than 100 MB"));
    }
    let header_end = length + 8;
    if header_end > size || header_end != header.len() as u64 {
        return Err(malformed("its header ends beyond the file"));
    }
    // The parser checks that offsets are ordered, without gaps, and fit the shapes; that the
    // file is as long as they say is checked here, because the data is not in memory.
    let metadata: Metadata = serde_json::from_slice(&header[8..]).map_err(|error| {
        ContainerError::Malformed(format!("its header is not JSON of the right shape: {error}"))
    })?;
    let data = metadata.data_len() as u64;
    let expected = header_end.saturating_add(data);
    if expected != size {
        return Err(ContainerError::Size { expected, found: size });
    }
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let spelled = info.dtype.to_string();
        let dtype = Dtype::from_name(&spelled);
        let dtype =
            dtype.ok_or_else(|| ContainerError::Dtype { tensor: name.clone(), dtype: spelled })?;
        let (start, end) = info.data_offsets;
        let shape = info.shape.iter().map(|dim| *dim as u64).collect();
        let (offset, size) = (header_end + start as u64, (end - start) as u64);
        tensors.push(TensorInfo { name, dtype, shape, offset, size });
    }
    Ok(tensors)
}

/// The framework that a header names as its writer (`"pt"`, `"mlx"`), if it names one.
#[must_use]
pub fn framework(header: &[u8]) -> Option<String> {
    let metadata: Metadata = serde_json::from_slice(header.get(8..)?).ok()?;
    metadata.metadata().as_ref()?.get("format").cloned()
}

/// The first bytes of a container with these tensors (offsets are ignored: they follow from the
/// order), padded so that data begins on [`DATA_ALIGNMENT`].
#[must_use]
pub fn header(tensors: &[TensorInfo]) -> Vec<u8> {
    header_for("mlx", tensors)
}

/// Like [`header`], for the framework that names tensors and lays them out like these (`"pt"`,
/// `"mlx"`).
#[must_use]
pub fn header_for(framework: &str, tensors: &[TensorInfo]) -> Vec<u8> {
    // Written by hand to keep the tensors' order whatever map serde_json uses.
    let mut text = format!(r#"{{"__metadata__":{{"format":"{framework}"}}"#);
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.size;
        let info = Map::from_iter([
            ("data_offsets".to_owned(), json!([start, end])),
            ("dtype".to_owned(), json!(tensor.dtype.name())),
            ("shape".to_owned(), json!(tensor.shape)),
        ]);
        text.push(',');
        text.push_str(&Value::from(tensor.name.as_str()).to_string());
        text.push(':');
        text.push_str(&Value::from(info).to_string());
    }
    text.push('}');
    let length = (text.len() as u64 + 8).next_multiple_of(DATA_ALIGNMENT) - 8;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(length as usize + 8, b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
        let size = shape.iter().product::<u64>() * dtype.size_bytes() as u64;
        TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec(), offset: 0, size }
    }

    fn file() -> Vec<u8> {
        let tensors = [
            tensor("b", Dtype::BF16, &[2, 3]),
            tensor("a", Dtype::F32, &[1]),
            tensor("c", Dtype::U32, &[0, 4]),
        ];
        let mut file = header(&tensors);
        assert_eq!(file.len() as u64 % DATA_ALIGNMENT, 0);
        file.extend_from_slice(&[7; 16]);
        file
    }

    #[test]
    fn what_is_written_is_read_in_order() {
        let tensors = parse(&file()).unwrap();
        let seen: Vec<_> =
            tensors.iter().map(|t| (t.name.as_str(), t.offset - DATA_ALIGNMENT, t.size)).collect();
        assert_eq!(seen, [("b", 0, 12), ("a", 12, 4), ("c", 16, 0)]);
    }

    #[test]
    fn truncated_and_foreign_files_are_refused() {
        let whole = file();
        let error = |bytes: &[u8]| parse(bytes).unwrap_err().to_string();
        assert!(
            error(&whole[..whole.len() - 1]).contains("describes 16400 bytes, the file has 16399")
        );
        assert!(error(&whole[..100]).contains("header ends beyond the file"));
        assert!(error(b"PK").contains("shorter than its first field"));
        assert!(error(&[whole.as_slice(), &[0]].concat()).contains("the file has 16401"));
    }

    #[test]
    fn an_unknown_dtype_names_the_tensor() {
        let text = r#"{"x":{"dtype":"F8_E4M3FNUZ","shape":[1],"data_offsets":[0,1]}}"#;
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
        assert!(parse(&bytes).unwrap_err().to_string().contains("\"x\" has dtype F8_E4M3"));
    }
}
