//! Which rows of its source tensors a normalised tensor consists of.
//!
//! A source is `blocks` matrices one after the other, each `[rows, columns]` as stored. Of every
//! matrix some rows are taken; a matrix can be turned before (a checkpoint that stores
//! `[in, out]`) or after (a part that is multiplied from the other side). Several sources of the
//! same view stand one after the other, such as one matrix per expert. Nothing is computed.

use std::ops::Range;

use crate::rules::Turn;

/// What a tensor takes of each of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Matrices that a source holds one after the other.
    pub blocks: u64,
    /// Rows of one matrix, after [`Turn::Source`].
    pub rows: u64,
    /// Columns of one matrix, after [`Turn::Source`].
    pub columns: u64,
    /// First row that is taken.
    pub first: u64,
    /// From one taken row to the next.
    pub step: u64,
    /// Rows that are taken.
    pub count: u64,
    /// What is turned.
    pub turn: Turn,
}

/// Rows of one source that follow one another in the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index among the tensor's sources.
    pub source: u64,
    /// First row within the source.
    pub first: u64,
    /// From one row to the next.
    pub step: u64,
    /// Rows.
    pub count: u64,
}

impl View {
    /// All of a source of `rows` rows.
    #[must_use]
    pub const fn whole(rows: u64, columns: u64) -> Self {
        Self { blocks: 1, rows, columns, first: 0, step: 1, count: rows, turn: Turn::None }
    }

    /// Whether sources are taken as they are.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        matches!(self.turn, Turn::None)
            && self.first == 0
            && self.step == 1
            && self.count == self.rows
    }

    /// Rows and columns of the result that one matrix of a source gives.
    #[must_use]
    pub const fn result(&self) -> [u64; 2] {
        match self.turn {
            Turn::Result => [self.columns, self.count],
            Turn::None | Turn::Source => [self.count, self.columns],
        }
    }

    /// Rows of the result that one source gives.
    #[must_use]
    pub const fn rows_per_source(&self) -> u64 {
        self.blocks * self.result()[0]
    }

    /// Whether the taken rows lie within each matrix.
    #[must_use]
    pub const fn is_possible(&self) -> bool {
        self.blocks > 0
            && self.count > 0
            && self.step > 0
            && match (self.count - 1).checked_mul(self.step) {
                Some(last) => match last.checked_add(self.first) {
                    Some(last) => last < self.rows,
                    None => false,
                },
                None => false,
            }
    }

    /// Smallest number of result rows that can be read by themselves: a turned matrix is read
    /// whole.
    #[must_use]
    pub const fn unit(&self) -> u64 {
        match self.turn {
            Turn::None => 1,
            Turn::Source | Turn::Result => self.result()[0],
        }
    }

    /// Where rows `wanted` of the result stand, in order.
    ///
    /// # Panics
    /// For a view that turns matrices: their rows stand nowhere.
    #[must_use]
    pub fn runs(&self, wanted: Range<u64>) -> Vec<Run> {
        assert_eq!(self.turn, Turn::None, "rows of a turned matrix are not stored");
        let mut runs: Vec<Run> = Vec::new();
        let mut at = wanted.start;
        while at < wanted.end {
            let (block, row) = (at / self.count, at % self.count);
            let count = (self.count - row).min(wanted.end - at);
            let first = block % self.blocks * self.rows + self.first + row * self.step;
            let source = block / self.blocks;
            at += count;
            match runs.last_mut() {
                // Whole matrices of one source follow one another.
                Some(last)
                    if (last.source, last.step, self.step) == (source, 1, 1)
                        && last.first + last.count == first =>
                {
                    last.count += count;
                }
                _ => runs.push(Run { source, first, step: self.step, count }),
            }
        }
        runs
    }

    /// The matrix that gives row `row` of the result: its source and its index there.
    #[must_use]
    pub const fn block_of(&self, row: u64) -> (u64, u64) {
        let block = row / self.result()[0];
        (block / self.blocks, block % self.blocks)
    }

    /// Takes one matrix of the result out of `stored`, a whole matrix of a source as it is
    /// stored.
    ///
    /// # Panics
    /// When `stored` or `out` has another size.
    pub fn turn_block(&self, stored: &[u8], element_bytes: usize, out: &mut [u8]) {
        self.check_sizes(stored.len(), element_bytes, out.len());
        self.each_place(|place, at| {
            let (from, to) = (place * element_bytes, at * element_bytes);
            out[to..to + element_bytes].copy_from_slice(&stored[from..from + element_bytes]);
        });
    }

    /// Puts one matrix of the result back to where it stands in `stored`, a whole matrix of a
    /// source.
    ///
    /// # Panics
    /// When `stored` or `block` has another size.
    pub fn put_block(&self, block: &[u8], element_bytes: usize, stored: &mut [u8]) {
        self.check_sizes(stored.len(), element_bytes, block.len());
        self.each_place(|place, at| {
            let (from, to) = (at * element_bytes, place * element_bytes);
            stored[to..to + element_bytes].copy_from_slice(&block[from..from + element_bytes]);
        });
    }

    fn check_sizes(&self, stored: usize, element_bytes: usize, block: usize) {
        assert_eq!(stored as u64, self.rows * self.columns * element_bytes as u64, "a matrix");
        let elements: u64 = self.result().iter().product();
        assert_eq!(block as u64, elements * element_bytes as u64, "a matrix of the result");
    }

    /// Every element of one matrix: where it is stored, and where it is in the result.
    fn each_place(&self, mut visit: impl FnMut(usize, usize)) {
        /// Tiles, so that neither side strides through all of memory.
        const TILE: usize = 32;
        let [out_rows, out_columns] = self.result().map(|size| size as usize);
        let stored_columns = match self.turn {
            Turn::Source => self.rows,
            Turn::None | Turn::Result => self.columns,
        } as usize;
        // Where element [row, column] of the result stands.
        let place = |row: usize, column: usize| {
            let taken = |index: usize| self.first as usize + index * self.step as usize;
            match self.turn {
                Turn::None => taken(row) * stored_columns + column,
                Turn::Source => column * stored_columns + taken(row),
                Turn::Result => taken(column) * stored_columns + row,
            }
        };
        for row_tile in (0..out_rows).step_by(TILE) {
            for column_tile in (0..out_columns).step_by(TILE) {
                for row in row_tile..(row_tile + TILE).min(out_rows) {
                    for column in column_tile..(column_tile + TILE).min(out_columns) {
                        visit(place(row, column), row * out_columns + column);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_name_the_rows_of_every_source() {
        let run = |source, first, step, count| Run { source, first, step, count };
        let whole = View::whole(4, 3);
        assert_eq!(whole.runs(2..9), [run(0, 2, 1, 2), run(1, 0, 1, 4), run(2, 0, 1, 1)]);
        // Two matrices of four rows a source, of which rows 1 and 2 are taken.
        let part = View { blocks: 2, first: 1, count: 2, ..whole };
        assert_eq!(part.runs(1..5), [run(0, 2, 1, 1), run(0, 5, 1, 2), run(1, 1, 1, 1)]);
        // All of two matrices is one run.
        let both = View { blocks: 2, ..whole };
        assert_eq!(both.runs(0..8), [run(0, 0, 1, 8)]);
        let odd = View { first: 1, step: 2, count: 2, ..whole };
        assert_eq!(odd.runs(0..4), [run(0, 1, 2, 2), run(1, 1, 2, 2)]);
        assert!(odd.is_possible() && !View { count: 3, ..odd }.is_possible());
        assert!(!View { step: u64::MAX, ..odd }.is_possible());
    }

    #[test]
    fn matrices_are_turned_before_or_after_rows_are_taken() {
        let stored: Vec<u8> = (0..12).collect();
        let take = |view: View| {
            let mut out = vec![0; view.result().iter().product::<u64>() as usize];
            view.turn_block(&stored, 1, &mut out);
            // And back: what was taken stands where it stood.
            let mut back = vec![u8::MAX; stored.len()];
            view.put_block(&out, 1, &mut back);
            let taken = back.iter().zip(&stored).filter(|(back, _)| **back != u8::MAX);
            assert!(taken.clone().count() == out.len() && taken.clone().all(|(b, s)| b == s));
            out
        };
        let base = View::whole(4, 3);
        let odd = View { first: 1, step: 2, count: 2, ..base };
        assert_eq!(take(odd), [3, 4, 5, 9, 10, 11]);
        assert_eq!(take(View { turn: Turn::Result, ..odd }), [3, 9, 4, 10, 5, 11]);
        // Stored as [3, 4]: its rows are columns.
        assert_eq!(take(View { turn: Turn::Source, ..odd }), [1, 5, 9, 3, 7, 11]);
        assert_eq!(View { turn: Turn::Result, ..odd }.unit(), 3);
        assert_eq!(View { blocks: 2, turn: Turn::Result, ..odd }.block_of(7), (1, 0));
    }
}
