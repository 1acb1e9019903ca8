//! Rows whose token the backend can find, and whether what it found is certain.

use super::{
    Row,
    candidates::{Candidate, ShardCandidates},
    gumbel::GumbelNoise,
    sampler::SamplingMethod,
};
use crate::backend::{Best, ScoreNoise};

/// How a row's tokens are scored, where nothing but its logits and noise counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) struct RowScore {
    pub(in crate::engine) noise: Option<ScoreNoise>,
}

impl Row<'_> {
    /// None where filters, penalties, masks or reported probabilities need the whole row.
    pub(in crate::engine) fn score(&self) -> Option<RowScore> {
        let params = &self.sampler.params;
        let adjusted = self.mask.is_some()
            || !params.sampling.logit_bias.is_empty()
            || params.needs_history()
            || (self.index < params.forbidden_before && !params.forbidden.is_empty());
        if adjusted || params.logprobs.is_some() {
            return None;
        }
        let noise = GumbelNoise::new(params.sampling.seed, self.index);
        match self.sampler.method() {
            SamplingMethod::Greedy => Some(RowScore { noise: None }),
            SamplingMethod::Gumbel => {
                let (key, temperature) = (noise.key(), self.temperature());
                Some(RowScore { noise: Some(ScoreNoise { key, temperature }) })
            }
            SamplingMethod::Filtered => None,
        }
    }
}

impl RowScore {
    /// The candidates of a shard whose first token is `first`, by its two best columns; none where
    /// the whole row has to tell: for infinite logits, and where the noise of the two is too close
    /// for f32.
    pub(in crate::engine) fn candidates(
        self,
        [best, next]: [Best; 2],
        first: u32,
    ) -> Option<ShardCandidates> {
        /// More than f32 scores may be wrong by: eight roundings of the largest number on the way
        /// to them, and the noise is below 40.
        const ERROR: f32 = 1e-5;
        let margin = match self.noise {
            None => 0.0,
            Some(_) => (40.0 + best.score.abs()) * ERROR,
        };
        let certain = best.score.is_finite() && best.logit.is_finite();
        // An infinite gap: there is no other number.
        if !certain || best.score - next.score < margin {
            return None;
        }
        // Zeros of either sign are the same.
        let (token, raw) = (first + best.column, best.logit);
        let candidates = vec![Candidate { token, logit: raw + 0.0, raw }];
        Some(ShardCandidates { candidates, more: true, sum: None, raw_sum: None, raw_top: vec![] })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shardpack_engine_api::{PromptOutput, Sampling};

    use super::*;
    use crate::{
        backend::{Ranks, ScoredRow, TensorParallel, Tensors, TokenChoice},
        engine::sample::{Sampler, SamplingParams},
        testing::{group::thread_groups, mlx::mlx},
    };

    /// Rows of each kind; ties, infinite numbers and NaN are among them.
    const ROWS: usize = 60;
    const WIDTH: usize = 500;

    fn logits(round: usize) -> Vec<f32> {
        let value = |place: usize| {
            let (row, column) = (place / WIDTH, place % WIDTH);
            let spread = [0.0, 1.0, 8.0, 60.0][row % 4];
            match (row % 10, column % 50) {
                (4, 9) => f32::INFINITY,
                (5, 3..) => f32::NEG_INFINITY,
                (3, 7) | (6, _) => f32::NAN,
                (7, _) => (column / 100) as f32,
                _ => ((column * 37 + row * 11 + round * 7) as f32 * 0.61).sin() * spread,
            }
        };
        (0..ROWS * WIDTH).map(value).collect()
    }

    #[test]
    fn mlx_finds_the_best_tokens_of_whole_rows() {
        let Some(mlx) = mlx() else { return };
        let group = thread_groups(1, 1).remove(0);
        let ranks = Ranks::all(group.as_ref(), Duration::from_mins(10));
        let (mut certain, mut finite) = (0, 0);
        for round in 0..100 {
            let values = logits(round);
            let samplers: Vec<Sampler> = (0..ROWS)
                .map(|row| {
                    let temperature = [0.0, 0.3, 1.0, 1.7][(row + round) % 4];
                    let seed = (row * 1_000_003 + round) as u64;
                    let sampling = Sampling { temperature, seed, ..Sampling::GREEDY };
                    Sampler::new(SamplingParams {
                        sampling,
                        logprobs: None,
                        prompt_output: PromptOutput::Nothing,
                        prompt_len: 0,
                        forbidden: Vec::new(),
                        forbidden_before: 0,
                    })
                })
                .collect();
            let rows: Vec<Row<'_>> = (samplers.iter())
                .map(|sampler| Row { sampler, index: round as u32, drafts: &[], mask: None })
                .collect();
            let scores: Vec<RowScore> = rows.iter().map(|row| row.score().unwrap()).collect();
            let wanted: Vec<ScoredRow> = (scores.iter().enumerate())
                .map(|(row, score)| ScoredRow { row, noise: score.noise })
                .collect();
            let found = mlx.run(|| {
                let logits = mlx.tensor(values.clone(), WIDTH);
                let best = mlx.best_tokens(&logits, &wanted, 11).unwrap();
                mlx.read(best, &ranks).unwrap()
            });
            for (row, numbers) in found.as_chunks::<6>().0.iter().enumerate() {
                let [a, b, c, d, e, f] = *numbers;
                let both = [Best::of([a, b, c]), Best::of([d, e, f])];
                let whole = &values[row * WIDTH..(row + 1) * WIDTH];
                let expected = ShardCandidates::of(&rows[row], whole, 11);
                finite += usize::from(!matches!(row % 10, 4 | 6));
                if let Some(found) = scores[row].candidates(both, 11) {
                    certain += 1;
                    assert_eq!(found.candidates, expected.candidates, "row {row} of {round}");
                }
            }
        }
        assert!(certain * 100 > finite * 99, "{certain} of {finite} rows were certain");
    }
}
