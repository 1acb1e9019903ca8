//! A tile: a handful of weight rows, unpacked and transposed.

#![expect(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables its instructions"
)]

use super::{FACTORS, Lanes, MOST_WORDS, Words, visits};
use crate::{pool::Buffer, quantized::Packed, repack::Packing};

/// A tile of weights, transposed.
pub(super) struct Tile {
    /// `[span as visited][word][output]`.
    pub(super) words: Words,
    /// `[span as visited][scale, bias][output]`; zero for outputs that there are not.
    pub(super) factors: Buffer<f32>,
    /// For each span the number of its visit.
    visits: Vec<usize>,
    /// A row's scales or biases.
    of_row: Vec<f32>,
}

impl Tile {
    pub(super) fn new(weights: &Packed<'_>, outputs: usize) -> Self {
        let mut numbers = vec![0; weights.spans];
        for (visit, span) in visits(weights.spans).enumerate() {
            numbers[span] = visit;
        }
        Self {
            words: Words::new(weights.spans * weights.span / 4 * outputs),
            factors: FACTORS.take(weights.spans * 2 * outputs),
            visits: numbers,
            of_row: vec![0.0; weights.row_scales()],
        }
    }

    /// Takes `held` weight rows from `first` on; of the tile's other outputs only the factors are
    /// set, to zero.
    #[inline(always)]
    pub(super) fn fill<L: Lanes, const BITS: usize>(
        &mut self,
        weights: &Packed<'_>,
        [first, held, outputs]: [usize; 3],
    ) {
        let words = weights.span / 4 * outputs;
        if weights.packing == Packing::Stored {
            let (row_bytes, span_bytes) = (weights.row_bytes(), weights.span_bytes());
            for (span, visit) in self.visits.iter().enumerate() {
                let packed = &weights.bytes[first * row_bytes + span * span_bytes..];
                let rows = SpanRows { packed, row_bytes, span_bytes, held, outputs };
                transpose::<BITS>(&rows, L::SIGNED, &mut self.words[visit * words..][..words]);
            }
        } else {
            L::transpose_interleaved(
                weights,
                [first, held, outputs],
                &self.visits,
                &mut self.words,
            );
        }
        let each = weights.spans_per_scale;
        for (place, floats) in [weights.scales, weights.biases].iter().enumerate() {
            for index in 0..held {
                floats.read((first + index) * self.of_row.len(), &mut self.of_row);
                for (visits, value) in self.visits.chunks_exact(each).zip(&self.of_row) {
                    for visit in visits {
                        self.factors[(visit * 2 + place) * outputs + index] = *value;
                    }
                }
            }
            if held == outputs {
                continue;
            }
            for visit in 0..self.visits.len() {
                self.factors[(visit * 2 + place) * outputs..][held..outputs].fill(0.0);
            }
        }
    }
}

/// The words of a span, four weights each: of 4-bit weights the even ones, then the odd ones.
#[inline(always)]
fn unpack<const BITS: usize>(packed: &[u8], words: &mut [u32; MOST_WORDS], signed: bool) {
    match BITS {
        4 => {
            let packed = packed.as_chunks::<4>().0;
            let half = packed.len();
            let (even, odd) = words.split_at_mut(half);
            for (packed, (even, odd)) in packed.iter().zip(even.iter_mut().zip(odd)) {
                let packed = u32::from_le_bytes(*packed);
                *even = packed & 0x0f0f_0f0f;
                *odd = packed >> 4 & 0x0f0f_0f0f;
            }
        }
        6 => {
            for (packed, word) in packed.as_chunks::<3>().0.iter().zip(words) {
                let fields = u32::from_le_bytes([packed[0], packed[1], packed[2], 0]);
                *word = fields & 0x3f
                    | (fields & 0xfc0) << 2
                    | (fields & 0x3_f000) << 4
                    | (fields & 0xfc_0000) << 6;
            }
        }
        _ => {
            let less_128 = if signed { 0x8080_8080 } else { 0 };
            for (packed, word) in packed.as_chunks::<4>().0.iter().zip(words) {
                *word = u32::from_le_bytes(*packed) ^ less_128;
            }
        }
    }
}

/// The same span of several weight rows.
struct SpanRows<'a> {
    /// From the first row's span on.
    packed: &'a [u8],
    /// Bytes from one row to the next.
    row_bytes: usize,
    span_bytes: usize,
    /// Rows there are.
    held: usize,
    /// Rows of the tile.
    outputs: usize,
}

impl SpanRows<'_> {
    #[inline(always)]
    fn row(&self, index: usize) -> &[u8] {
        &self.packed[index * self.row_bytes..][..self.span_bytes]
    }
}

/// Unpacks a span of the weight rows of a tile and turns it: word `w` of row `i` goes to
/// `out[w · outputs + i]`.
#[inline(always)]
fn transpose<const BITS: usize>(from: &SpanRows<'_>, signed: bool, out: &mut [u32]) {
    let mut words = [0; MOST_WORDS];
    for index in 0..from.held {
        unpack::<BITS>(from.row(index), &mut words, signed);
        for (out, word) in out[index..].iter_mut().step_by(from.outputs).zip(&words) {
            *out = *word;
        }
    }
}
