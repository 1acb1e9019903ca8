//! How keys and values lie in a block, and blocks in which every key has a lane of its own.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use super::KEYS_PER_BLOCK;
use crate::lanes::LANES;

/// How keys and values lie in the blocks of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Both `[key, head_dim]`; the last block may be shorter.
    Rows,
    /// So that a step through the memory meets what is computed together: products of a query with
    /// sixteen keys come in sixteen lanes, none of which are added to others, and everything is
    /// read from beginning to end. All blocks are whole.
    ///
    /// A lane has several numbers ([`TOGETHER_BF16`], [`TOGETHER_Q8`], and else one): those of a key
    /// that follow one another, or the same of keys that do. Keys are
    /// `[key / 64][element / together][key % 64][element % together]`, values
    /// `[element / 64][key / together][element % 64][key % together]`, where of four together the
    /// second and the third change places: whoever takes 16 bits for two finds the first two in
    /// the lower halves. Needs a `head_dim` that is a multiple of 32.
    Lanes,
}

/// Numbers of a lane of [`Order::Lanes`] where they are the upper halves of floats.
pub const TOGETHER_BF16: usize = 2;

/// Numbers of a lane of [`Order::Lanes`] where they are integers.
pub const TOGETHER_Q8: usize = 4;

/// The place of one of the numbers of a lane.
const fn within(index: usize, together: usize) -> usize {
    match (together, index % together) {
        (TOGETHER_Q8, index) => [0, 2, 1, 3][index],
        (_, index) => index,
    }
}

/// Keys that a query meets at a time, and elements of values for which weighted sums are computed
/// at a time.
const AT_ONCE: usize = 64;

impl Order {
    /// The faster order of those that heads of this width can have.
    #[must_use]
    pub const fn fastest(head_dim: usize) -> Self {
        if head_dim.is_multiple_of(2 * LANES) { Self::Lanes } else { Self::Rows }
    }

    /// Puts the numbers of a key or a value to their places in a whole block, of which `together`
    /// are in a lane.
    ///
    /// # Panics
    /// If the block is not [`KEYS_PER_BLOCK`] times as long as `numbers`, or these do not fit the
    /// order.
    #[inline]
    pub fn put<T: Copy>(
        self,
        row: Row,
        together: usize,
        numbers: impl ExactSizeIterator<Item = T>,
        block: &mut [T],
    ) {
        let width = numbers.len();
        assert_eq!(block.len(), KEYS_PER_BLOCK * width, "a whole block");
        match (self, row) {
            (Self::Rows, Row::Key(index) | Row::Value(index)) => {
                for (place, number) in block[index * width..][..width].iter_mut().zip(numbers) {
                    *place = number;
                }
            }
            (Self::Lanes, Row::Key(index)) => {
                let group = &mut block[index / AT_ONCE * AT_ONCE * width..][..AT_ONCE * width];
                for (at, number) in numbers.enumerate() {
                    let lane = at / together * AT_ONCE + index % AT_ONCE;
                    group[lane * together + within(at, together)] = number;
                }
            }
            (Self::Lanes, Row::Value(index)) => {
                for (at, number) in numbers.enumerate() {
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

/// Which of a block's keys or values.
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

/// Lines of keys or of elements that are met at a time.
pub(super) const LINES_AT_ONCE: usize = AT_ONCE / LANES;
