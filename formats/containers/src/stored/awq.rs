//! AWQ's `gemm` layout: integers of 4 bits, packed along the outputs in the order of a kernel.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `qweight` | I32 | `[in, out / 8]` | nibble `ORDER[k]` of word `j` is output `8·j + k` |
//! | `qzeros` | I32 | `[in / group, out / 8]` | zero points, in the same order |
//! | `scales` | float | `[in / group, out]` | multiplies, in plain order |

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{number, word},
};
use shardpack_quantize::dtype::Dtype;

/// Which nibble of a word holds each of its eight outputs.
const ORDER: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Awq {
    pub(super) height: u64,
    pub(super) width: u64,
    pub(super) group_size: u64,
    pub(super) scale: Dtype,
}

impl Awq {
    const fn groups(&self) -> u64 {
        self.width / self.group_size
    }

    /// The integer of output `row` in a line of words that begins with the word of `first`.
    fn nibble(line: &[u8], first: u64, row: u64) -> u32 {
        let word = word(line, (row / 8 - first / 8) as usize);
        word >> (4 * ORDER[(row % 8) as usize]) & 15
    }

    /// Zero point and scale, `[rows, groups]`.
    fn pairs(&self, rows: &Range<u64>, parts: &[&[u8]]) -> Vec<(f32, f32)> {
        let count = (rows.end - rows.start) as usize;
        let line = 4 * (rows.end.div_ceil(8) - rows.start / 8) as usize;
        let pair = |at: usize, row: u64, group: usize| {
            let zero = Self::nibble(&parts[1][group * line..], rows.start, row);
            (zero as f32, number(self.scale, parts[2], group * count + at))
        };
        let groups = self.groups() as usize;
        rows.clone()
            .enumerate()
            .flat_map(|(at, row)| (0..groups).map(move |group| (at, row, group)))
            .map(|(at, row, group)| pair(at, row, group))
            .collect()
    }

    /// Calls `take` with place, input and integer of every element.
    fn each(&self, rows: &Range<u64>, bytes: &[u8], mut take: impl FnMut(usize, usize, u32)) {
        let line = 4 * (rows.end.div_ceil(8) - rows.start / 8) as usize;
        for column in 0..self.width as usize {
            let line = &bytes[column * line..][..line];
            for (at, row) in rows.clone().enumerate() {
                take(at, column, Self::nibble(line, rows.start, row));
            }
        }
    }
}

impl Layout for Awq {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let size = self.scale.size_bytes() as u64;
        let words = 4 * (rows.start / 8)..4 * rows.end.div_ceil(8);
        let row_bytes = 4 * self.height.div_ceil(8);
        vec![
            Window { rows: 0..self.width, row_bytes, columns: words.clone() },
            Window { rows: 0..self.groups(), row_bytes, columns: words },
            Window {
                rows: 0..self.groups(),
                row_bytes: size * self.height,
                columns: rows.start * size..rows.end * size,
            },
        ]
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let pairs = self.pairs(&rows, parts);
        let (groups, width) = (self.groups() as usize, self.width as usize);
        let group_size = self.group_size as usize;
        self.each(&rows, parts[0], |row, column, q| {
            let (zero, scale) = pairs[row * groups + column / group_size];
            out[row * width + column] = (q as f32 - zero) * scale;
        });
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        Some(Grid { bits: 4, group_size: self.group_size, is_affine: false })
    }

    fn integers(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Integers,
    ) -> Result<bool, Damage> {
        let width = self.width as usize;
        let start = out.q.len();
        out.q.resize(start + (rows.end - rows.start) as usize * width, 0);
        let q = &mut out.q[start..];
        self.each(&rows, parts[0], |row, column, value| q[row * width + column] = value as u8);
        let pairs = self.pairs(&rows, parts);
        out.scales.extend(pairs.iter().map(|(_, scale)| *scale));
        out.biases.extend(pairs.iter().map(|(zero, scale)| -zero * scale));
        Ok(true)
    }
}
