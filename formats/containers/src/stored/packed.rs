//! `pack-quantized` of compressed-tensors: integers of 4 or 8 bits, packed along the inputs.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `weight_packed` | I32 | `[out, ⌈in · bits / 32⌉]` | the lowest bits hold the first column; stored with an offset of half the range |
//! | `weight_scale` | float | `[out, in / group]` | multiplies |
//! | `weight_shape` | I32 or I64 | `[2]` | `out`, `in` |
//! | `weight_zero_point` | I32 | `[⌈out · bits / 32⌉, in / group]` | packed along the outputs, with the same offset; absent when symmetric |

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{number, word},
};
use shardpack_quantize::dtype::Dtype;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    pub(super) bits: u32,
    pub(super) height: u64,
    pub(super) width: u64,
    pub(super) group_size: u64,
    pub(super) scale: Dtype,
    /// Type of the numbers in `weight_shape`.
    pub(super) shape: Dtype,
    pub(super) has_zero: bool,
}

impl Packed {
    const fn per_word(&self) -> u64 {
        (32 / self.bits) as u64
    }

    const fn groups(&self) -> u64 {
        self.width.div_ceil(self.group_size)
    }

    const fn row_words(&self) -> u64 {
        self.width.div_ceil(self.per_word())
    }

    fn check_shape(&self, bytes: &[u8]) -> Result<(), Damage> {
        let at = |index: usize| match self.shape {
            Dtype::I64 => {
                u64::from(word(bytes, 2 * index)) | u64::from(word(bytes, 2 * index + 1)) << 32
            }
            _ => u64::from(word(bytes, index)),
        };
        let (found, expected) = ([at(0), at(1)], [self.height, self.width]);
        if found == expected {
            return Ok(());
        }
        Err(Damage(format!(
            "its weight_shape is {found:?}, its packed integers are for {expected:?}"
        )))
    }

    /// The zero point of a group of a row, as stored.
    fn zero(&self, rows: &Range<u64>, row: u64, group: usize, parts: &[&[u8]]) -> u32 {
        let Some(zeros) = parts.get(3) else { return 1 << (self.bits - 1) };
        let line = row / self.per_word() - rows.start / self.per_word();
        let word = word(zeros, line as usize * self.groups() as usize + group);
        word >> (row % self.per_word() * u64::from(self.bits)) & self.mask()
    }

    const fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Calls `take` with every integer of a row, in order.
    fn row(&self, bytes: &[u8], mut take: impl FnMut(usize, u32)) {
        let (per, width) = (self.per_word() as usize, self.width as usize);
        for (index, bytes) in bytes.chunks_exact(4).enumerate() {
            let word = word(bytes, 0);
            for k in 0..per.min(width - (index * per).min(width)) {
                take(index * per + k, word >> (k as u32 * self.bits) & self.mask());
            }
        }
    }
}

impl Layout for Packed {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let (groups, per) = (self.groups(), self.per_word());
        let zeros = rows.start / per..rows.end.div_ceil(per);
        let mut windows = vec![
            Window::rows(rows.clone(), 4 * self.row_words()),
            Window::rows(rows, groups * self.scale.size_bytes() as u64),
            Window::rows(0..1, 2 * self.shape.size_bytes() as u64),
        ];
        if self.has_zero {
            windows.push(Window::rows(zeros, 4 * groups));
        }
        windows
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        self.check_shape(parts[2])?;
        let (width, group_size) = (self.width as usize, self.group_size as usize);
        let row_bytes = 4 * self.row_words() as usize;
        if width == 0 {
            return Ok(());
        }
        let groups = self.groups() as usize;
        let mut pairs = vec![(0.0, 0.0); groups];
        let lines = parts[0].chunks_exact(row_bytes).zip(out.chunks_exact_mut(width));
        for ((index, row), (bytes, out)) in rows.clone().enumerate().zip(lines) {
            for (group, pair) in pairs.iter_mut().enumerate() {
                let scale = number(self.scale, parts[1], index * groups + group);
                *pair = (self.zero(&rows, row, group, parts) as f32, scale);
            }
            self.row(bytes, |column, q| {
                let (zero, scale) = pairs[column / group_size];
                out[column] = (q as f32 - zero) * scale;
            });
        }
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        Some(Grid { bits: self.bits, group_size: self.group_size, is_affine: false })
    }

    fn integers(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Integers,
    ) -> Result<bool, Damage> {
        self.check_shape(parts[2])?;
        let groups = self.groups() as usize;
        let row_bytes = 4 * self.row_words() as usize;
        for (index, row) in rows.clone().enumerate() {
            self.row(&parts[0][index * row_bytes..][..row_bytes], |_, q| out.q.push(q as u8));
            for group in 0..groups {
                let scale = number(self.scale, parts[1], index * groups + group);
                out.scales.push(scale);
                out.biases.push(-(self.zero(&rows, row, group, parts) as f32) * scale);
            }
        }
        Ok(true)
    }
}
