//! Weight matrices `[out, in]` as they lie in a package, and how a row becomes f32.
//!
//! Affine groups follow MLX: `w = scale · q + bias`, one scale and bias per group of consecutive
//! inputs, `q` packed as a little-endian bit stream that starts anew with each row: input `k`
//! occupies bits `k · bits .. (k + 1) · bits` of the row's words.

use crate::{
    floats::Floats,
    lanes::{LANES, Lanes, accumulate, tree},
};

/// Inputs decoded at once: the largest group, and small enough for the first cache.
const SPAN: usize = 128;

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
    Affine { words: &'a [u32], scales: Floats<'a>, biases: Floats<'a>, bits: usize, group: usize },
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
        Self { rows, cols, weights: Weights::Affine { words, scales, biases, bits, group } }
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

    /// Writes row `row` as f32 to `out`, `cols` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "row {row}, {} values", out.len());
        for (index, out) in out.chunks_mut(SPAN).enumerate() {
            self.decode(row, index * SPAN, out);
        }
    }

    /// `Σ row · x`, with the bits of [`crate::lanes::dot`] over the dequantized row.
    #[must_use]
    pub fn row_dot(&self, row: usize, x: &[f32]) -> f32 {
        const { assert!(SPAN.is_multiple_of(LANES), "pieces of a row start at lane 0") };
        let mut lanes: Lanes = [0.0; LANES];
        let mut span = [0.0; SPAN];
        for (index, x) in x.chunks(SPAN).enumerate() {
            let span = &mut span[..x.len()];
            self.decode(row, index * SPAN, span);
            accumulate(&mut lanes, span, x);
        }
        tree(lanes)
    }

    /// Writes inputs `start ..` of a row, as many as `out` has: whole groups.
    #[inline]
    fn decode(&self, row: usize, start: usize, out: &mut [f32]) {
        match self.weights {
            Weights::Plain(weights) => weights.read(row * self.cols + start, out),
            Weights::Affine { words, scales, biases, bits, group } => {
                let first = row * self.cols + start;
                for (index, out) in out.chunks_exact_mut(group).enumerate() {
                    let at = first / group + index;
                    let words = &words[at * group / BLOCK * bits..][..group / BLOCK * bits];
                    unpack_group(words, bits, [scales.get(at), biases.get(at)], out);
                }
            }
        }
    }
}

fn unpack_group(words: &[u32], bits: usize, affine: [f32; 2], out: &mut [f32]) {
    match bits {
        2 => unpack::<2>(words, affine, out),
        3 => unpack::<3>(words, affine, out),
        4 => unpack::<4>(words, affine, out),
        5 => unpack::<5>(words, affine, out),
        6 => unpack::<6>(words, affine, out),
        8 => unpack::<8>(words, affine, out),
        _ => unreachable!("the constructor admits no {bits} bits"),
    }
}

/// The number of bits is constant here, so that shifts and masks are too.
#[inline]
fn unpack<const BITS: usize>(words: &[u32], [scale, bias]: [f32; 2], out: &mut [f32]) {
    let (words, _) = words.as_chunks::<BITS>();
    let (out, _) = out.as_chunks_mut::<BLOCK>();
    for (words, out) in words.iter().zip(out) {
        for (index, out) in out.iter_mut().enumerate() {
            let (word, shift) = (index * BITS / 32, index * BITS % 32);
            let mut quantized = words[word] >> shift;
            if shift + BITS > 32 {
                quantized |= words[word + 1] << (32 - shift);
            }
            let quantized = quantized & ((1 << BITS) - 1);
            // Through i32, which every vector unit converts; the value is below 256.
            *out = scale * (quantized as i32 as f32) + bias;
        }
    }
}
