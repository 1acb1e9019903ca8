//! The KV layout within a block: row by row, or with every key in a SIMD lane of its own.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use super::KEYS_PER_BLOCK;
use crate::lanes::LANES;

/// The layout of keys and values in the blocks of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Both `[key, head_dim]`; the last block may be shorter.
    Rows,
    /// One key per SIMD lane: the products of a query with sixteen keys are sixteen lanes, without
    /// a horizontal sum, and memory is read sequentially. All blocks are whole.
    ///
    /// A lane packs several elements ([`TOGETHER_BF16`], [`TOGETHER_Q8`], otherwise one): consecutive
    /// elements of a key, or the same element of consecutive values. Keys are
    /// `[key / 64][element / together][key % 64][element % together]`, values
    /// `[element / 64][key / together][element % 64][key % together]`, where the
    /// second and the third of four packed elements are swapped, so that the lower halves of two
    /// 16-bit pairs are the first two. Needs a `head_dim` that is a multiple of 32.
    Lanes,
}

/// bf16 elements of a lane of [`Order::Lanes`].
pub const TOGETHER_BF16: usize = 2;

/// 8-bit elements of a lane of [`Order::Lanes`].
pub const TOGETHER_Q8: usize = 4;

/// The position of an element within its lane.
const fn within(index: usize, together: usize) -> usize {
    match (together, index % together) {
        (TOGETHER_Q8, index) => [0, 2, 1, 3][index],
        (_, index) => index,
    }
}

/// Keys of a group, and elements of values of a panel, that are computed at a time.
const AT_ONCE: usize = 64;

impl Order {
    /// The faster layout of those that heads of this width support.
    #[must_use]
    pub const fn fastest(head_dim: usize) -> Self {
        if head_dim.is_multiple_of(2 * LANES) { Self::Lanes } else { Self::Rows }
    }

    /// Writes the elements of a key or a value to a whole block, `together` of them to a lane.
    ///
    /// # Panics
    /// If the block is not [`KEYS_PER_BLOCK`] times as long as `elements`, or these do not fit the
    /// layout.
    #[inline]
    pub fn put<T: Copy>(
        self,
        row: Row,
        together: usize,
        elements: impl ExactSizeIterator<Item = T>,
        block: &mut [T],
    ) {
        let width = elements.len();
        assert_eq!(block.len(), KEYS_PER_BLOCK * width, "a whole block");
        match (self, row) {
            (Self::Rows, Row::Key(index) | Row::Value(index)) => {
                for (place, number) in block[index * width..][..width].iter_mut().zip(elements) {
                    *place = number;
                }
            }
            (Self::Lanes, Row::Key(index)) => {
                let group = &mut block[index / AT_ONCE * AT_ONCE * width..][..AT_ONCE * width];
                for (at, number) in elements.enumerate() {
                    let lane = at / together * AT_ONCE + index % AT_ONCE;
                    group[lane * together + within(at, together)] = number;
                }
            }
            (Self::Lanes, Row::Value(index)) => {
                for (at, number) in elements.enumerate() {
                    let panel = at / AT_ONCE * AT_ONCE;
                    let wide = AT_ONCE.min(width - panel);
                    let lane = index / together * wide + at % AT_ONCE;
                    block[panel * KEYS_PER_BLOCK + lane * together + within(index, together)] =
                        number;
                }
            }
        }
    }
}

/// A key or a value of a block.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    /// One of its keys.
    Key(usize),
    /// One of its values.
    Value(usize),
}

/// Elements of a panel of values, and where it begins.
#[inline(always)]
pub(super) fn panels(width: usize) -> impl Iterator<Item = Range<usize>> {
    (0..width).step_by(AT_ONCE).map(move |first| first..width.min(first + AT_ONCE))
}

/// Lines of keys or of elements that are computed at a time.
pub(super) const LINES_AT_ONCE: usize = AT_ONCE / LANES;
