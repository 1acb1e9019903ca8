//! Stored integers carried over into affine groups, when these stand for exactly the same floats.

use std::ops::Range;

use super::{Damage, Integers, Logical, RowMap};
use shardpack_quantize::{
    affine::{self, AffineFormat},
    dtype::Dtype,
    simd::Platform,
};

/// What came of an attempt to carry rows over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repacked {
    /// Every weight of these rows is stored exactly.
    Exactly,
    /// Some are not on the wanted grid: they have to be quantized.
    Not,
}

impl Logical {
    /// Whether its integers may fit a format: enough bits, and groups that do not cross the
    /// source's. Whether scale and bias fit the stored type shows only in the file.
    #[must_use]
    pub fn may_repack(&self, format: AffineFormat) -> bool {
        let group_size = u64::from(format.group_size());
        self.width().is_multiple_of(group_size)
            && self.grid().is_some_and(|grid| {
                grid.bits <= format.bits()
                    && (grid.group_size >= self.width()
                        || grid.group_size.is_multiple_of(group_size))
            })
    }

    /// Carries rows over into `packed`, `scales` and `biases` as [`affine::quantize`] lays them
    /// out, with scales and biases of type `store`. `parts` are the bytes of the rows' windows.
    ///
    /// # Panics
    /// When [`Self::may_repack`] is false, or lengths do not fit.
    pub fn repack(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        format: AffineFormat,
        store: Dtype,
        (packed, scales, biases): (&mut [u8], &mut [u8], &mut [u8]),
    ) -> Result<Repacked, Damage> {
        assert!(self.may_repack(format), "the caller asked before");
        let layout = self.layout.as_ref().expect("what has a grid has a layout");
        let mut found = Integers::default();
        let span = self.rows.span(&rows);
        if !layout.integers(span.clone(), parts, &mut found)? {
            return Ok(Repacked::Not);
        }
        let grid = self.grid().expect("asked before");
        let (width, group_size) = (self.width() as usize, format.group_size() as usize);
        let source_group = (grid.group_size as usize).min(width);
        if self.rows != RowMap::Same {
            let places = rows.map(|row| (self.rows.stored(row) - span.start) as usize);
            found = found.rows(places, width, width.div_ceil(source_group.max(1)));
        }
        let groups =
            found.q.chunks_exact(group_size).zip(packed.chunks_exact_mut(format.group_bytes()));
        for (q, out) in groups {
            affine::pack(format, q, out);
        }
        let per_row = width.div_ceil(source_group.max(1));
        let place = |group: usize| {
            let (row, column) = (group * group_size / width, group * group_size % width);
            row * per_row + column / source_group
        };
        let count = scales.len() / store.size_bytes();
        let spread = |values: &[f32], out: &mut [u8]| {
            let values: Vec<f32> = (0..count).map(|group| values[place(group)]).collect();
            is_exact(store, &values, out)
        };
        // A scale of so few bits has exact products with integers, and so have their sums.
        let is_short = |scale: &f32| scale.to_bits().trailing_zeros() >= 12;
        let exact = (grid.is_affine || found.scales.iter().all(is_short))
            && spread(&found.scales, scales)
            && spread(&found.biases, biases);
        Ok(if exact { Repacked::Exactly } else { Repacked::Not })
    }
}

impl Integers {
    /// Some of its rows, of `width` integers and so many `groups`.
    fn rows(&self, places: impl Iterator<Item = usize>, width: usize, groups: usize) -> Self {
        let mut some = Self::default();
        for row in places {
            some.q.extend_from_slice(&self.q[row * width..][..width]);
            some.scales.extend_from_slice(&self.scales[row * groups..][..groups]);
            some.biases.extend_from_slice(&self.biases[row * groups..][..groups]);
        }
        some
    }
}

/// Narrows numbers and says whether nothing was lost.
fn is_exact(store: Dtype, values: &[f32], out: &mut [u8]) -> bool {
    let platform = Platform::detect_for_quantizing();
    affine::narrow(platform, store, values, out);
    let mut back = vec![0.0; values.len()];
    affine::widen(platform, store, out, &mut back);
    values.iter().zip(&back).all(|(value, back)| value.is_finite() && value == back)
}
