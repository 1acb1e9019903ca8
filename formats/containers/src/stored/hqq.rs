//! HQQ: integers of 1, 2, 4 or 8 bits, of which each byte holds some that are far apart.
//!
//! | part | type | length | content |
//! |---|---|---|---|
//! | `W_q` | bytes | elements · bits / 8 | the highest bits of byte `i` are element `i`, the next ones element `bytes + i`, and so on |
//! | `scale` | float | groups | multiplies |
//! | `zero` | float | groups | is subtracted before |
//!
//! Groups are of neighbouring elements over all rows (axis 1), or of every `groups`-th one (axis 0).
//!
//! Source: `core/bitpack.py` and `core/quantize.py` of hqq.

use std::ops::Range;

use super::{Damage, Layout, Window, bitsandbytes::span, elements::number};
use shardpack_quantize::dtype::Dtype;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Hqq {
    pub(super) bits: u32,
    pub(super) elements: u64,
    pub(super) width: u64,
    pub(super) groups: u64,
    pub(super) axis: Axis,
    pub(super) scale: Dtype,
    pub(super) zero: Dtype,
}

/// Along which a group's elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    Neighbours,
    Every,
}

impl Hqq {
    /// Bytes of all integers.
    const fn size(&self) -> u64 {
        self.elements * self.bits as u64 / 8
    }

    /// Bytes that hold some elements.
    const fn bytes(&self, elements: &Range<u64>) -> Range<u64> {
        let size = self.size();
        let part = elements.start / size;
        if elements.start < elements.end && part == (elements.end - 1) / size {
            elements.start - part * size..elements.end - part * size
        } else {
            0..size
        }
    }

    /// Groups of some elements.
    const fn groups(&self, elements: &Range<u64>) -> Range<u64> {
        match self.axis {
            Axis::Neighbours => {
                let size = self.elements / self.groups;
                elements.start / size..elements.end.div_ceil(size)
            }
            Axis::Every => 0..self.groups,
        }
    }
}

impl Layout for Hqq {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let elements = rows.start * self.width..rows.end * self.width;
        let groups = self.groups(&elements);
        let floats = |dtype: Dtype| {
            let size = dtype.size_bytes() as u64;
            span(groups.start * size..groups.end * size, self.groups * size)
        };
        vec![span(self.bytes(&elements), self.size()), floats(self.scale), floats(self.zero)]
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let elements = rows.start * self.width..rows.end * self.width;
        let (first_byte, first_group) = (self.bytes(&elements).start, self.groups(&elements).start);
        let (size, group_size) = (self.size(), self.elements / self.groups);
        let mask = ((1_u32 << self.bits) - 1) as u8;
        for (element, out) in elements.zip(out) {
            let byte = parts[0][(element % size - first_byte) as usize];
            let shift = 8 - u64::from(self.bits) * (element / size + 1);
            let q = byte >> shift & mask;
            let group = match self.axis {
                Axis::Neighbours => element / group_size,
                Axis::Every => element % self.groups,
            };
            let at = (group - first_group) as usize;
            let (scale, zero) = (number(self.scale, parts[1], at), number(self.zero, parts[2], at));
            *out = (f32::from(q) - zero) * scale;
        }
        Ok(())
    }
}
