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

use serde_json::{Map, Value, json};

use crate::dtype::Dtype;

/// Where the data section of our files begins: a multiple of the page size of Apple silicon.
pub const DATA_ALIGNMENT: u64 = 16 << 10;

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
    #[error(
        "tensor {tensor:?} has dtype {dtype}, which is not supported yet; supported: F32, F16, BF16"
    )]
    Dtype {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
    },
}

/// Reads the header of a whole file in memory or mapped; tensors in file order.
pub fn parse(file: &[u8]) -> Result<Vec<TensorInfo>, ContainerError> {
    let malformed =
        |error: safetensors::SafeTensorError| ContainerError::Malformed(error.to_string());
    let length = file.first_chunk::<8>().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
    let header_end = length.saturating_add(8);
    if header_end > file.len() as u64 {
        let what = if file.len() < 8 {
            "shorter than its first field"
        } else {
            "its header ends beyond the file"
        };
        return Err(ContainerError::Malformed(what.to_owned()));
    }
    // The parser checks that offsets are ordered, without gaps, and fit the shapes.
    let (_, metadata) =
        safetensors::SafeTensors::read_metadata(file).map_err(|error| match error {
            safetensors::SafeTensorError::MetadataIncompleteBuffer => size_error(file, header_end),
            other => malformed(other),
        })?;
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let spelled = info.dtype.to_string();
        let dtype = Dtype::from_name(&spelled);
        let dtype =
            dtype.ok_or_else(|| ContainerError::Dtype { tensor: name.clone(), dtype: spelled })?;
        let (start, end) = info.data_offsets;
        let shape = info.shape.iter().map(|dim| *dim as u64).collect();
        tensors.push(TensorInfo {
            name,
            dtype,
            shape,
            offset: header_end + start as u64,
            size: (end - start) as u64,
        });
    }
    Ok(tensors)
}

/// What the header promises against what is there.
fn size_error(file: &[u8], header_end: u64) -> ContainerError {
    let header: Value = serde_json::from_slice(&file[8..header_end as usize]).unwrap_or_default();
    let data = header
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64())
        .max();
    ContainerError::Size {
        expected: header_end.saturating_add(data.unwrap_or(0)),
        found: file.len() as u64,
    }
}

/// The first bytes of a container with these tensors (offsets are ignored: they follow from the
/// order), padded so that data begins on [`DATA_ALIGNMENT`].
#[must_use]
pub fn header(tensors: &[TensorInfo]) -> Vec<u8> {
    // Written by hand to keep the tensors' order whatever map serde_json uses.
    let mut text = String::from(r#"{"__metadata__":{"format":"mlx"}"#);
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
        let text = r#"{"x":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}"#;
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
        assert!(parse(&bytes).unwrap_err().to_string().contains("\"x\" has dtype F8_E4M3"));
    }
}
