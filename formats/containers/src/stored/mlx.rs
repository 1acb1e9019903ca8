//! MLX's affine groups as a source: see [`shardpack_quantize::affine`] for the layout. Any bits from 2 to 8
//! that MLX writes, any group that fills whole words.

use std::ops::Range;

use super::{Damage, Grid, Integers, Layout, Window, elements::number};
use shardpack_quantize::dtype::Dtype;

/// Groups of `q · scale + bias`.
#[derive(Clone, Debug)]
pub(super) struct MlxAffine {
    pub(super) bits: u32,
    pub(super) width: u64,
    pub(super) group_size: u64,
    pub(super) scale: Dtype,
}

impl MlxAffine {
    /// Calls `take` with every integer in order: a little-endian stream of bits, in which eight
    /// integers fill whole bytes.
    fn each(&self, bytes: &[u8], mut take: impl FnMut(u8)) {
        let bits = self.bits as usize;
        for eight in bytes.chunks_exact(bits) {
            let mut word = [0; 8];
            word[..bits].copy_from_slice(eight);
            let word = u64::from_le_bytes(word);
            for k in 0..8 {
                take((word >> (k * bits)) as u8 & ((1_u16 << bits) - 1) as u8);
            }
        }
    }
}

impl Layout for MlxAffine {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        let groups = self.width / self.group_size * self.scale.size_bytes() as u64;
        vec![
            Window::rows(rows.clone(), self.width * u64::from(self.bits) / 8),
            Window::rows(rows.clone(), groups),
            Window::rows(rows, groups),
        ]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let group_size = self.group_size as usize;
        let group_bytes = group_size * self.bits as usize / 8;
        let groups = parts[0].chunks_exact(group_bytes).zip(out.chunks_exact_mut(group_size));
        for (group, (bytes, out)) in groups.enumerate() {
            let scale = number(self.scale, parts[1], group);
            let bias = number(self.scale, parts[2], group);
            let mut out = out.iter_mut();
            self.each(bytes, |q| {
                if let Some(out) = out.next() {
                    *out = f32::from(q) * scale + bias;
                }
            });
        }
        Ok(())
    }

    fn grid(&self) -> Option<Grid> {
        Some(Grid { bits: self.bits, group_size: self.group_size, is_affine: true })
    }

    fn integers(&self, _: Range<u64>, parts: &[&[u8]], out: &mut Integers) -> Result<bool, Damage> {
        self.each(parts[0], |q| out.q.push(q));
        let groups = parts[1].len() / self.scale.size_bytes();
        out.scales.extend((0..groups).map(|group| number(self.scale, parts[1], group)));
        out.biases.extend((0..groups).map(|group| number(self.scale, parts[2], group)));
        Ok(true)
    }
}
