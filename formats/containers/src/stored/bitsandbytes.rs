//! bitsandbytes: indices of four bits into a table, with the largest magnitude of each block, or
//! bytes with the largest magnitude of each row.
//!
//! Four bits. Blocks run over the whole tensor, row after row, and can cross rows.
//!
//! | part | type | length | content |
//! |---|---|---|---|
//! | weight | bytes | elements / 2 | the high nibble is the even element |
//! | `quant_map` | F32 | 16 | what the nibbles stand for |
//! | `absmax` | F32, or bytes when nested | blocks | multiplies |
//! | `nested_quant_map` | F32 | 256 | nested: what the bytes of `absmax` stand for |
//! | `nested_absmax` | F32 | blocks of blocks | nested: multiplies; the offset is added after |
//!
//! Eight bits: `weight` I8 `[out, in]` and `SCB` F32 `[out]`, `q · SCB / 127`.
//!
//! Source: `functional.py` of bitsandbytes (`QuantState`, `dequantize_4bit`,
//! `int8_vectorwise_dequant`); products are formed in its order.

use std::ops::Range;

use super::{Damage, Layout, Window, elements::word};

/// The factor by which bitsandbytes divides by 127.
const PER_STEP: f32 = 7.874_016e-3;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct FourBits {
    pub(super) elements: u64,
    pub(super) width: u64,
    pub(super) block: u64,
    pub(super) nested: Option<Nested>,
}

/// Magnitudes that are quantized themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nested {
    /// Blocks that share a magnitude.
    pub(super) block: u64,
    pub(super) offset: f32,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct EightBits {
    pub(super) width: u64,
}

/// Some bytes of a tensor, whatever its shape.
pub(super) fn span(bytes: Range<u64>, size: u64) -> Window {
    Window { rows: 0..1, row_bytes: size, columns: bytes }
}

/// Float `index`.
fn float(bytes: &[u8], index: usize) -> f32 {
    f32::from_bits(word(bytes, index))
}

impl FourBits {
    /// Elements of rows, and the blocks that they are in.
    const fn range(&self, rows: &Range<u64>) -> (Range<u64>, Range<u64>) {
        let (start, end) = (rows.start * self.width, rows.end * self.width);
        (start..end, start / self.block..end.div_ceil(self.block))
    }
}

impl Layout for FourBits {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let (elements, blocks) = self.range(&rows);
        let count = self.elements.div_ceil(self.block);
        let floats =
            |range: Range<u64>, count: u64| span(4 * range.start..4 * range.end, 4 * count);
        let mut windows = vec![
            span(elements.start / 2..elements.end.div_ceil(2), self.elements.div_ceil(2)),
            floats(0..16, 16),
        ];
        let Some(nested) = self.nested else {
            windows.push(floats(blocks, count));
            return windows;
        };
        let outer = blocks.start / nested.block..blocks.end.div_ceil(nested.block);
        windows.extend([
            span(blocks, count),
            floats(0..256, 256),
            floats(outer, count.div_ceil(nested.block)),
        ]);
        windows
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let (elements, blocks) = self.range(&rows);
        let table: [f32; 16] = std::array::from_fn(|index| float(parts[1], index));
        let first_byte = elements.start / 2;
        for block in blocks.clone() {
            let at = (block - blocks.start) as usize;
            let magnitude = match self.nested {
                None => float(parts[2], at),
                Some(nested) => {
                    let step = float(parts[3], usize::from(parts[2][at]));
                    let outer = block / nested.block - blocks.start / nested.block;
                    step * float(parts[4], outer as usize) + nested.offset
                }
            };
            let own = (block * self.block).max(elements.start)
                ..((block + 1) * self.block).min(elements.end);
            for element in own {
                let byte = parts[0][(element / 2 - first_byte) as usize];
                let nibble = if element % 2 == 0 { byte >> 4 } else { byte & 15 };
                out[(element - elements.start) as usize] = table[usize::from(nibble)] * magnitude;
            }
        }
        Ok(())
    }
}

impl Layout for EightBits {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows.clone(), self.width), Window::rows(rows, 4)]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let width = self.width.max(1) as usize;
        let lines = parts[0].chunks_exact(width).zip(out.chunks_exact_mut(width));
        for (row, (bytes, out)) in lines.enumerate() {
            let magnitude = float(parts[1], row);
            for (byte, out) in bytes.iter().zip(out) {
                *out = f32::from(*byte as i8) * magnitude * PER_STEP;
            }
        }
        Ok(())
    }
}
