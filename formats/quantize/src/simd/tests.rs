//! Each platform's operations against the portable ones, lane by lane.

use super::*;

/// Two numbers in, the results of all operations out, as bits.
struct Operations<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Task for Operations<'_> {
    type Output = Vec<Vec<u32>>;

    #[inline(always)]
    fn run<V: Lanes>(self, proof: V::Proof) -> Vec<Vec<u32>> {
        let mut results = vec![Vec::new(); 25];
        for (a, b) in self.a.chunks_exact(V::N).zip(self.b.chunks_exact(V::N)) {
            let (a, b) = (V::load(proof, a), V::load(proof, b));
            let (wa, wb) = (a.words(), b.words());
            let word = |words| V::from_words(words);
            let values = [
                a.add(b),
                a.sub(b),
                a.mul(b),
                a.div(b),
                a.min(b),
                a.max(b),
                V::less(a, b, V::splat(proof, 3.0), b),
                a.abs(),
                a.rint(),
                a.abs().min(V::splat(proof, 4e6)).rint_small(proof),
                word(V::and(wa, wb)),
                word(V::or(wa, wb)),
                word(V::plus(wa, wb)),
                word(V::shift_left(wa, 0)),
                word(V::shift_left(wa, 5)),
                word(V::shift_left(wa, 31)),
                word(V::shift_right(wa, 0)),
                word(V::shift_right(wa, 5)),
                word(V::shift_right(wa, 31)),
                word(V::splat_word(proof, 0x1234_5678)),
                a.round_bf16(proof),
                a.round_f16(proof),
                a.round_significand(proof, 1),
                V::splat(proof, -0.25),
                small(proof, a).mul_add_exact(small(proof, b), a),
            ];
            let mut floats = [0.0; MAX_LANES];
            let mut words = [0; MAX_LANES];
            for (value, results) in values.into_iter().zip(&mut results) {
                value.store(&mut floats);
                results.extend(floats[..V::N].iter().map(|lane| lane.to_bits()));
                V::store_words(value.words(), &mut words);
                results.extend(&words[..V::N]);
                let mut bytes = [0; 4 * MAX_LANES];
                V::store_bytes(V::load_words(proof, &words), &mut bytes);
                words.fill(0);
                V::store_words(V::load_bytes(proof, &bytes), &mut words);
                results.extend(&words[..V::N]);
            }
        }
        // The number of lanes must not show: bring all that belongs to one lane together.
        results.into_iter().map(|results| by_lane(&results, V::N)).collect()
    }
}

/// A number of 12 significant bits that is not large, so that products are exact.
#[inline(always)]
fn small<V: Lanes>(proof: V::Proof, value: V) -> V {
    let limit = V::splat(proof, 4e6);
    let value = value.min(limit).max(V::splat(proof, 0.0).sub(limit));
    V::from_words(V::and(value.words(), V::splat_word(proof, 0xffff_f000)))
}

fn by_lane(results: &[u32], lanes: usize) -> Vec<u32> {
    let lane_of = |step: &[u32], lane: usize| [0, 1, 2].map(|i| step[i * lanes + lane]);
    let steps = results.chunks_exact(3 * lanes);
    steps.flat_map(|step| (0..lanes).flat_map(move |lane| lane_of(step, lane))).collect()
}

fn edge_numbers() -> Vec<f32> {
    let mut numbers = vec![
        0.0,
        0.5,
        1.0,
        1.5,
        2.5,
        0.499_999_97,
        8_388_607.5,
        8_388_609.0,
        1e-40,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        65504.0,
        65519.996,
        65520.0,
        6.103_515_6e-5,
        6.1e-5,
        5.960_464_5e-8,
        2.980_232_2e-8,
        2.98e-8,
        1.003_906_3,
        1.011_718_8,
        3.389_531_4e38,
    ];
    numbers.extend(numbers.clone().iter().map(|x| -x));
    numbers
}

#[test]
fn every_platform_computes_every_operation_alike() {
    let numbers = edge_numbers();
    let pairs = numbers.iter().flat_map(|a| numbers.iter().map(|b| (*a, *b)));
    let (mut a, mut b): (Vec<f32>, Vec<f32>) = pairs.unzip();
    let whole = a.len() / MAX_LANES * MAX_LANES;
    a.truncate(whole);
    b.truncate(whole);
    let want = Platform::Portable.run(Operations { a: &a, b: &b });
    for platform in Platform::available_for_quantizing() {
        let got = platform.run(Operations { a: &a, b: &b });
        for (operation, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.len(), want.len());
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let (x, y) = (a[index / 3], b[index / 3]);
                // Which NaN comes out is no part of the promise, but that one does is.
                let nan = |bits: u32| f32::from_bits(bits).is_nan();
                let bitwise = (10..20).contains(&operation);
                let same = got == want || (!bitwise && nan(*got) && nan(*want));
                assert!(
                    same,
                    "{platform}, operation {operation} of {x:e}, {y:e}: {got:#x}, {want:#x}"
                );
            }
        }
    }
}

struct Transpose;

impl Task for Transpose {
    type Output = (usize, Vec<f32>);

    #[inline(always)]
    fn run<V: Lanes>(self, proof: V::Proof) -> Self::Output {
        let mut block = [V::splat(proof, -1.0); MAX_LANES];
        for (i, vector) in block[..V::N].iter_mut().enumerate() {
            let row: Vec<f32> = (0..V::N).map(|k| (i * V::N + k) as f32).collect();
            *vector = V::load(proof, &row);
        }
        V::transpose(&mut block);
        let mut out = Vec::new();
        for vector in &block[..V::N] {
            let mut row = [0.0; MAX_LANES];
            vector.store(&mut row);
            out.extend(&row[..V::N]);
        }
        (V::N, out)
    }
}

#[test]
fn every_platform_transposes() {
    for platform in Platform::available_for_quantizing() {
        let (lanes, out) = platform.run(Transpose);
        let want: Vec<f32> =
            (0..lanes).flat_map(|i| (0..lanes).map(move |k| (k * lanes + i) as f32)).collect();
        assert_eq!(out, want, "{platform}");
    }
}

#[test]
fn platforms_are_named_and_the_detected_one_is_available() {
    for platform in Platform::ALL {
        assert_eq!(platform.to_string().parse(), Ok(platform));
    }
    assert!("sse9".parse::<Platform>().is_err());
    assert_eq!(Platform::available_for_quantizing().first(), Some(&Platform::Portable));
    assert_eq!(
        Platform::available_for_quantizing().last(),
        Some(&Platform::detect_for_quantizing())
    );
}

#[test]
#[should_panic(expected = "without it")]
#[cfg(not(target_arch = "aarch64"))]
fn a_platform_of_another_machine_is_refused() {
    Platform::Neon.run(Transpose);
}
