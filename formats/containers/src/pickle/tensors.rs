//! Where the bytes of saved tensors are.

use super::{PickleError, Saved};
use crate::container::TensorInfo;
use shardpack_quantize::dtype::Dtype;

/// Most elements of a tensor.
const MAX_ELEMENTS: u64 = 1 << 56;

/// A tensor of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickledTensor {
    /// Its bytes as they stand in the file: of a turned matrix the shape is the turned one.
    pub stored: TensorInfo,
    /// Whether rows and columns have to change places.
    pub is_turned: bool,
}

/// Finds a tensor in its storage, whose bytes begin at `start` and are `size`.
pub fn place(saved: &Saved, start: u64, size: u64) -> Result<PickledTensor, PickleError> {
    let wrong = |problem: &str| PickleError::Tensor {
        tensor: saved.name.clone(),
        problem: problem.to_owned(),
    };
    let outside = || wrong("it does not lie inside its storage");
    let element = saved.dtype.size_bytes() as u64;
    if saved.storage_len.checked_mul(element) != Some(size) {
        return Err(wrong("its storage has another size than the pickle says"));
    }
    // Empty dimensions count as one, so that no product of some of them overflows later.
    let product = saved.shape.iter().try_fold(1_u64, |all, dim| all.checked_mul((*dim).max(1)));
    if product.is_none_or(|product| product > MAX_ELEMENTS) {
        return Err(wrong("it has too many elements"));
    }
    let elements: u64 = saved.shape.iter().product();
    let end = saved.offset.checked_add(elements).ok_or_else(outside)?;
    // Neither form has gaps, so the elements are the extent.
    if end > saved.storage_len {
        return Err(outside());
    }
    let (shape, is_turned) = match saved.shape.as_slice() {
        shape if elements == 0 || is_contiguous(shape, &saved.strides) => (shape.to_vec(), false),
        [rows, columns] if saved.strides == [1, *rows] => (vec![*columns, *rows], true),
        _ => {
            return Err(wrong(
                "its elements are neither one after the other nor those of a turned matrix",
            ));
        }
    };
    if is_turned && !matches!(saved.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        return Err(wrong("it is a turned matrix of other numbers than weights"));
    }
    let stored = TensorInfo {
        name: saved.name.clone(),
        dtype: saved.dtype,
        shape,
        offset: start + saved.offset * element,
        size: elements * element,
    };
    Ok(PickledTensor { stored, is_turned })
}

fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut wanted = 1_u64;
    for (size, stride) in shape.iter().zip(strides).rev() {
        if *size != 1 && *stride != wanted {
            return false;
        }
        wanted = wanted.saturating_mul(*size);
    }
    true
}
