//! Blocks whose columns are entries of a codebook: the `IQ1`, `IQ2` and `IQ3` types of GGUF.
//!
//! | kind | bytes | block of 256 |
//! |---|---|---|
//! | `IQ1_S` | 50 | d, 32 low bytes of indices, 8 half words: 4 × 3 high bits, 3 bits of scale, a sign |
//! | `IQ1_M` | 56 | 32 low bytes, 16 bytes of 2 × (3 high bits, a sign), 4 half words: 4 × 3 bits of scale, 4 bits of d |
//! | `IQ2_XXS` | 66 | d, 8 × (4 indices, 4 × 7 bits of signs and 4 of scale) |
//! | `IQ2_XS` | 74 | d, 32 half words (9 bits of index, 7 of signs), 16 scales of 4 bits |
//! | `IQ2_S` | 82 | d, 32 low bytes, 32 bytes of signs, 8 bytes of high bits, 16 scales of 4 bits |
//! | `IQ3_XXS` | 98 | d, 64 indices, 8 words (4 × 7 bits of signs and 4 of scale) |
//! | `IQ3_S` | 110 | d, 64 low bytes, 8 bytes of high bits, 32 bytes of signs, 8 scales of 4 bits |
//!
//! An entry has eight columns (`IQ3`: four). Those of `IQ2` and `IQ3` are magnitudes with signs
//! beside them; seven bits of signs stand for eight, whose count of negative ones is even. Those of
//! `IQ1` are −1, 0 and 1, of which an eighth is added or taken off.
//!
//! `grids.bin` holds the codebooks as little-endian half words with the first column in the lowest
//! bits: two bits for each of eight columns, three for each of four.
//!
//! | from | entries | codebook |
//! |---|---|---|
//! | 0 | 256 | `IQ2_XXS` |
//! | 256 | 512 | `IQ2_XS` |
//! | 768 | 1,024 | `IQ2_S` |
//! | 1,792 | 2,048 | `IQ1_S` and `IQ1_M` |
//! | 3,840 | 256 | `IQ3_XXS` |
//! | 4,096 | 512 | `IQ3_S` |
//!
//! Source: `ggml-common.h` and `ggml-quants.c` of llama.cpp; products are formed in its order.

use super::Group;
use crate::stored::elements::{f16, half, word};

/// See the module.
static GRIDS: &[u8] = include_bytes!("grids.bin");

/// Entries of a codebook.
struct Codebook {
    first: usize,
    /// What the bits of a column stand for.
    magnitudes: &'static [u8],
}

const IQ2: &[u8] = &[8, 25, 43];
const IQ2_XXS: Codebook = Codebook { first: 0, magnitudes: IQ2 };
const IQ2_XS: Codebook = Codebook { first: 256, magnitudes: IQ2 };
const IQ2_S: Codebook = Codebook { first: 768, magnitudes: IQ2 };
const IQ3_XXS: Codebook = Codebook { first: 3840, magnitudes: &[4, 12, 20, 28, 36, 44, 52, 62] };
const IQ3_S: Codebook = Codebook { first: 4096, magnitudes: &[1, 3, 5, 7, 9, 11, 13, 15] };

/// Where the entries of `IQ1` begin.
const IQ1: usize = 1792;

/// What is taken off every integer of a block.
const ZERO: u8 = 64;

impl Codebook {
    /// The columns of an entry; a set bit of `signs` makes its column negative.
    fn columns(&self, index: usize, signs: u8, q: &mut [u8]) {
        let entry = half(GRIDS, self.first + index);
        let bits = 16 / 8 + usize::from(self.magnitudes.len() > 4);
        for (column, q) in q.iter_mut().enumerate() {
            let choice = usize::from(entry >> (bits * column)) & ((1 << bits) - 1);
            let magnitude = self.magnitudes[choice];
            *q = if signs >> column & 1 == 0 { ZERO + magnitude } else { ZERO - magnitude };
        }
    }
}

/// The columns of an entry of `IQ1` in eighths.
fn eighths(index: usize, is_less: bool, q: &mut [u8]) {
    let entry = half(GRIDS, IQ1 + index);
    for (column, q) in q.iter_mut().enumerate() {
        let columns = ZERO - 8 + 8 * (entry >> (2 * column) & 3) as u8;
        *q = if is_less { columns - 1 } else { columns + 1 };
    }
}

/// Eight signs of seven bits.
const fn even_signs(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | (bits.count_ones() as u8 & 1) << 7
}

/// Four bits of a byte of two.
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (index % 2 * 4) & 15
}

fn put(q: &[u8], scale: f32, take: &mut impl FnMut(&Group)) {
    take(&Group { q, scale, bias: 0.0, zero: Some(ZERO) });
}

pub(super) fn iq2_xxs(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (d, values) = (f16(half(block, 0)), &block[2..]);
    for (index, q) in q.chunks_exact_mut(32).enumerate() {
        let signs = word(values, 2 * index + 1);
        for (part, q) in q.chunks_exact_mut(8).enumerate() {
            let entry = usize::from(values[8 * index + part]);
            IQ2_XXS.columns(entry, even_signs(signs >> (7 * part)), q);
        }
        put(q, d * (0.5 + (signs >> 28) as f32) * 0.25, take);
    }
}

pub(super) fn iq2_xs(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let d = f16(half(block, 0));
    let (values, scales) = block[2..].split_at(64);
    for (index, q) in q.chunks_exact_mut(16).enumerate() {
        for (part, q) in q.chunks_exact_mut(8).enumerate() {
            let value = half(values, 2 * index + part);
            IQ2_XS.columns(usize::from(value & 511), even_signs(u32::from(value >> 9)), q);
        }
        put(q, d * (0.5 + f32::from(nibble(scales, index))) * 0.25, take);
    }
}

pub(super) fn iq2_s(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let d = f16(half(block, 0));
    let (low, rest) = block[2..].split_at(32);
    let (signs, rest) = rest.split_at(32);
    let (high, scales) = rest.split_at(8);
    for (index, q) in q.chunks_exact_mut(16).enumerate() {
        for (part, q) in q.chunks_exact_mut(8).enumerate() {
            let at = 2 * index + part;
            let high = usize::from(high[at / 4] >> (at % 4 * 2) & 3);
            IQ2_S.columns(usize::from(low[at]) | high << 8, signs[at], q);
        }
        put(q, d * (0.5 + f32::from(nibble(scales, index))) * 0.25, take);
    }
}

pub(super) fn iq3_xxs(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let d = f16(half(block, 0));
    let (values, scales) = block[2..].split_at(64);
    for (index, q) in q.chunks_exact_mut(32).enumerate() {
        let signs = word(scales, index);
        for (part, q) in q.chunks_exact_mut(4).enumerate() {
            let own = even_signs(signs >> (7 * (part / 2))) >> (part % 2 * 4);
            IQ3_XXS.columns(usize::from(values[8 * index + part]), own, q);
        }
        put(q, d * (0.5 + (signs >> 28) as f32) * 0.5, take);
    }
}

pub(super) fn iq3_s(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let d = f16(half(block, 0));
    let (low, rest) = block[2..].split_at(64);
    let (high, rest) = rest.split_at(8);
    let (signs, scales) = rest.split_at(32);
    for (index, q) in q.chunks_exact_mut(32).enumerate() {
        for (part, q) in q.chunks_exact_mut(4).enumerate() {
            let at = 8 * index + part;
            let high = usize::from(high[index] >> part & 1);
            IQ3_S.columns(usize::from(low[at]) | high << 8, nibble(signs, at), q);
        }
        put(q, d * f32::from(1 + 2 * nibble(scales, index)), take);
    }
}

pub(super) fn iq1_s(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let d = f16(half(block, 0));
    let (low, high) = block[2..].split_at(32);
    for (index, q) in q.chunks_exact_mut(32).enumerate() {
        let high = half(high, index);
        for (part, q) in q.chunks_exact_mut(8).enumerate() {
            let entry = usize::from(low[4 * index + part]);
            eighths(entry | usize::from(high >> (3 * part) & 7) << 8, high >> 15 == 1, q);
        }
        put(q, d * f32::from(2 * (high >> 12 & 7) + 1) * 0.125, take);
    }
}

pub(super) fn iq1_m(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (low, rest) = block.split_at(32);
    let (high, scales) = rest.split_at(16);
    let d = (0..4).fold(0, |d, index| d | half(scales, index) >> 12 << (4 * index));
    let d = f16(d);
    for (index, q) in q.chunks_exact_mut(16).enumerate() {
        for (part, q) in q.chunks_exact_mut(8).enumerate() {
            let at = 2 * index + part;
            let high = nibble(high, at);
            eighths(usize::from(low[at]) | usize::from(high & 7) << 8, high >> 3 == 1, q);
        }
        let scale = half(scales, index / 4) >> (index % 4 * 3) & 7;
        put(q, d * f32::from(2 * scale + 1) * 0.125, take);
    }
}
