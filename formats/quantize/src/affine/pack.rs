//! The bit stream of integers.

use super::AffineFormat;

/// Packs one group's integers into `out` of [`AffineFormat::group_bytes`].
///
/// # Panics
/// When a length does not fit the format.
pub fn pack(format: AffineFormat, q: &[u8], out: &mut [u8]) {
    assert_eq!(q.len(), format.group_size as usize, "a group is packed whole");
    assert_eq!(out.len(), format.group_bytes(), "a group's bytes");
    // Eight integers of b bits are b bytes, for every b.
    let bits = format.bits;
    for (eight, bytes) in q.chunks_exact(8).zip(out.chunks_exact_mut(bits as usize)) {
        let mut word = 0_u64;
        for (index, value) in eight.iter().enumerate() {
            word |= u64::from(*value) << (index as u32 * bits);
        }
        bytes.copy_from_slice(&word.to_le_bytes()[..bits as usize]);
    }
}

/// The inverse of [`pack`].
///
/// # Panics
/// When a length does not fit the format.
pub fn unpack(format: AffineFormat, bytes: &[u8], q: &mut [u8]) {
    assert_eq!(q.len(), format.group_size as usize, "a group is unpacked whole");
    assert_eq!(bytes.len(), format.group_bytes(), "a group's bytes");
    let bits = format.bits as usize;
    for (eight, bytes) in q.chunks_exact_mut(8).zip(bytes.chunks_exact(bits)) {
        let mut word = [0_u8; 8];
        word[..bits].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (index, value) in eight.iter_mut().enumerate() {
            *value = (word >> (index * bits)) as u8 & format.max_q() as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packing_loses_nothing(bits in prop::sample::select(vec![2_u32, 3, 4, 5, 6, 8]), raw in prop::collection::vec(any::<u8>(), 128)) {
            for group_size in [32, 64, 128] {
                let format = AffineFormat::new(bits, group_size).unwrap();
                let q: Vec<u8> = raw[..group_size as usize].iter().map(|x| x & format.max_q() as u8).collect();
                let mut bytes = vec![0; format.group_bytes()];
                pack(format, &q, &mut bytes);
                let mut back = vec![0; q.len()];
                unpack(format, &bytes, &mut back);
                prop_assert_eq!(&back, &q);
            }
        }
    }
}
