//! Bytes with scales: FP8 and INT8 with one scale for the whole tensor, for each row, for a group
//! of columns, or for a block of rows and columns.
//!
//! | part | shape | content |
//! |---|---|---|
//! | weight | `[…, out, in]` | E4M3 or two's complement |
//! | scale | `[…, ⌈out / block rows⌉, ⌈in / block columns⌉]` | multiplies; the last block of either side can be shorter |
//! | zero point | as the scale | INT8 only: is subtracted before |

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{E4M3, number},
};
use shardpack_quantize::dtype::Dtype;

/// What the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    E4M3,
    I8,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Scaled {
    pub(super) element: Element,
    pub(super) scale: Dtype,
    /// Rows of one matrix, of which there can be several.
    pub(super) height: u64,
    pub(super) width: u64,
    pub(super) block_rows: u64,
    pub(super) block_columns: u64,
    pub(super) has_zero: bool,
}

impl Scaled {
    const fn scale_columns(&self) -> u64 {
        self.width.div_ceil(self.block_columns)
    }

    /// The row of the scales that a row of weights has.
    const fn scale_row(&self, row: u64) -> u64 {
        row / self.height * self.height.div_ceil(self.block_rows)
            + row % self.height / self.block_rows
    }

    /// The scales' index for the first column of a row, within the window of `rows`.
    const fn scale_index(&self, rows: &Range<u64>, row: u64) -> usize {
        ((self.scale_row(row) - self.scale_row(rows.start)) * self.scale_columns()) as usize
    }
}

impl Layout for Scaled {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let scales = if rows.is_empty() {
            0..0
        } else {
            self.scale_row(rows.start)..self.scale_row(rows.end - 1) + 1
        };
        let columns = self.scale_columns();
        let mut windows = vec![
            Window::rows(rows, self.width),
            Window::rows(scales.clone(), columns * self.scale.size_bytes() as u64),
        ];
        if self.has_zero {
            windows.push(Window::rows(scales, columns));
        }
        windows
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let (width, block) = (self.width as usize, self.block_columns.min(self.width) as usize);
        if width == 0 {
            return Ok(());
        }
        let lines = parts[0].chunks_exact(width).zip(out.chunks_exact_mut(width));
        for (row, (bytes, out)) in rows.clone().zip(lines) {
            let first = self.scale_index(&rows, row);
            for (index, (bytes, out)) in bytes.chunks(block).zip(out.chunks_mut(block)).enumerate()
            {
                let scale = number(self.scale, parts[1], first + index);
                match self.element {
                    Element::E4M3 => {
                        for (out, byte) in out.iter_mut().zip(bytes) {
                            *out = E4M3[usize::from(*byte)] * scale;
                        }
                    }
                    Element::I8 => {
                        let zero =
                            parts.get(2).map_or(0, |zeros| i16::from(zeros[first + index] as i8));
                        for (out, byte) in out.iter_mut().zip(bytes) {
                            *out = f32::from(i16::from(*byte as i8) - zero) * scale;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        let bits = 8;
        (self.element == Element::I8).then_some(Grid {
            bits,
            group_size: self.block_columns,
            is_affine: false,
        })
    }

    fn integers(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Integers,
    ) -> Result<bool, Damage> {
        out.q.extend(parts[0].iter().map(|byte| byte ^ 0x80));
        for row in rows.clone() {
            let first = self.scale_index(&rows, row);
            for index in first..first + self.scale_columns() as usize {
                let scale = number(self.scale, parts[1], index);
                let zero = parts.get(2).map_or(0.0, |zeros| f32::from(zeros[index] as i8));
                out.scales.push(scale);
                out.biases.push(-(128.0 + zero) * scale);
            }
        }
        Ok(true)
    }
}
