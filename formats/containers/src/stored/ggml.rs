//! The blocks of GGUF files. Scales are F16; everything is little-endian.
//!
//! | kind | bytes | block |
//! |---|---|---|
//! | `Q4_0` | 18 | d, 16 bytes: low nibbles are the first half; `(q − 8) · d` |
//! | `Q4_1` | 20 | d, m, nibbles; `q · d + m` |
//! | `Q5_0` | 22 | d, u32 of fifth bits, nibbles; `(q − 16) · d` |
//! | `Q5_1` | 24 | d, m, u32 of fifth bits, nibbles; `q · d + m` |
//! | `Q8_0` | 34 | d, 32 signed bytes; `q · d` |
//! | `Q2_K` | 84 | 16 bytes (scale, least), 64 bytes of q, d, dmin; `d · s · q − dmin · m` |
//! | `Q3_K` | 110 | 32 bytes of third bits, 64 bytes of q, 12 bytes of scales, d; `d · (s − 32) · (q − 4)` |
//! | `Q4_K` | 144 | d, dmin, 12 bytes of scales and leasts, 128 bytes of q; `d · s · q − dmin · m` |
//! | `Q5_K` | 176 | d, dmin, 12 bytes of scales and leasts, 32 bytes of fifth bits, 128 bytes of q; the same |
//! | `Q6_K` | 210 | 128 bytes of low nibbles, 64 bytes of high bits, 16 signed scales, d; `d · s · (q − 32)` |
//! | `IQ4_NL` | 18 | d, nibbles; `d · table(q)` |
//! | `IQ4_XS` | 136 | d, 16 bits and 4 bytes of scales, 128 bytes of nibbles; `d · (s − 32) · table(q)` |
//! | `TQ1_0` | 54 | 48 + 4 bytes of five and four digits of base 3, d; `(q − 1) · d` |
//! | `TQ2_0` | 66 | 64 bytes of q, d; `(q − 1) · d` |
//! | `Q1_0` | 18 | d, a bit for each of 128 columns; −d or d |
//! | `NVFP4` | 36 | 4 scales of E4M3 without sign, nibbles of e2m1 for each 16; doubled values, halved scale |
//! | `MXFP4` | 17 | an exponent counted from 127, nibbles of e2m1; doubled values, halved scale |
//!
//! The `IQ1`, `IQ2` and `IQ3` types are in `codebook`.
//!
//! Source: `ggml-common.h` and `ggml-quants.c` of llama.cpp; products are formed in its order.

mod codebook;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{E4M3, f16, half, number, word},
};
use crate::gguf::Kind;
use shardpack_quantize::dtype::Dtype;

/// What the indices of `IQ4_NL` and `IQ4_XS` stand for, counted from 128: −127 to 113.
const TABLE: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// What the nibbles of `MXFP4` stand for, in halves and counted from 12.
const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Rows of blocks.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub(super) kind: Kind,
    pub(super) width: u64,
}

/// Floats whose rows are in another order.
#[derive(Clone, Debug)]
pub(super) struct Floats {
    pub(super) dtype: Dtype,
    pub(super) width: u64,
}

/// Some neighbouring columns of every row of floats.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    pub(super) dtype: Dtype,
    /// Columns that are stored.
    pub(super) whole: u64,
    /// The first that is taken.
    pub(super) first: u64,
    /// How many are taken.
    pub(super) width: u64,
}

/// A vector of floats whose elements are in the order of a rotary embedding's rows.
#[derive(Clone, Debug)]
pub(super) struct TurnedVector {
    pub(super) dtype: Dtype,
    pub(super) len: u64,
    /// Elements of a head.
    pub(super) head: u64,
}

/// A vector of floats that are one more than what they stand for.
#[derive(Clone, Debug)]
pub(super) struct OneLess(pub(super) Floats);

/// A group of up to 32 neighbouring columns: `q · scale + bias`, with `q` counted from `zero`.
struct Group<'a> {
    q: &'a [u8],
    scale: f32,
    bias: f32,
    /// What is taken off every integer before it is multiplied; such groups have no bias.
    zero: Option<u8>,
}

impl Blocks {
    const fn row_bytes(&self) -> u64 {
        self.width / self.kind.block_len() * self.kind.block_bytes()
    }

    /// Calls `take` with every group in order.
    fn each(&self, bytes: &[u8], mut take: impl FnMut(&Group)) {
        let mut q = [0; 256];
        let q = &mut q[..self.kind.block_len() as usize];
        for block in bytes.chunks_exact(self.kind.block_bytes() as usize) {
            match self.kind {
                Kind::Floats(_) => unreachable!("floats have no blocks"),
                Kind::Q4_0 | Kind::Q4_1 | Kind::Q5_0 | Kind::Q5_1 | Kind::Q8_0 => {
                    take(&small(self.kind, block, q));
                }
                Kind::Q2K => q2_k(block, q, &mut take),
                Kind::Q3K => q3_k(block, q, &mut take),
                Kind::Q4K | Kind::Q5K => q4_k(self.kind, block, q, &mut take),
                Kind::Q6K => q6_k(block, q, &mut take),
                Kind::Iq4Nl => {
                    looked_up(&TABLE, &block[2..], q);
                    take(&Group { q, scale: f16(half(block, 0)), bias: 0.0, zero: Some(128) });
                }
                Kind::Iq4Xs => iq4_xs(block, q, &mut take),
                Kind::Iq1S => codebook::iq1_s(block, q, &mut take),
                Kind::Iq1M => codebook::iq1_m(block, q, &mut take),
                Kind::Iq2Xxs => codebook::iq2_xxs(block, q, &mut take),
                Kind::Iq2Xs => codebook::iq2_xs(block, q, &mut take),
                Kind::Iq2S => codebook::iq2_s(block, q, &mut take),
                Kind::Iq3Xxs => codebook::iq3_xxs(block, q, &mut take),
                Kind::Iq3S => codebook::iq3_s(block, q, &mut take),
                Kind::Tq1_0 | Kind::Tq2_0 | Kind::Q1_0 => take(&ternary(self.kind, block, q)),
                Kind::Nvfp4 => nvfp4(block, q, &mut take),
                Kind::Mxfp4 => {
                    looked_up(&E2M1, &block[1..], q);
                    take(&Group { q, scale: half_power(block[0]), bias: 0.0, zero: Some(12) });
                }
            }
        }
    }
}

/// A block of 32.
fn small<'q>(kind: Kind, block: &[u8], q: &'q mut [u8]) -> Group<'q> {
    let scale = f16(half(block, 0));
    let least = f16(half(block, 1));
    let (zero, bias, values) = match kind {
        Kind::Q4_0 => (Some(8), 0.0, &block[2..]),
        Kind::Q4_1 | Kind::Q5_1 => (None, least, &block[4..]),
        Kind::Q5_0 => (Some(16), 0.0, &block[2..]),
        _ => {
            for (q, byte) in q.iter_mut().zip(&block[2..]) {
                // From two's complement to an offset of 128.
                *q = byte ^ 0x80;
            }
            return Group { q, scale, bias: 0.0, zero: Some(128) };
        }
    };
    let has_fifth = matches!(kind, Kind::Q5_0 | Kind::Q5_1);
    let (fifth, values) = if has_fifth { (word(values, 0), &values[4..]) } else { (0, values) };
    for (index, byte) in values.iter().enumerate() {
        q[index] = byte & 15 | ((fifth >> index & 1) << 4) as u8;
        q[index + 16] = byte >> 4 | ((fifth >> (index + 16) & 1) << 4) as u8;
    }
    Group { q, scale, bias, zero }
}

fn q2_k(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (scales, rest) = block.split_at(16);
    let (d, least) = (f16(half(rest, 32)), f16(half(rest, 33)));
    for (index, q) in q.iter_mut().enumerate() {
        // Each 128 columns are 32 bytes, whose pairs of bits are 32 columns each.
        let byte = rest[index / 128 * 32 + index % 32];
        *q = byte >> (index % 128 / 32 * 2) & 3;
    }
    for (q, scale) in q.chunks_exact(16).zip(scales) {
        let bias = -(least * f32::from(scale >> 4));
        take(&Group { q, scale: d * f32::from(scale & 15), bias, zero: None });
    }
}

fn q3_k(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (thirds, rest) = block.split_at(32);
    let (values, rest) = rest.split_at(64);
    let d = f16(half(rest, 6));
    for (index, q) in q.iter_mut().enumerate() {
        let low = values[index / 128 * 32 + index % 32] >> (index % 128 / 32 * 2) & 3;
        *q = low | (thirds[index % 32] >> (index / 32) & 1) << 2;
    }
    for (index, q) in q.chunks_exact(16).enumerate() {
        let low = if index < 8 { rest[index] & 15 } else { rest[index - 8] >> 4 };
        let scale = low | (rest[8 + index % 4] >> (index / 4 * 2) & 3) << 4;
        let scale = d * (f32::from(scale) - 32.0);
        take(&Group { q, scale, bias: 0.0, zero: Some(4) });
    }
}

fn q4_k(kind: Kind, block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (d, least) = (f16(half(block, 0)), f16(half(block, 1)));
    let (scales, rest) = block[4..].split_at(12);
    let (fifths, values) = if kind == Kind::Q5K { rest.split_at(32) } else { rest.split_at(0) };
    for (index, q) in q.iter_mut().enumerate() {
        // Each 64 columns are 32 bytes: low nibbles, then high ones.
        let byte = values[index / 64 * 32 + index % 32];
        let fifth = fifths.get(index % 32).map_or(0, |bits| bits >> (index / 32) & 1);
        *q = byte >> (index % 64 / 32 * 4) & 15 | fifth << 4;
    }
    for (index, q) in q.chunks_exact(32).enumerate() {
        let (scale, smallest) = match index {
            0..4 => (scales[index] & 63, scales[index + 4] & 63),
            _ => (
                scales[index + 4] & 15 | scales[index - 4] >> 6 << 4,
                scales[index + 4] >> 4 | scales[index] >> 6 << 4,
            ),
        };
        let bias = -(least * f32::from(smallest));
        take(&Group { q, scale: d * f32::from(scale), bias, zero: None });
    }
}

fn q6_k(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let d = f16(half(rest, 8));
    for (index, q) in q.iter_mut().enumerate() {
        // Each 128 columns are 64 bytes of low nibbles and 32 of pairs of high bits.
        let (part, within) = (index / 128, index % 128);
        let nibble = low[part * 64 + within % 64] >> (within / 64 * 4) & 15;
        *q = nibble | (high[part * 32 + within % 32] >> (within / 32 * 2) & 3) << 4;
    }
    for (q, scale) in q.chunks_exact(16).zip(rest) {
        let scale = d * f32::from(*scale as i8);
        take(&Group { q, scale, bias: 0.0, zero: Some(32) });
    }
}

/// Half of the power of two whose exponent is counted from 127: `2^(byte − 128)`.
fn half_power(byte: u8) -> f32 {
    match byte {
        // Below the smallest exponent of a float.
        0 | 1 => f32::from_bits(0x20_0000 << byte),
        _ => f32::from_bits(u32::from(byte - 1) << 23),
    }
}

/// Values of a group's columns: low nibbles are the first half.
fn looked_up(table: &[u8; 16], nibbles: &[u8], q: &mut [u8]) {
    let (low, high) = q.split_at_mut(nibbles.len());
    for ((byte, low), high) in nibbles.iter().zip(low).zip(high) {
        (*low, *high) = (table[usize::from(byte & 15)], table[usize::from(byte >> 4)]);
    }
}

fn iq4_xs(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (d, high) = (f16(half(block, 0)), half(block, 1));
    let (low, values) = block[4..].split_at(4);
    let groups = q.chunks_exact_mut(32).zip(values.chunks_exact(16));
    for (index, (q, nibbles)) in groups.enumerate() {
        looked_up(&TABLE, nibbles, q);
        let low = low[index / 2] >> (index % 2 * 4) & 15;
        let scale = low | ((high >> (2 * index) & 3) << 4) as u8;
        let scale = d * (f32::from(scale) - 32.0);
        take(&Group { q, scale, bias: 0.0, zero: Some(128) });
    }
}

/// A block of −1, 0 and 1 (`Q1_0`: −1 and 1).
fn ternary<'q>(kind: Kind, block: &[u8], q: &'q mut [u8]) -> Group<'q> {
    let (values, d) =
        if kind == Kind::Q1_0 { (&block[2..], block) } else { block.split_at(block.len() - 2) };
    match kind {
        Kind::Q1_0 => {
            for (index, q) in q.iter_mut().enumerate() {
                *q = (values[index / 8] >> (index % 8) & 1) * 2;
            }
        }
        Kind::Tq2_0 => {
            for (index, q) in q.iter_mut().enumerate() {
                *q = values[index / 128 * 32 + index % 32] >> (index % 128 / 32 * 2) & 3;
            }
        }
        _ => {
            // Of so many bytes each, the first digits come first.
            let (first, rest) = q.split_at_mut(160);
            let (second, third) = rest.split_at_mut(80);
            let parts = [(0..32, first), (32..48, second), (48..52, third)];
            for (bytes, q) in parts {
                let bytes = &values[bytes];
                for (q, power) in q.chunks_exact_mut(bytes.len()).zip([1_u8, 3, 9, 27, 81]) {
                    for (q, byte) in q.iter_mut().zip(bytes) {
                        *q = ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8;
                    }
                }
            }
        }
    }
    Group { q, scale: f16(half(d, 0)), bias: 0.0, zero: Some(1) }
}

fn nvfp4(block: &[u8], q: &mut [u8], take: &mut impl FnMut(&Group)) {
    let (scales, values) = block.split_at(4);
    let groups = q.chunks_exact_mut(16).zip(values.chunks_exact(8));
    for ((q, nibbles), scale) in groups.zip(scales) {
        looked_up(&E2M1, nibbles, q);
        // What is no number elsewhere is nothing here.
        let scale = E4M3[usize::from(scale & 0x7f)];
        let scale = if scale.is_nan() { 0.0 } else { scale * 0.5 };
        take(&Group { q, scale, bias: 0.0, zero: Some(12) });
    }
}

impl Layout for Blocks {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows, self.row_bytes())]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let mut out = out.iter_mut();
        self.each(parts[0], |group| {
            for (q, out) in group.q.iter().zip(&mut out) {
                *out = match group.zero {
                    Some(zero) => (f32::from(*q) - f32::from(zero)) * group.scale,
                    None => f32::from(*q) * group.scale + group.bias,
                };
            }
        });
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        let grid = |bits, is_affine| Some(Grid { bits, group_size: 32, is_affine });
        let ternary =
            || Some(Grid { bits: 2, group_size: self.kind.block_len(), is_affine: false });
        match self.kind {
            Kind::Q4_0 => grid(4, false),
            Kind::Q5_0 | Kind::Mxfp4 => grid(5, false),
            // Of a table's values, every 8 bits hold all.
            Kind::Q8_0 | Kind::Iq4Nl | Kind::Iq4Xs => grid(8, false),
            Kind::Q4_1 | Kind::Q4K => grid(4, true),
            Kind::Q5_1 | Kind::Q5K => grid(5, true),
            Kind::Tq1_0 | Kind::Tq2_0 | Kind::Q1_0 => ternary(),
            // Groups of 16 are smaller than any that is stored, and the scales of the rest have too
            // many bits to be exact.
            _ => None,
        }
    }

    fn integers(&self, _: Range<u64>, parts: &[&[u8]], out: &mut Integers) -> Result<bool, Damage> {
        self.each(parts[0], |group| {
            out.q.extend_from_slice(group.q);
            out.scales.push(group.scale);
            out.biases.push(match group.zero {
                Some(zero) => -f32::from(zero) * group.scale,
                None => group.bias,
            });
        });
        Ok(true)
    }
}

impl Layout for Floats {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows, self.width * self.dtype.size_bytes() as u64)]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        for (index, out) in out.iter_mut().enumerate() {
            *out = number(self.dtype, parts[0], index);
        }
        Ok(())
    }
}

impl Layout for Columns {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let element = self.dtype.size_bytes() as u64;
        let columns = self.first * element..(self.first + self.width) * element;
        vec![Window { rows, row_bytes: self.whole * element, columns }]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        for (index, out) in out.iter_mut().enumerate() {
            *out = number(self.dtype, parts[0], index);
        }
        Ok(())
    }
}

impl Layout for OneLess {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        self.0.windows(rows)
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        self.0.decode(rows, parts, out)?;
        for out in out {
            *out -= 1.0;
        }
        Ok(())
    }
}

impl Layout for TurnedVector {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows, self.len * self.dtype.size_bytes() as u64)]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        for (index, out) in out.iter_mut().enumerate() {
            let stored = super::rotary_row(index as u64, self.head);
            *out = number(self.dtype, parts[0], stored as usize);
        }
        Ok(())
    }
}
