//! Blocks of random bits against what gguf-py reads in them.

use super::*;

/// A reproducible stream of bytes (splitmix64).
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }
}

/// Enough that every entry of the largest codebook is likely to be read.
const BLOCKS: usize = 512;

/// A digest of the values' bits.
fn digest(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash.rotate_left(5) ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// `masks` keep bytes of scales from being infinite or no number.
#[track_caller]
fn check(kind: Kind, masks: &[(usize, u8)], expected: u64) {
    let mut stream = Stream(u64::from(kind.block_bytes() as u32));
    let size = kind.block_bytes() as usize;
    let mut bytes: Vec<u8> = (0..BLOCKS * size).map(|_| (stream.next() >> 56) as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for (at, bits) in masks {
            block[*at] &= bits;
        }
    }
    let width = kind.block_len();
    let blocks = Blocks { kind, width };
    let mut values = vec![0.0; BLOCKS * width as usize];
    blocks.decode(0..BLOCKS as u64, &[&bytes], &mut values).unwrap();
    assert!(values.iter().all(|value| value.is_finite()), "{kind}");
    assert_eq!(format!("{:016x}", digest(&values)), format!("{expected:016x}"), "{kind}");
}

/// The digests are those of gguf 0.19.0's `quants.dequantize` on the same bytes.
#[test]
fn blocks_stand_for_what_gguf_reads_in_them() {
    check(Kind::Iq1S, &[(1, 0xbf)], 0xc264_6005_eccf_49a8);
    check(Kind::Iq1M, &[(55, 0xbf)], 0x2c4d_a494_e6da_7635);
    check(Kind::Iq2Xxs, &[(1, 0xbf)], 0x593f_1529_0936_09fe);
    check(Kind::Iq2Xs, &[(1, 0xbf)], 0xa310_6129_bbfa_a7cf);
    check(Kind::Iq2S, &[(1, 0xbf)], 0xd93b_f844_736f_613f);
    check(Kind::Iq3Xxs, &[(1, 0xbf)], 0x7d05_0b24_6b45_dd19);
    check(Kind::Iq3S, &[(1, 0xbf)], 0xebd3_e7bc_4e01_8aa4);
    check(Kind::Tq1_0, &[(53, 0xbf)], 0x97e3_eec3_6e55_4149);
    check(Kind::Tq2_0, &[(65, 0xbf)], 0xba28_a55f_61af_48e8);
    check(Kind::Iq4Nl, &[(1, 0xbf)], 0x47f3_26a4_bd5b_aa4f);
    check(Kind::Iq4Xs, &[(1, 0xbf)], 0x9d04_0a2b_23f3_3b98);
    check(Kind::Nvfp4, &[(0, 0x7f), (1, 0x7f), (2, 0x7f), (3, 0x7f)], 0x4308_4f87_20dc_34cc);
    check(Kind::Mxfp4, &[(0, 0x7f)], 0xe67a_ddd6_7ada_670b);
    check(Kind::Q4_0, &[(1, 0xbf)], 0x4635_6985_2fcf_689b);
    check(Kind::Q5_1, &[(1, 0xbf), (3, 0xbf)], 0x396c_9446_463e_781c);
    check(Kind::Q8_0, &[(1, 0xbf)], 0x8fc6_d0a1_9521_6123);
    check(Kind::Q2K, &[(81, 0xbf), (83, 0xbf)], 0x3759_adc8_3ff4_693e);
    check(Kind::Q3K, &[(109, 0xbf)], 0x580f_c3b9_b3e8_8e4e);
    check(Kind::Q4K, &[(1, 0xbf), (3, 0xbf)], 0xa548_4fca_984c_6e53);
    check(Kind::Q5K, &[(1, 0xbf), (3, 0xbf)], 0x778f_8a7f_8ee1_dc19);
    check(Kind::Q6K, &[(209, 0xbf)], 0x69e7_bfa2_f710_30a0);
}
