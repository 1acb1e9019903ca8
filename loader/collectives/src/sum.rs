//! Adds partial sums that are stored in frames. Both all-reduce algorithms use the same loops, so
//! the result has the same bits with either.

use std::ops::Range;

/// Writes `values` as little-endian bytes; `bytes` is four times as long.
pub(crate) fn store(bytes: &mut [u8], values: &[f32]) {
    assert_eq!(bytes.len(), values.len() * 4);
    for (four, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *four = value.to_le_bytes();
    }
}

/// Reads what [`store`] wrote.
pub(crate) fn load(values: &mut [f32], bytes: &[u8]) {
    assert_eq!(bytes.len(), values.len() * 4);
    for (value, four) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*four);
    }
}

/// Adds what [`store`] wrote.
pub(crate) fn add(values: &mut [f32], bytes: &[u8]) {
    assert_eq!(bytes.len(), values.len() * 4);
    for (value, four) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value += f32::from_le_bytes(*four);
    }
}

/// The elements of a vector of `len` that rank `part` of `parts` reduces.
pub(crate) fn part(len: usize, part: u32, parts: u32) -> Range<usize> {
    let (part, parts) = (part as usize, parts as usize);
    let (base, more) = (len / parts, len % parts);
    let start = |part: usize| part * base + part.min(more);
    start(part)..start(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_length_once_and_evenly() {
        for len in [0, 1, 2, 7, 8, 9, 1000] {
            for parts in 1..=8 {
                let ranges: Vec<_> = (0..parts).map(|rank| part(len, rank, parts)).collect();
                assert_eq!(ranges[0].start, 0);
                assert_eq!(ranges.last().unwrap().end, len);
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                let longest = ranges.iter().map(Range::len).max().unwrap();
                assert!(ranges.iter().all(|range| longest - range.len() <= 1));
            }
        }
    }
}
