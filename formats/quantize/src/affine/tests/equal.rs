//! The platform, the neighbours and the number of threads change nothing.

use proptest::prelude::*;

use super::{super::error, *};
use crate::affine::Rounding;

/// Portable against every other platform: bytes, sums or the error, whichever comes.
fn check(options: &QuantizeOptions<'_>, source: (Dtype, &[u8])) -> Result<Outputs, QuantizeError> {
    let on = |platform| run(&QuantizeOptions { platform, ..*options }, source);
    let want = on(Platform::Portable);
    for platform in Platform::available_for_quantizing() {
        let got = on(platform);
        let what = format!("{platform}, {options:?}, source {}", source.0);
        match (&got, &want) {
            (Ok((got, sums)), Ok((want, want_sums))) => {
                assert!(got == want, "{what}");
                assert_eq!(sums, want_sums, "{what}");
                let parts = (&got.packed[..], &got.scales[..], &got.biases[..]);
                let apart = error(platform, options.format, source, options.store, parts);
                assert_eq!(apart, *sums, "{what}");
            }
            _ => assert_eq!(got.as_ref().err(), want.as_ref().err(), "{what}"),
        }
    }
    want.map(|(out, _)| out)
}

#[test]
fn every_platform_writes_the_same_bytes() {
    for format in formats() {
        let group = format.group_size() as usize;
        let importance = data::importance(group * 7, 3);
        for (dtype, store) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
            // A multiple of the importance's seven groups to a row, but of no vector's lanes.
            let mut values = data::awkward(35, group, dtype, 5);
            values.extend(data::sample(data::Kind::StudentT4, 14 * group, 6));
            let source = data::bytes(dtype, &values);
            for rounding in Rounding::ALL {
                let mut options = QuantizeOptions::new(format, rounding, store);
                let plain = check(&options, (dtype, &source));
                if store != Dtype::F16 || dtype == Dtype::F16 {
                    assert!(plain.is_ok(), "these fit {store}");
                }
                options.importance = Some(&importance);
                let weighted = check(&options, (dtype, &source));
                if let (Ok(plain), Ok(weighted)) = (plain, weighted) {
                    let weighs = matches!(rounding, Rounding::Refined | Rounding::Gptq);
                    assert_eq!(plain == weighted, !weighs);
                }
            }
        }
    }
}

#[test]
fn a_tail_shorter_than_a_vector_is_a_group_like_any_other() {
    for format in formats() {
        let group = format.group_size() as usize;
        let values = data::awkward(300, group, Dtype::BF16, 8);
        let source = data::bytes(Dtype::BF16, &values);
        let options = QuantizeOptions::new(format, Rounding::Refined, Dtype::BF16);
        let (all, _) = run(&options, (Dtype::BF16, &source)).unwrap();
        for count in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 255, 256, 257] {
            let first = &source[..count * group * 2];
            let out = check(&options, (Dtype::BF16, first)).unwrap();
            let last = out.group(format, Dtype::BF16, count - 1);
            assert!(last == all.group(format, Dtype::BF16, count - 1), "{format:?}, {count}");
        }
        for index in 0..36 {
            let alone = &source[index * group * 2..][..group * 2];
            let (out, _) = run(&options, (Dtype::BF16, alone)).unwrap();
            assert!(out == all.group(format, Dtype::BF16, index), "{format:?}, group {index}");
        }
    }
}

#[test]
fn no_weights_make_no_groups() {
    let format = AffineFormat::new(4, 64).unwrap();
    let options = QuantizeOptions::new(format, Rounding::Refined, Dtype::BF16);
    let out = check(&options, (Dtype::BF16, &[])).unwrap();
    assert!(out.packed.is_empty());
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let source = data::bytes(Dtype::BF16, &data::sample(data::Kind::Laplace, 64 * 5000, 4));
    let format = AffineFormat::new(4, 64).unwrap();
    let options = QuantizeOptions::new(format, Rounding::Refined, Dtype::BF16);
    let [one, three] = [1, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&options, (Dtype::BF16, &source)).unwrap())
    });
    assert!(one.0 == three.0);
    assert_eq!(one.1, three.1);
}

#[test]
fn the_first_weight_that_is_no_number_is_named() {
    let format = AffineFormat::new(4, 64).unwrap();
    for rounding in Rounding::ALL {
        for (first, second) in [(0, 1), (64 * 300 + 2, 64 * 500), (64 * 17 + 63, 64 * 18)] {
            for (bad, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")]
            {
                let mut values = vec![0.5; 64 * 600];
                (values[first], values[second]) = (bad, f32::INFINITY);
                for dtype in FLOATS {
                    let source = data::bytes(dtype, &values);
                    let options = QuantizeOptions::new(format, rounding, Dtype::BF16);
                    let error = check(&options, (dtype, &source)).err();
                    let value = name.to_owned();
                    assert_eq!(error, Some(QuantizeError::NotFinite { index: first, value }));
                }
            }
        }
    }
}

#[test]
fn a_range_too_wide_for_the_stored_type_is_refused() {
    let format = AffineFormat::new(4, 32).unwrap();
    for (wide, store) in [(1e6, Dtype::F16), (3.4e38, Dtype::BF16), (3.4e38, Dtype::F32)] {
        for rounding in [Rounding::MlxCpu, Rounding::MlxMetal] {
            let mut values = data::sample(data::Kind::Gaussian, 32 * 40, 2);
            (values[32 * 21], values[32 * 21 + 1]) = (wide, -wide);
            let source = data::bytes(Dtype::F32, &values);
            let options = QuantizeOptions::new(format, rounding, store);
            let error = check(&options, (Dtype::F32, &source)).err();
            assert_eq!(error, Some(QuantizeError::TooWide { index: 32 * 21, dtype: store }));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_numbers_give_the_same_result_everywhere(
        seed in any::<u64>(),
        bits in prop::sample::select(BITS.to_vec()),
        size in prop::sample::select(GROUP_SIZES.to_vec()),
        store in prop::sample::select(FLOATS.to_vec()),
        rounding in prop::sample::select(Rounding::ALL.to_vec()),
        groups in 1..40_usize,
        exponents in 1..255_u64,
    ) {
        // Any sign and significand; exponents from a window that is narrow in some cases.
        let mut rng = data::Rng(seed);
        let lowest = rng.next() % (256 - exponents);
        let values: Vec<f32> = (0..groups * size as usize).map(|_| {
            let exponent = (lowest + rng.next() % exponents).min(254) as u32;
            f32::from_bits(rng.next() as u32 & 0x807f_ffff | exponent << 23)
        }).collect();
        let source = data::bytes(Dtype::F32, &values);
        let format = AffineFormat::new(bits, size).unwrap();
        let columns = data::importance(groups * size as usize, seed);
        for importance in [None, Some(&columns[..])] {
            let options = QuantizeOptions { importance, ..QuantizeOptions::new(format, rounding, store) };
            let _: Result<_, _> = check(&options, (Dtype::F32, &source));
        }
    }
}
