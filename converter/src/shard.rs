//! Slices a rank's shard out of an unsharded tensor. Moves whole rows or whole groups; computes
//! nothing on weights.

use std::ops::Range;

/// The contiguous runs of `bytes` (row-major `shape`, `element_bytes` each) that lie in `range` of
/// dimension `dim`, in order; concatenated they are the shard.
///
/// # Panics
/// When `bytes` does not fit `shape`, or `range` the dimension.
pub(crate) fn runs<'a>(
    bytes: &'a [u8],
    shape: &[u64],
    element_bytes: usize,
    dim: usize,
    range: Range<u64>,
) -> impl Iterator<Item = &'a [u8]> {
    let inner = shape[dim + 1..].iter().product::<u64>() as usize * element_bytes;
    let full = shape[dim] as usize * inner;
    let outer = shape[..dim].iter().product::<u64>() as usize;
    assert_eq!(bytes.len(), outer * full, "bytes of the unsharded tensor");
    assert!(range.start <= range.end && range.end <= shape[dim], "a range of the dimension");
    let within = range.start as usize * inner..range.end as usize * inner;
    (0..outer).map(move |index| &bytes[index * full..][within.clone()])
}

/// Consecutive innermost rows of a tensor.
pub(crate) struct RowBlock<'a> {
    /// Their bytes.
    pub(crate) bytes: &'a [u8],
    /// Index of the first within the tensor.
    pub(crate) first: u64,
    /// Bytes of one.
    pub(crate) row_bytes: usize,
}

/// Puts into `out` what a block of innermost rows has of a shard: `range` of dimension `dim` of a
/// tensor of `shape`. A vector's elements are its rows.
///
/// # Panics
/// When the block is not of whole rows.
pub(crate) fn rows(
    block: &RowBlock<'_>,
    (shape, element_bytes): (&[u64], usize),
    (dim, range): (usize, Range<u64>),
    out: &mut Vec<u8>,
) {
    out.clear();
    let count = (block.bytes.len() / block.row_bytes) as u64;
    assert_eq!(block.bytes.len(), count as usize * block.row_bytes, "whole rows");
    if dim > 0 && dim + 1 == shape.len() {
        let of_row = [count, shape[dim]];
        for run in runs(block.bytes, &of_row, element_bytes, 1, range) {
            out.extend_from_slice(run);
        }
        return;
    }
    // Rows below one index of the dimension; a vector's rows are the dimension itself.
    let inner = shape.get(dim + 1..shape.len() - 1).unwrap_or(&[]).iter().product::<u64>();
    let full = shape[dim];
    let mut row = block.first;
    let end = block.first + count;
    while row < end {
        let index = row / inner;
        // From here on to the end of the range, or to its next beginning, all rows are alike.
        let (at, base) = (index % full, (index - index % full) * inner);
        let (held, next) = if at < range.start {
            (false, base + range.start * inner)
        } else if at < range.end {
            (true, base + range.end * inner)
        } else {
            (false, base + full * inner)
        };
        let next = next.min(end);
        if held {
            let bytes = |row: u64| (row - block.first) as usize * block.row_bytes;
            out.extend_from_slice(&block.bytes[bytes(row)..bytes(next)]);
        }
        row = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns() {
        let bytes: Vec<u8> = (0..24).collect();
        let take =
            |dim, range| runs(&bytes, &[2, 3, 2], 2, dim, range).collect::<Vec<_>>().concat();
        assert_eq!(take(0, 1..2), (12..24).collect::<Vec<u8>>());
        assert_eq!(take(1, 0..1), [0, 1, 2, 3, 12, 13, 14, 15]);
        assert_eq!(take(2, 1..2), [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]);
        assert!(take(1, 2..2).is_empty());
    }

    #[test]
    fn blocks_of_rows_give_what_the_whole_tensor_gives() {
        let shape = [3, 4, 5];
        let bytes: Vec<u8> = (0..120).collect();
        for (dim, range) in [(0, 1..3), (0, 0..1), (1, 1..3), (1, 3..4), (2, 2..5), (1, 2..2)] {
            let expected: Vec<u8> =
                runs(&bytes, &shape, 2, dim, range.clone()).collect::<Vec<_>>().concat();
            for step in [1, 3, 5, 12] {
                let (mut concatenated, mut out) = (Vec::new(), Vec::new());
                for (index, block) in bytes.chunks(10 * step).enumerate() {
                    let block =
                        RowBlock { bytes: block, first: (index * step) as u64, row_bytes: 10 };
                    rows(&block, (&shape, 2), (dim, range.clone()), &mut out);
                    concatenated.extend_from_slice(&out);
                }
                assert_eq!(concatenated, expected, "{dim} {range:?} by {step}");
            }
        }
        let vector = RowBlock { bytes: &bytes[..8], first: 2, row_bytes: 2 };
        let mut out = Vec::new();
        rows(&vector, (&[9], 2), (0, 3..5), &mut out);
        assert_eq!(out, bytes[2..6]);
    }
}
