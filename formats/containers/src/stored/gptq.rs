//! GPTQ: integers of 4 or 8 bits, packed along the inputs, matrices stored input by input.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | `qweight` | I32 | `[in · bits / 32, out]` | the lowest bits hold the first input |
//! | `qzeros` | I32 | `[groups, out · bits / 32]` | zero points; minus one in the first version of the format |
//! | `scales` | float | `[groups, out]` | multiplies |
//! | `g_idx` | I32 | `[in]` | the group of each input; not monotone with `desc_act` |

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{number, word},
};
use shardpack_quantize::dtype::Dtype;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Gptq {
    pub(super) bits: u32,
    pub(super) height: u64,
    pub(super) width: u64,
    pub(super) group_size: u64,
    pub(super) groups: u64,
    pub(super) scale: Dtype,
    /// What is added to a stored zero point.
    pub(super) zero_offset: u32,
    pub(super) has_index: bool,
}

/// Scales and zero points of some rows.
struct Steps {
    /// Zero point and scale, `[rows, groups]`.
    pairs: Vec<(f32, f32)>,
    /// The group of each input.
    index: Vec<usize>,
}

impl Gptq {
    const fn per_word(&self) -> u64 {
        (32 / self.bits) as u64
    }

    const fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }

    fn steps(&self, rows: &Range<u64>, parts: &[&[u8]]) -> Result<Steps, Damage> {
        let groups = self.groups as usize;
        let count = (rows.end - rows.start) as usize;
        let per = self.per_word();
        let zero_words = (rows.end.div_ceil(per) - rows.start / per) as usize;
        let mut pairs = Vec::with_capacity(count * groups);
        for (at, row) in rows.clone().enumerate() {
            for group in 0..groups {
                let column = (row / per - rows.start / per) as usize;
                let word = word(parts[1], group * zero_words + column);
                let zero = word >> (row % per * u64::from(self.bits)) & self.mask();
                let scale = number(self.scale, parts[2], group * count + at);
                pairs.push(((zero + self.zero_offset) as f32, scale));
            }
        }
        let index = match parts.get(3) {
            None => (0..self.width).map(|column| (column / self.group_size) as usize).collect(),
            Some(bytes) => (0..self.width as usize)
                .map(|column| match word(bytes, column) as usize {
                    group if group < groups => Ok(group),
                    group => Err(Damage(format!(
                        "its g_idx names group {group} for input {column}, there are {groups}"
                    ))),
                })
                .collect::<Result<_, _>>()?,
        };
        Ok(Steps { pairs, index })
    }

    /// Calls `take` with place, input and integer of every element.
    fn each(&self, count: usize, bytes: &[u8], mut take: impl FnMut(usize, usize, u32)) {
        let (per, width) = (self.per_word() as usize, self.width as usize);
        if count == 0 {
            return;
        }
        for (first, words) in (0..width).step_by(per).zip(bytes.chunks_exact(4 * count)) {
            for row in 0..count {
                let word = word(words, row);
                for k in 0..per {
                    let q = word >> (k as u32 * self.bits) & self.mask();
                    take(row, first + k, q);
                }
            }
        }
    }
}

impl Layout for Gptq {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let (per, size) = (self.per_word(), self.scale.size_bytes() as u64);
        let columns = |range: Range<u64>, size: u64| range.start * size..range.end * size;
        let mut windows = vec![
            Window {
                rows: 0..self.width / per,
                row_bytes: 4 * self.height,
                columns: columns(rows.clone(), 4),
            },
            Window {
                rows: 0..self.groups,
                row_bytes: 4 * self.height.div_ceil(per),
                columns: columns(rows.start / per..rows.end.div_ceil(per), 4),
            },
            Window {
                rows: 0..self.groups,
                row_bytes: size * self.height,
                columns: columns(rows, size),
            },
        ];
        if self.has_index {
            windows.push(Window::rows(0..1, 4 * self.width));
        }
        windows
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let steps = self.steps(&rows, parts)?;
        let (groups, width) = (self.groups as usize, self.width as usize);
        self.each((rows.end - rows.start) as usize, parts[0], |row, column, q| {
            let (zero, scale) = steps.pairs[row * groups + steps.index[column]];
            out[row * width + column] = (q as f32 - zero) * scale;
        });
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
        let steps = self.steps(&rows, parts)?;
        let group_size = self.group_size as usize;
        if steps.index.iter().enumerate().any(|(column, group)| column / group_size != *group) {
            return Ok(false);
        }
        let width = self.width as usize;
        let count = (rows.end - rows.start) as usize;
        let start = out.q.len();
        out.q.resize(start + count * width, 0);
        let q = &mut out.q[start..];
        self.each(count, parts[0], |row, column, value| q[row * width + column] = value as u8);
        out.scales.extend(steps.pairs.iter().map(|(_, scale)| *scale));
        out.biases.extend(steps.pairs.iter().map(|(zero, scale)| -zero * scale));
        Ok(true)
    }
}
