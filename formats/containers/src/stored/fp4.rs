//! Four-bit floats (E2M1) with block scales: MXFP4 and NVFP4.
//!
//! | part | type | shape | content |
//! |---|---|---|---|
//! | values | bytes | `[…, out, in / 2]` | the low nibble is the even column |
//! | scales | E8M0 or E4M3 | `[…, out, in / group]` | groups of 32 (MXFP4) or 16 (NVFP4) |
//! | second | F32 | one | NVFP4: multiplies the scale (modelopt) or divides it (compressed-tensors) |

use std::ops::Range;

use super::{
    Damage, Grid, Integers, Layout, Window,
    elements::{E2M1, E4M3, e8m0, word},
};

/// What the scales' bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockScale {
    E8M0,
    E4M3,
}

/// What a second scale does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Second {
    None,
    Multiplies,
    Divides,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Fp4 {
    pub(super) width: u64,
    pub(super) group_size: u64,
    pub(super) scale: BlockScale,
    pub(super) second: Second,
}

impl Fp4 {
    fn scale(&self, byte: u8, parts: &[&[u8]]) -> f32 {
        let scale = match self.scale {
            BlockScale::E8M0 => e8m0(byte),
            BlockScale::E4M3 => E4M3[usize::from(byte)],
        };
        match self.second {
            Second::None => scale,
            Second::Multiplies => scale * f32::from_bits(word(parts[2], 0)),
            Second::Divides => scale / f32::from_bits(word(parts[2], 0)),
        }
    }
}

impl Layout for Fp4 {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let mut windows = vec![
            Window::rows(rows.clone(), self.width / 2),
            Window::rows(rows, self.width / self.group_size),
        ];
        if self.second != Second::None {
            windows.push(Window::rows(0..1, 4));
        }
        windows
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let group = self.group_size as usize;
        // A row has whole groups, so groups follow one another through all rows.
        let groups = parts[0].chunks_exact(group / 2).zip(parts[1]);
        for ((bytes, scale), out) in groups.zip(out.chunks_exact_mut(group)) {
            let scale = self.scale(*scale, parts);
            // modelopt's table has no negative zero.
            let zero = if self.second == Second::Multiplies { 0.0 } else { -0.0 };
            for (byte, pair) in bytes.iter().zip(out.chunks_exact_mut(2)) {
                let value = |nibble: u8| {
                    if nibble == 8 { zero } else { E2M1[usize::from(nibble)] }
                };
                pair[0] = value(byte & 15) * scale;
                pair[1] = value(byte >> 4) * scale;
            }
        }
        Ok(())
    }

    /// The values of E2M1 are halves from −6 to 6: 25 steps. The grid of NVFP4's groups would be
    /// finer than any that is stored.
    fn grid(&self) -> Option<Grid> {
        let is_mx = self.scale == BlockScale::E8M0 && self.second == Second::None;
        is_mx.then_some(Grid { bits: 5, group_size: self.group_size, is_affine: false })
    }

    fn integers(&self, _: Range<u64>, parts: &[&[u8]], out: &mut Integers) -> Result<bool, Damage> {
        let step = |nibble: u8| (2.0 * E2M1[usize::from(nibble)] + 12.0) as u8;
        out.q.extend(parts[0].iter().flat_map(|byte| [step(byte & 15), step(byte >> 4)]));
        let halves = || parts[1].iter().map(|byte| e8m0(*byte) * 0.5);
        out.scales.extend(halves());
        out.biases.extend(halves().map(|half| -12.0 * half));
        Ok(true)
    }
}
