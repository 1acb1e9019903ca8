//! Taking a rank's part out of an uncut tensor. Moves whole rows or whole groups; computes
//! nothing on weights.

use std::ops::Range;

/// The pieces of `bytes` (row-major `shape`, `element_bytes` each) that lie in `range` of
/// dimension `dim`, in order; joined they are the cut tensor.
///
/// # Panics
/// When `bytes` does not fit `shape`, or `range` the dimension.
pub(crate) fn pieces<'a>(
    bytes: &'a [u8],
    shape: &[u64],
    element_bytes: usize,
    dim: usize,
    range: Range<u64>,
) -> impl Iterator<Item = &'a [u8]> {
    let inner = shape[dim + 1..].iter().product::<u64>() as usize * element_bytes;
    let full = shape[dim] as usize * inner;
    let outer = shape[..dim].iter().product::<u64>() as usize;
    assert_eq!(bytes.len(), outer * full, "bytes of the uncut tensor");
    assert!(range.start <= range.end && range.end <= shape[dim], "a range of the dimension");
    let within = range.start as usize * inner..range.end as usize * inner;
    (0..outer).map(move |index| &bytes[index * full..][within.clone()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns() {
        let bytes: Vec<u8> = (0..24).collect();
        let take =
            |dim, range| pieces(&bytes, &[2, 3, 2], 2, dim, range).collect::<Vec<_>>().concat();
        assert_eq!(take(0, 1..2), (12..24).collect::<Vec<u8>>());
        assert_eq!(take(1, 0..1), [0, 1, 2, 3, 12, 13, 14, 15]);
        assert_eq!(take(2, 1..2), [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]);
        assert!(take(1, 2..2).is_empty());
    }
}
