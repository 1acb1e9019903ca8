//! Adds partial sums that are stored in frames, in f32 and in rank order: all at once, or one after
//! the other as they go from rank to rank. The result has the same bits either way.

use std::ops::Range;

use half::bf16;

/// An element of a vector that is all-reduced, little-endian in frames.
pub(crate) trait Element: Copy {
    /// Bytes in a frame.
    const BYTES: usize;

    /// Writes values to as many places.
    fn store(bytes: &mut [u8], values: &[Self]);

    /// Reads what [`Element::store`] wrote.
    fn load(values: &mut [Self], bytes: &[u8]);

    /// The sums of several frames in their order, in f32 and rounded once.
    fn add_up<'a>(values: &mut [Self], frames: impl Iterator<Item = &'a [u8]>);

    /// The value in f32, which is exact.
    fn widen(self) -> f32;

    /// The nearest value.
    fn narrow(sum: f32) -> Self;
}

/// Bytes of a partial sum of one element on its way: an f32, since it is rounded once, at the end.
pub(crate) const PARTIAL_BYTES: usize = 4;

/// Writes the first rank's partial sums, which are its values.
pub(crate) fn start_partial<T: Element>(bytes: &mut [u8], values: &[T]) {
    assert_eq!(bytes.len(), values.len() * PARTIAL_BYTES);
    for (four, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *four = value.widen().to_le_bytes();
    }
}

/// Writes the partial sums `before` with the next rank's values added.
pub(crate) fn extend_partial<T: Element>(bytes: &mut [u8], before: &[u8], values: &[T]) {
    assert_eq!(bytes.len(), values.len() * PARTIAL_BYTES);
    assert_eq!(before.len(), bytes.len());
    let sums = bytes.as_chunks_mut().0.iter_mut().zip(before.as_chunks().0);
    for ((four, before), value) in sums.zip(values) {
        *four = (f32::from_le_bytes(*before) + value.widen()).to_le_bytes();
    }
}

/// Replaces the last rank's values by the sums: `before` with the values added.
pub(crate) fn finish_partial<T: Element>(values: &mut [T], before: &[u8]) {
    assert_eq!(before.len(), values.len() * PARTIAL_BYTES);
    for (value, before) in values.iter_mut().zip(before.as_chunks().0) {
        *value = T::narrow(f32::from_le_bytes(*before) + value.widen());
    }
}

impl Element for f32 {
    const BYTES: usize = 4;

    fn store(bytes: &mut [u8], values: &[Self]) {
        assert_eq!(bytes.len(), values.len() * 4);
        for (four, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
            *four = value.to_le_bytes();
        }
    }

    fn load(values: &mut [Self], bytes: &[u8]) {
        assert_eq!(bytes.len(), values.len() * 4);
        for (value, four) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = Self::from_le_bytes(*four);
        }
    }

    fn add_up<'a>(values: &mut [Self], mut frames: impl Iterator<Item = &'a [u8]>) {
        if let Some(first) = frames.next() {
            Self::load(values, first);
        }
        for bytes in frames {
            assert_eq!(bytes.len(), values.len() * 4);
            for (value, four) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value += Self::from_le_bytes(*four);
            }
        }
    }

    fn widen(self) -> f32 {
        self
    }

    fn narrow(sum: f32) -> Self {
        sum
    }
}

/// Elements of a vector that are summed at once: their f32 sums stay in the first cache.
const BLOCK: usize = 1024;

impl Element for bf16 {
    const BYTES: usize = 2;

    fn store(bytes: &mut [u8], values: &[Self]) {
        assert_eq!(bytes.len(), values.len() * 2);
        for (two, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
            *two = value.to_le_bytes();
        }
    }

    fn load(values: &mut [Self], bytes: &[u8]) {
        assert_eq!(bytes.len(), values.len() * 2);
        for (value, two) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = Self::from_le_bytes(*two);
        }
    }

    fn add_up<'a>(values: &mut [Self], frames: impl Iterator<Item = &'a [u8]>) {
        let frames: Vec<&[u8]> = frames.collect();
        assert!(frames.iter().all(|bytes| bytes.len() == values.len() * 2));
        for (block, values) in values.chunks_mut(BLOCK).enumerate() {
            let mut sums = [0.0_f32; BLOCK];
            for (index, bytes) in frames.iter().enumerate() {
                let two = bytes.as_chunks().0[block * BLOCK..].iter();
                let found = two.map(|two| Self::from_le_bytes(*two).to_f32());
                for (sum, value) in sums[..values.len()].iter_mut().zip(found) {
                    *sum = if index == 0 { value } else { *sum + value };
                }
            }
            for (value, sum) in values.iter_mut().zip(sums) {
                *value = Self::from_f32(sum);
            }
        }
    }

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(sum: f32) -> Self {
        Self::from_f32(sum)
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
    fn bf16_sums_are_those_of_f32_rounded_once() {
        let parts: Vec<Vec<bf16>> = (0..3_u32)
            .map(|rank| {
                (0..2500_u32)
                    .map(move |i| bf16::from_f32((i * 7 + rank * 13) as f32 * 0.37 - 300.0))
            })
            .map(Iterator::collect)
            .collect();
        let frames: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| {
                let mut bytes = vec![0; part.len() * 2];
                bf16::store(&mut bytes, part);
                bytes
            })
            .collect();
        let mut sums = vec![bf16::ZERO; 2500];
        bf16::add_up(&mut sums, frames.iter().map(Vec::as_slice));
        for (index, sum) in sums.iter().enumerate() {
            let exact = parts.iter().fold(0.0, |sum, part| sum + part[index].to_f32());
            assert_eq!(*sum, bf16::from_f32(exact), "{index}");
        }
    }

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
