//! From logits to a token: the same on every rank and machine.

use shardpack_kernels::exp::exp;

use super::request::Sampling;

/// The token after `index` tokens. `None` where no logit is a number. Ties go to the lower id.
pub(super) fn sample(logits: &[f32], sampling: &Sampling, index: u32) -> Option<u32> {
    let (best, maximum) = greedy(logits)?;
    if sampling.temperature == 0.0 || maximum.is_infinite() {
        return Some(best);
    }
    // Our own exponential, since the platform's differs between machines; f64 for the sum, so
    // that unlikely tokens of large vocabularies still count. What is not a number counts nothing.
    let weight = |logit: &f32| {
        let weight = f64::from(exp((logit - maximum) / sampling.temperature));
        if weight.is_nan() { 0.0 } else { weight }
    };
    let total: f64 = logits.iter().map(weight).sum();
    let threshold = uniform(sampling.seed, index) * total;
    let mut sum = 0.0;
    for (token, logit) in logits.iter().enumerate() {
        sum += weight(logit);
        if sum > threshold {
            return Some(token as u32);
        }
    }
    Some(best)
}

fn greedy(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = None;
    for (token, logit) in logits.iter().enumerate() {
        let higher = best.is_none_or(|(_, highest)| *logit > highest);
        if higher && !logit.is_nan() {
            best = Some((token as u32, *logit));
        }
    }
    best
}

/// A number in 0..1 that is a function of seed and index: `SplitMix64`'s finalizer over both
/// (Steele, Lea, Flood 2014).
fn uniform(seed: u64, index: u32) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(mix(seed) ^ u64::from(index)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_highest_and_the_lower_id_of_a_tie() {
        let check =
            |logits: &[f32], expected| assert_eq!(sample(logits, &Sampling::GREEDY, 3), expected);
        check(&[0.0, 2.0, 1.0], Some(1));
        check(&[1.0, 3.0, 3.0], Some(1));
        check(&[-0.0, 0.0], Some(0));
        check(&[f32::NAN, -5.0, f32::NAN], Some(1));
        check(&[f32::NEG_INFINITY, f32::NEG_INFINITY], Some(0));
        check(&[f32::NAN], None);
        check(&[], None);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 2.0];
        let temperature = 1.5;
        let mut counts = [0_u32; 4];
        let draws = 40_000;
        for index in 0..draws {
            let sampling = Sampling { temperature, seed: 11, ..Sampling::GREEDY };
            counts[sample(&logits, &sampling, index).unwrap() as usize] += 1;
        }
        let weights = logits.map(|logit| f64::from(logit / temperature).exp());
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(weights) {
            let (found, expected) = (f64::from(*count) / f64::from(draws), weight / total);
            // Four standard deviations of the rarest.
            assert!((found - expected).abs() < 0.01, "{counts:?}: {found} {expected}");
        }
    }

    #[test]
    fn seed_and_index_decide() {
        let logits = [0.0; 100];
        let draw = |seed, index| {
            sample(&logits, &Sampling { temperature: 1.0, seed, ..Sampling::GREEDY }, index)
        };
        assert_eq!(draw(5, 9), draw(5, 9));
        let differ = |f: &dyn Fn(u32) -> Option<u32>| (1..20).any(|i| f(i) != f(0));
        assert!(differ(&|seed| draw(u64::from(seed), 0)) && differ(&|index| draw(0, index)));
    }
}
