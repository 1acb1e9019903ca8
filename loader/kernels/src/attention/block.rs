//! Blocks of keys or values: parts of them, and the same as floats.

use std::ops::Range;

use super::{KvBlock, integers::STEP};
use crate::floats::{Floats, addresses};

impl<'a> KvBlock<'a> {
    /// The given keys.
    pub(super) fn part(self, keys: Range<usize>, head_dim: usize) -> Self {
        let span = keys.start * head_dim..keys.end * head_dim;
        match self {
            Self::Floats(floats) => Self::Floats(floats.slice(span)),
            Self::Q8 { values, scales } => {
                Self::Q8 { values: &values[span], scales: &scales[keys] }
            }
        }
    }

    /// The same as floats in rows of `width` instead of `head_dim`, filled up with zeros; `scratch` takes them.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    pub(super) fn widened<'b>(
        self,
        [head_dim, width]: [usize; 2],
        scratch: &'b mut Vec<f32>,
    ) -> KvBlock<'b>
    where
        'a: 'b,
    {
        let keys = self.len() / head_dim;
        match self {
            Self::Floats(Floats::F32(_)) if width == head_dim => return self,
            Self::Floats(floats) => {
                scratch.resize(keys * width, 0.0);
                for (key, out) in scratch.chunks_exact_mut(width).enumerate() {
                    let (out, rest) = out.split_at_mut(head_dim);
                    floats.read(key * head_dim, out);
                    rest.fill(0.0);
                }
            }
            Self::Q8 { values, scales } => {
                scratch.resize(keys * width, 0.0);
                let rows = scratch.chunks_exact_mut(width);
                for (out, (row, scale)) in rows.zip(values.chunks_exact(head_dim).zip(scales)) {
                    let (out, rest) = out.split_at_mut(head_dim);
                    for (out, value) in out.iter_mut().zip(row) {
                        *out = f32::from(*value) * scale;
                    }
                    rest.fill(0.0);
                }
            }
        }
        KvBlock::Floats(Floats::F32(scratch))
    }

    /// Whether products with rows of this width are those of integers.
    pub(super) const fn is_for_integers(self, head_dim: usize) -> bool {
        matches!(self, Self::Q8 { .. }) && head_dim.is_multiple_of(STEP)
    }

    const fn len(self) -> usize {
        match self {
            Self::Floats(floats) => floats.len(),
            Self::Q8 { values, .. } => values.len(),
        }
    }

    /// Addresses of the elements of the first keys.
    pub(super) fn addresses(self, keys: usize, head_dim: usize) -> Range<usize> {
        match self {
            Self::Floats(floats) => floats.addresses(0..floats.len().min(keys * head_dim)),
            Self::Q8 { values, .. } => addresses(&values[..values.len().min(keys * head_dim)]),
        }
    }
}
