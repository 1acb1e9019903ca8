//! modelopt's integers of 4 bits: each byte holds those of two rows.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | weight | bytes | `[…, out / 2, in]` | the low nibble is of the even row; two's complement |
//! | scale | float | `[…, out, groups]` | multiplies |
//!
//! Source: `pack_int4_in_uint8` of nvidia-modelopt.

use std::ops::Range;

use super::{Damage, Grid, Integers, Layout, Window, elements::number};
use shardpack_quantize::dtype::Dtype;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct PairedRows {
    pub(super) width: u64,
    pub(super) groups: u64,
    pub(super) scale: Dtype,
}

impl PairedRows {
    /// The integers of a row, counted from −8.
    fn row<'b>(
        &self,
        rows: &Range<u64>,
        row: u64,
        bytes: &'b [u8],
    ) -> impl Iterator<Item = u8> + 'b {
        let width = self.width as usize;
        let at = (row / 2 - rows.start / 2) as usize * width;
        let shift = row % 2 * 4;
        bytes[at..at + width].iter().map(move |byte| (byte >> shift & 15) ^ 8)
    }
}

impl Layout for PairedRows {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let scales = Window::rows(rows.clone(), self.groups * self.scale.size_bytes() as u64);
        vec![Window::rows(rows.start / 2..rows.end.div_ceil(2), self.width), scales]
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let (groups, group_size) = (self.groups as usize, (self.width / self.groups) as usize);
        let lines = rows.clone().zip(out.chunks_exact_mut(self.width as usize));
        for (index, (row, out)) in lines.enumerate() {
            for (column, (q, out)) in self.row(&rows, row, parts[0]).zip(out).enumerate() {
                let scale = number(self.scale, parts[1], index * groups + column / group_size);
                *out = (f32::from(q) - 8.0) * scale;
            }
        }
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        Some(Grid { bits: 4, group_size: self.width / self.groups, is_affine: false })
    }

    fn integers(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Integers,
    ) -> Result<bool, Damage> {
        for (index, row) in rows.clone().enumerate() {
            out.q.extend(self.row(&rows, row, parts[0]));
            for group in 0..self.groups as usize {
                let scale = number(self.scale, parts[1], index * self.groups as usize + group);
                out.scales.push(scale);
                out.biases.push(-8.0 * scale);
            }
        }
        Ok(true)
    }
}
