//! The interleaved weight layout: packed weights are rearranged once, while they are loaded, for a
//! platform's GEMV and GEMM.
//!
//! A package keeps MLX's order: a row is one stream of bits, group after group. Products multiply
//! bytes four at a time into the lanes of a vector, so in that order every group ends with adding
//! lanes together, which costs as much as the products themselves. *Interleaved*, the 4-byte words
//! (3 bytes of 6-bit weights: four weights either way, or eight of 4 bits) of 16 spans stand side
//! by side: first the first word of each, then the second of each. A span's products then gather
//! in a lane of its own, the lane that the sum of an output element has for it.
//!
//! Four rows share what is read of the activations, so their words take turns, 16 of each: memory
//! is still read in one stream, which several rows at a distance would not be.
//!
//! The bytes stay within their four rows, so they are rearranged in place: no second copy, no
//! other size, and a matrix is still sharded between such fours. One whose rows are not a multiple of
//! four stays as it is.

use shardpack_quantize::Platform;

use crate::{
    quantized::{SPANS, has_kernels, span_of},
    team::Activations,
};

/// Layout of packed weights within a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// As packages have them.
    #[default]
    Stored,
    /// Word by word of each run of 16 spans of four rows.
    Interleaved,
    /// The same with words of four bytes for 6 bits too: of every sixteen weights, which fill
    /// three bytes by fours, the first bytes, then the second ones, then the third ones.
    Planes,
}

impl Packing {
    /// The packing that products on a platform with such activations are fastest with.
    #[must_use]
    pub const fn best(platform: Platform, activations: Activations) -> Self {
        match (platform, activations) {
            (Platform::Avx512, Activations::Int8) => Self::Interleaved,
            (Platform::Avx2, Activations::Int8) => Self::Planes,
            _ => Self::Stored,
        }
    }
}

/// Weight rows that stand together: their sums with four rows of activations fill registers.
pub(crate) const QUAD: usize = 4;

/// Bytes behind four rows that may be read with them: units of three bytes are read as four.
pub(crate) const READ_BEYOND: usize = 4;

/// Rows of packed integers that can be interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repack {
    /// Bytes that stay together.
    pub(crate) unit: usize,
    /// Of a span.
    pub(crate) units: usize,
    pub(crate) spans: usize,
    packing: Packing,
}

impl Repack {
    /// A matrix of `rows` by `cols` weights; none where its form has no kernels that want it, or
    /// it shall stay as it is stored.
    #[must_use]
    pub fn new(
        [rows, cols]: [usize; 2],
        [bits, group]: [usize; 2],
        packing: Packing,
    ) -> Option<Self> {
        let whole = rows.is_multiple_of(QUAD) && cols.is_multiple_of(group);
        if packing == Packing::Stored || !has_kernels(bits, group) || cols == 0 || !whole {
            return None;
        }
        let span = span_of(group);
        let unit = if bits == 6 && packing == Packing::Interleaved { 3 } else { 4 };
        let packing = if bits == 6 { packing } else { Packing::Interleaved };
        Some(Self { unit, units: span * bits / 8 / unit, spans: cols / span, packing })
    }

    /// Whether bytes are put to planes before they are interleaved.
    pub(crate) fn has_planes(&self) -> bool {
        self.packing == Packing::Planes
    }

    pub(crate) const fn span_bytes(&self) -> usize {
        self.unit * self.units
    }

    /// Bytes of a whole run.
    pub(crate) const fn run_bytes(&self) -> usize {
        SPANS * self.span_bytes()
    }

    const fn row_bytes(&self) -> usize {
        self.spans * self.span_bytes()
    }

    /// Bytes of four rows, which are interleaved among themselves.
    #[must_use]
    pub const fn quad_bytes(&self) -> usize {
        QUAD * self.row_bytes()
    }

    /// Interleaves rows, four by four.
    ///
    /// # Panics
    /// When the bytes are not whole fours of rows.
    pub fn interleave(&self, rows: &mut [u8]) {
        assert!(rows.len().is_multiple_of(self.quad_bytes()), "{} bytes of rows", rows.len());
        let platform = Platform::detect();
        let mut before = vec![0; self.quad_bytes() + READ_BEYOND];
        for quad in rows.chunks_exact_mut(self.quad_bytes()) {
            before[..quad.len()].copy_from_slice(quad);
            match platform {
                #[cfg(target_arch = "x86_64")]
                Platform::Avx512 if !self.has_planes() => {
                    crate::avx512::interleave(self, &before, quad);
                }
                #[cfg(target_arch = "x86_64")]
                Platform::Avx2 | Platform::Avx512 if self.unit == 4 => {
                    crate::avx2::interleave(self, &before, quad);
                }
                _ => self.interleave_four(&before[..quad.len()], quad),
            }
        }
    }

    /// What interleaving is, unit by unit; `from` are four rows as they are stored.
    fn interleave_four(&self, from: &[u8], to: &mut [u8]) {
        let planes = self.has_planes().then(|| {
            let mut planes = from.to_vec();
            planes.as_chunks_mut().0.iter_mut().for_each(|bytes| *bytes = to_planes(*bytes));
            planes
        });
        let from = planes.as_deref().unwrap_or(from);
        for (row, from) in from.chunks_exact(self.row_bytes()).enumerate() {
            let places = to.chunks_mut(QUAD * self.run_bytes());
            for (from, to) in from.chunks(self.run_bytes()).zip(places) {
                self.interleave_run(from, row, to);
            }
        }
    }

    /// Puts a run of row `row` of four into its places of theirs.
    pub(crate) fn interleave_run(&self, from: &[u8], row: usize, to: &mut [u8]) {
        let held = from.len() / self.span_bytes();
        for (number, from) in from.chunks_exact(self.unit).enumerate() {
            let (span, index) = (number / self.units, number % self.units);
            let at = ((index * QUAD + row) * held + span) * self.unit;
            to[at..at + self.unit].copy_from_slice(from);
        }
    }

    /// Copies bytes of whole spans of row `row` of interleaved rows to `out`, as they were stored
    /// from `start` of the row on.
    pub(crate) fn read(&self, rows: &[u8], row: usize, start: usize, out: &mut [u8]) {
        let quad = &rows[row / QUAD * self.quad_bytes()..][..self.quad_bytes()];
        for (index, out) in out.chunks_exact_mut(self.span_bytes()).enumerate() {
            let span = start / self.span_bytes() + index;
            let run = span / SPANS;
            let held = (self.spans - run * SPANS).min(SPANS);
            let first = run * QUAD * self.run_bytes();
            for (number, out) in out.chunks_exact_mut(self.unit).enumerate() {
                let place = (number * QUAD + row % QUAD) * held + span % SPANS;
                let at = first + place * self.unit;
                out.copy_from_slice(&quad[at..at + self.unit]);
            }
            if self.has_planes() {
                out.as_chunks_mut().0.iter_mut().for_each(|bytes| *bytes = from_planes(*bytes));
            }
        }
    }
}

/// The bytes of sixteen weights of 6 bits, three for every four of them, as three planes.
fn to_planes(bytes: [u8; 12]) -> [u8; 12] {
    std::array::from_fn(|place| bytes[place % 4 * 3 + place / 4])
}

/// The other way round.
fn from_planes(planes: [u8; 12]) -> [u8; 12] {
    std::array::from_fn(|place| planes[place % 3 * 4 + place / 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_and_single_units_agree_and_are_read_back() {
        let forms = [(4, 32), (4, 64), (6, 32), (6, 64), (8, 32), (8, 128)];
        let both = [Packing::Interleaved, Packing::Planes];
        for ((bits, group), packing) in forms.into_iter().flat_map(|it| both.map(|to| (it, to))) {
            for groups in [1, 5, 16, 37] {
                let shape = [8, groups * group];
                let repack = Repack::new(shape, [bits, group], packing).unwrap();
                let stored: Vec<u8> =
                    (0..2 * repack.quad_bytes()).map(|i| (i * 31 + i / 251) as u8).collect();
                let mut found = stored.clone();
                repack.interleave(&mut found);
                let mut expected = vec![0; stored.len()];
                let fours = stored.chunks_exact(repack.quad_bytes());
                for (from, to) in fours.zip(expected.chunks_exact_mut(repack.quad_bytes())) {
                    repack.interleave_four(from, to);
                }
                assert!(found == expected, "{packing:?}: {bits} bits, {groups} groups of {group}");
                for (row, from) in stored.chunks_exact(repack.row_bytes()).enumerate() {
                    let mut read = vec![0; from.len()];
                    repack.read(&found, row, 0, &mut read);
                    assert!(read == from, "row {row}: {bits} bits, {groups} groups of {group}");
                }
            }
        }
    }
}
