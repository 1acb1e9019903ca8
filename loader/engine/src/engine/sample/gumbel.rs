//! Counter-based Gumbel noise per token.

use shardpack_kernels::exp::exp;

/// A finalizer (`SplitMix64`'s; Steele, Lea, Flood 2014).
pub(in crate::engine) const fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The noise of one token of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct GumbelNoise {
    key: u64,
}

impl GumbelNoise {
    /// The noise after `index` tokens.
    pub(super) const fn new(seed: u64, index: u32) -> Self {
        Self { key: mix(mix(seed) ^ index as u64) }
    }

    /// The noise of a token is a function of it and the token.
    pub(super) const fn key(self) -> u64 {
        self.key
    }

    /// A number between 0 and 1, neither of them.
    const fn uniform(self, token: u32) -> f64 {
        let bits = mix(self.key ^ token as u64) >> 12;
        (bits as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// The noisy value of a logit that was divided by the temperature.
    pub(super) fn score(self, token: u32, scaled: f32) -> f64 {
        f64::from(scaled) - libm::log(-libm::log(self.uniform(token)))
    }

    /// The token with the highest score among those whose scaled logits are numbers; `first` is
    /// the token of the first. Ties go to the lower token.
    pub(super) fn best(
        self,
        scaled: impl Iterator<Item = f32>,
        start: (u32, f32),
        first: u32,
    ) -> u32 {
        /// No score exceeds its logit by more: `-ln(-ln(1 - 2^-53))`, rounded up.
        const MOST_NOISE: f32 = 37.0;
        let (mut token, mut score) = (start.0, self.score(start.0, start.1));
        for (other, scaled) in (first..).zip(scaled) {
            // Most tokens need no noise, and most of the others no logarithm: what they lack,
            // the noise exceeds with a probability below exp(-lack).
            let lack = score as f32 - scaled;
            // A NaN logit gives a NaN lack.
            if lack.is_nan() || lack >= MOST_NOISE || other == start.0 {
                continue;
            }
            // A little more than the exponential, for what is rounded off.
            if 1.0 - self.uniform(other) > f64::from(exp(-lack)) * 1.001 && lack > 0.0 {
                continue;
            }
            let found = self.score(other, scaled);
            if found > score || (found == score && other < token) {
                (token, score) = (other, found);
            }
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortcuts_choose_what_all_scores_would() {
        for index in 0..300 {
            let noise = GumbelNoise::new(17, index);
            let spread = [0.0, 1.0, 8.0, 60.0][index as usize % 4];
            let logits: Vec<f32> =
                (0..700).map(|i| ((i * 37 + index) as f32 * 0.61).sin() * spread).collect();
            let start = (0..700_u32)
                .reduce(|a, b| if logits[b as usize] > logits[a as usize] { b } else { a })
                .unwrap();
            let expected = (0..700_u32).fold((0, f64::NEG_INFINITY), |best, token| {
                let score = noise.score(token + 5, logits[token as usize]);
                if score > best.1 { (token + 5, score) } else { best }
            });
            let start = (start + 5, logits[start as usize]);
            assert_eq!(noise.best(logits.iter().copied(), start, 5), expected.0, "{index}");
        }
    }

    #[test]
    fn seed_index_and_token_decide() {
        let draw = |seed, index, token| GumbelNoise::new(seed, index).uniform(token);
        assert_eq!(draw(5, 9, 3).to_bits(), draw(5, 9, 3).to_bits());
        for other in [draw(6, 9, 3), draw(5, 10, 3), draw(5, 9, 4)] {
            assert_ne!(draw(5, 9, 3).to_bits(), other.to_bits());
        }
        let mean = (0..10_000).map(|token| draw(1, 2, token)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.015, "{mean}");
    }
}
