//! Tensors of `torch.save`: floats as they stand, or matrices whose rows and columns have changed
//! places.

use std::ops::Range;

use super::{Damage, Grouped, Layout, Logical, StoredError, Window, elements::number};
use crate::pickle::PickledTensor;
use shardpack_quantize::dtype::Dtype;

/// A matrix that is stored as `[in, out]`.
#[derive(Clone, Debug)]
struct Turned {
    dtype: Dtype,
    height: u64,
    width: u64,
}

impl Layout for Turned {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let element = self.dtype.size_bytes() as u64;
        vec![Window {
            rows: 0..self.width,
            row_bytes: self.height * element,
            columns: rows.start * element..rows.end * element,
        }]
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let (width, count) = (self.width as usize, (rows.end - rows.start) as usize);
        for (row, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
            for (column, out) in out.iter_mut().enumerate() {
                *out = number(self.dtype, parts[0], column * count + row);
            }
        }
        Ok(())
    }
}

/// What the tensors of an archive stand for.
pub fn group_pickled(tensors: &[PickledTensor]) -> Result<Grouped, StoredError> {
    let logical = |tensor: &PickledTensor| {
        let stored = &tensor.stored;
        let (name, dtype) = (stored.name.clone(), stored.dtype);
        match stored.shape.as_slice() {
            [width, height] if tensor.is_turned => {
                let layout = Turned { dtype, height: *height, width: *width };
                let shape = vec![*height, *width];
                Logical::reordered(name.clone(), shape, dtype, vec![name], layout)
            }
            shape => Logical::plain(name, dtype, shape.to_vec()),
        }
    };
    let mut grouped =
        Grouped { tensors: tensors.iter().map(logical).collect(), dropped: Vec::new() };
    grouped.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    grouped.check_names()?;
    Ok(grouped)
}
