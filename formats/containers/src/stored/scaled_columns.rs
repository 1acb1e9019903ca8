//! Matrices whose inputs are scaled before they are multiplied (`SmoothQuant`, AWQ): the columns are
//! scaled in their place.

use std::{ops::Range, sync::Arc};

use super::{Damage, Layout, Logical, Window, elements::number};
use crate::container::TensorInfo;
use shardpack_quantize::dtype::Dtype;

/// Another layout, and a float for each column.
#[derive(Clone, Debug)]
struct ScaledColumns {
    inner: Arc<dyn Layout>,
    scale: Dtype,
    width: u64,
}

impl Layout for ScaledColumns {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let mut windows = self.inner.windows(rows);
        windows.push(Window::rows(0..1, self.width * self.scale.size_bytes() as u64));
        windows
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let (scales, parts) = parts.split_last().expect("it has a window of its own");
        self.inner.decode(rows, parts, out)?;
        for row in out.chunks_exact_mut(self.width.max(1) as usize) {
            for (column, out) in row.iter_mut().enumerate() {
                *out *= number(self.scale, scales, column);
            }
        }
        Ok(())
    }
}

impl Logical {
    /// Scales the columns by a tensor of floats, one for each.
    pub(super) fn scale_columns(&mut self, scales: &TensorInfo) {
        let (scale, width) = (scales.dtype, self.width());
        if let Some(inner) = self.layout.take() {
            self.layout = Some(Arc::new(ScaledColumns { inner, scale, width }));
            self.parts.push(scales.name.clone());
        }
    }
}
