//! Weight matrices `[out, in]` as they lie in a package, and how a row becomes f32.
//!
//! Affine groups follow MLX: `w = scale · q + bias`, one scale and bias per group of consecutive
//! inputs, `q` packed as a little-endian bit stream that starts anew with each row: input `k`
//! occupies bits `k · bits .. (k + 1) · bits` of the row's words.

use std::ops::Range;

use shardpack_quantize::FloatFormat;
use zerocopy::IntoBytes;

use crate::{
    float_groups::read,
    floats::{Floats, addresses},
    lanes::{LANES, Lanes, accumulate_fused, tree},
    quantized::Packed,
    repack::{Packing, QUAD, Repack},
};

const _: () = assert!(cfg!(target_endian = "little"), "words are read as bytes");

/// Inputs decoded at once: the largest group, and small enough for the L1 cache.
pub(crate) const SPAN: usize = 128;

/// Weights that one run of `bits` words holds, for any number of bits.
const BLOCK: usize = 32;

/// A matrix `[rows, cols]`, rows contiguous: `rows` outputs, `cols` inputs.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    rows: usize,
    cols: usize,
    weights: Weights<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Weights<'a> {
    Plain(Floats<'a>),
    Affine {
        words: &'a [u32],
        scales: Floats<'a>,
        biases: Floats<'a>,
        bits: usize,
        group: usize,
        packing: Packing,
    },
    Float {
        words: &'a [u32],
        scales: &'a [u8],
        format: FloatFormat,
    },
}

/// Whether affine groups of this form can be read.
#[must_use]
pub const fn affine_is_supported(bits: u32, group: u32) -> bool {
    matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128)
}

impl<'a> Matrix<'a> {
    /// A matrix of floats.
    #[must_use]
    pub fn plain(rows: usize, cols: usize, weights: Floats<'a>) -> Self {
        assert_eq!(weights.len(), rows * cols, "weights of a {rows} x {cols} matrix");
        Self { rows, cols, weights: Weights::Plain(weights) }
    }

    /// A matrix of affine groups: `words` `[rows, cols · bits / 32]`, `scales` and `biases`
    /// `[rows, cols / group]`.
    #[must_use]
    pub fn affine(
        [rows, cols]: [usize; 2],
        words: &'a [u32],
        scales: Floats<'a>,
        biases: Floats<'a>,
        [bits, group]: [u32; 2],
    ) -> Self {
        assert!(affine_is_supported(bits, group), "{bits} bits in groups of {group}");
        let (bits, group) = (bits as usize, group as usize);
        assert!(cols.is_multiple_of(group), "{cols} inputs in groups of {group}");
        assert_eq!(words.len(), rows * cols / BLOCK * bits, "words of a {rows} x {cols} matrix");
        assert_eq!(scales.len(), rows * cols / group, "scales of a {rows} x {cols} matrix");
        assert_eq!(biases.len(), scales.len(), "biases of a {rows} x {cols} matrix");
        let packing = Packing::Stored;
        Self {
            rows,
            cols,
            weights: Weights::Affine { words, scales, biases, bits, group, packing },
        }
    }

    /// A matrix of float groups: `words` `[rows, cols · bits / 32]`, `scales` `[rows, cols / group]`.
    #[must_use]
    pub fn float_groups(
        [rows, cols]: [usize; 2],
        words: &'a [u32],
        scales: &'a [u8],
        format: FloatFormat,
    ) -> Self {
        let (bits, group) = (format.bits() as usize, format.group_size() as usize);
        assert!(cols.is_multiple_of(group), "{cols} inputs in groups of {group}");
        assert_eq!(words.len(), rows * cols * bits / 32, "words of a {rows} x {cols} matrix");
        assert_eq!(scales.len(), rows * cols / group, "scales of a {rows} x {cols} matrix");
        Self { rows, cols, weights: Weights::Float { words, scales, format } }
    }

    /// The same matrix, whose words stand as `packing` says.
    ///
    /// # Panics
    /// When words of its form are never interleaved.
    #[must_use]
    pub fn packed_as(mut self, found: Packing) -> Self {
        let shape = [self.rows, self.cols];
        if let Weights::Affine { bits, group, packing, .. } = &mut self.weights {
            let can =
                found == Packing::Stored || Repack::new(shape, [*bits, *group], found).is_some();
            assert!(can, "{shape:?} with {bits} bits in groups of {group} is not interleaved");
            *packing = found;
        }
        self
    }

    /// The matrix of some of its rows.
    ///
    /// # Panics
    /// When they are none of it, or begin or end within four that are interleaved.
    #[must_use]
    pub fn slice(&self, rows: Range<usize>) -> Self {
        let weights = match self.weights {
            Weights::Plain(weights) => {
                Weights::Plain(weights.slice(rows.start * self.cols..rows.end * self.cols))
            }
            Weights::Affine { words, scales, biases, bits, group, packing } => {
                let by_fours = rows.start.is_multiple_of(QUAD) && rows.end.is_multiple_of(QUAD);
                assert!(packing == Packing::Stored || by_fours, "{rows:?} of interleaved rows");
                let words_per_row = self.cols / BLOCK * bits;
                let groups = rows.start * self.cols / group..rows.end * self.cols / group;
                Weights::Affine {
                    words: &words[rows.start * words_per_row..rows.end * words_per_row],
                    scales: scales.slice(groups.clone()),
                    biases: biases.slice(groups),
                    bits,
                    group,
                    packing,
                }
            }
            Weights::Float { words, scales, format } => {
                let words_per_row = self.cols * format.bits() as usize / 32;
                let groups_per_row = self.cols / format.group_size() as usize;
                Weights::Float {
                    words: &words[rows.start * words_per_row..rows.end * words_per_row],
                    scales: &scales[rows.start * groups_per_row..rows.end * groups_per_row],
                    format,
                }
            }
        };
        Self { rows: rows.len(), cols: self.cols, weights }
    }

    /// Where the weights lie; a name for the matrix as long as it is there.
    #[must_use]
    pub fn address(&self) -> usize {
        match self.weights {
            Weights::Plain(weights) => weights.addresses(0..0).start,
            Weights::Affine { words, .. } | Weights::Float { words, .. } => addresses(words).start,
        }
    }

    /// Addresses of the weights, scales and biases of the rows from `first` on that take about
    /// `size_bytes`, or of all that there are.
    pub(crate) fn beginning(&self, first: usize, size_bytes: usize) -> [Range<usize>; 3] {
        let held = |size: usize| (first + size_bytes / size.max(1)).min(self.rows);
        match self.weights {
            Weights::Plain(weights) => {
                let row = weights.size_bytes() / self.rows.max(1);
                [weights.addresses(first * self.cols..held(row) * self.cols), 0..0, 0..0]
            }
            Weights::Affine { words, scales, biases, bits, group, .. } => {
                let per_row = self.cols / BLOCK * bits;
                let rows = first..held(per_row * size_of::<u32>());
                let words = &words[rows.start * per_row..rows.end * per_row];
                let groups = rows.start * self.cols / group..rows.end * self.cols / group;
                [addresses(words), scales.addresses(groups.clone()), biases.addresses(groups)]
            }
            Weights::Float { words, scales, format } => {
                let per_row = self.cols * format.bits() as usize / 32;
                let groups = self.cols / format.group_size() as usize;
                let rows = first..held(per_row * size_of::<u32>());
                let words = &words[rows.start * per_row..rows.end * per_row];
                let scales = &scales[rows.start * groups..rows.end * groups];
                [addresses(words), addresses(scales), 0..0]
            }
        }
    }

    /// Outputs.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The quantized weights, if there are kernels for their form.
    pub(crate) fn packed(&self) -> Option<Packed<'a>> {
        match self.weights {
            Weights::Affine { words, scales, biases, bits, group, packing } => {
                let shape = [self.rows, self.cols];
                Packed::new(shape, words.as_bytes(), scales, biases, [bits, group], packing)
            }
            // Values are multiplied in f32, whatever activations are asked for.
            Weights::Plain(_) | Weights::Float { .. } => None,
        }
    }

    /// Writes row `row` as f32 to `out`, `cols` long.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row}, {} values", out.len());
        for (index, out) in out.chunks_mut(SPAN).enumerate() {
            self.decode(row, index * SPAN, out);
        }
    }

    /// Writes the inputs of row `row` from `start` on, where a span begins, as f32 to `out`.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    pub(crate) fn read_row(&self, row: usize, start: usize, out: &mut [f32]) {
        assert!(row < self.rows && start.is_multiple_of(SPAN), "part of row {row} from {start}");
        for (index, out) in out.chunks_mut(SPAN).enumerate() {
            self.decode(row, start + index * SPAN, out);
        }
    }

    /// `Σ row · x` in lanes, products fused with their sums.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    #[must_use]
    pub fn row_dot(&self, row: usize, x: &[f32]) -> f32 {
        const { assert!(SPAN.is_multiple_of(LANES), "pieces of a row start at lane 0") };
        let mut lanes: Lanes = [0.0; LANES];
        let mut span = [0.0; SPAN];
        for (index, x) in x.chunks(SPAN).enumerate() {
            let span = &mut span[..x.len()];
            self.decode(row, index * SPAN, span);
            accumulate_fused(&mut lanes, span, x);
        }
        tree(lanes)
    }

    /// Writes inputs `start ..` of a row, as many as `out` has: whole groups.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn decode(&self, row: usize, start: usize, out: &mut [f32]) {
        match self.weights {
            Weights::Plain(weights) => weights.read(row * self.cols + start, out),
            Weights::Float { words, scales, format } => {
                let first = row * self.cols + start;
                let packed = &words.as_bytes()[first * format.bits() as usize / 8..];
                let scales = &scales[first / format.group_size() as usize..];
                read(format, packed, scales, out);
            }
            Weights::Affine { words, scales, biases, bits, group, packing } => {
                let first = row * self.cols + start;
                let affine = Affine { scales, biases, first: first / group };
                let size = out.len() / 8 * bits;
                let mut stored = [0; SPAN];
                let packed = match packing {
                    Packing::Stored => &words.as_bytes()[first / 8 * bits..][..size],
                    Packing::Interleaved | Packing::Planes => {
                        let shape = [self.rows, self.cols];
                        let repack = Repack::new(shape, [bits, group], packing);
                        let repack = repack.expect("checked before");
                        let start = start / 8 * bits;
                        repack.read(words.as_bytes(), row, start, &mut stored[..size]);
                        &stored[..size]
                    }
                };
                match bits {
                    2 => unpack::<2>(packed, &affine, group, out),
                    3 => unpack::<3>(packed, &affine, group, out),
                    4 => unpack::<4>(packed, &affine, group, out),
                    5 => unpack::<5>(packed, &affine, group, out),
                    6 => unpack::<6>(packed, &affine, group, out),
                    8 => unpack::<8>(packed, &affine, group, out),
                    _ => unreachable!("the constructor admits no {bits} bits"),
                }
            }
        }
    }
}

/// Scales and biases from one group on.
struct Affine<'a> {
    scales: Floats<'a>,
    biases: Floats<'a>,
    first: usize,
}

/// The number of bits is constant here, so that shifts and masks are too.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn unpack<const BITS: usize>(packed: &[u8], affine: &Affine<'_>, group: usize, out: &mut [f32]) {
    // Eight values fill as many bytes as a value has bits.
    let (packed, _) = packed.as_chunks::<BITS>();
    let groups = packed.chunks_exact(group / 8).zip(out.chunks_exact_mut(group));
    for (index, (packed, out)) in groups.enumerate() {
        let scale = affine.scales.get(affine.first + index);
        let bias = affine.biases.get(affine.first + index);
        for (packed, out) in packed.iter().zip(out.as_chunks_mut::<8>().0) {
            let mut bytes = [0; 8];
            bytes[..BITS].copy_from_slice(packed);
            let eight = u64::from_le_bytes(bytes);
            for (index, out) in out.iter_mut().enumerate() {
                let quantized = (eight >> (index * BITS)) as u32 & ((1 << BITS) - 1);
                // Through i32, which every vector unit converts; the value is below 256.
                *out = scale * (quantized as i32 as f32) + bias;
            }
        }
    }
}
