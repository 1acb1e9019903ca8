//! Reads a step's logits: whole rows, or only the best tokens where these decide.

use super::sample::{Row, RowScore, ShardCandidates};
use crate::{
    backend::{Backend, Best, Ranks, ScoredRow, StepError},
    model::Model,
};

/// Reads the logits of one step.
pub(super) struct RowReader<'a, B: Backend> {
    pub(super) model: &'a Model<B>,
    pub(super) backend: &'a B,
    pub(super) ranks: &'a Ranks<'a>,
}

/// Logits of the rows that were read, and by row the candidates where these suffice.
type RowsRead = (Vec<f32>, Vec<Option<ShardCandidates>>);

impl<B: Backend> RowReader<'_, B> {
    /// Reads what `rows` need and flushes the caches; `ahead` is called meanwhile.
    pub(super) fn read(
        &self,
        logits: B::Tensor,
        rows: &[Row<'_>],
        caches: &mut [&mut B::Cache],
        ahead: &mut dyn FnMut(&[&mut B::Cache]),
    ) -> Result<RowsRead, StepError> {
        let (backend, range) = (self.backend, self.model.held_logits());
        let first = range.start as u32;
        let scores: Vec<Option<RowScore>> = rows
            .iter()
            .map(|row| row.score().filter(|score| backend.chooses(score.noise.is_some())))
            .collect();
        let scored = |(row, score): (usize, &Option<RowScore>)| {
            score.map(|RowScore { noise }| ScoredRow { row, noise })
        };
        let wanted: Vec<ScoredRow> = scores.iter().enumerate().filter_map(scored).collect();
        let Some(best) = backend.best_tokens(&logits, &wanted, first) else {
            let values = backend.read_and_flush(vec![logits], caches, self.ranks, ahead)?;
            return Ok((values.concat(), Vec::new()));
        };
        let whole: Vec<usize> = (0..rows.len()).filter(|row| scores[*row].is_none()).collect();
        let mut tensors = vec![best];
        if !whole.is_empty() {
            tensors.push(backend.select_rows(&logits, &whole));
        }
        let mut values = backend.read_and_flush(tensors, caches, self.ranks, ahead)?;
        let read = if whole.is_empty() { Vec::new() } else { values.pop().expect("two tensors") };
        let mut chosen: Vec<Option<ShardCandidates>> = rows.iter().map(|_| None).collect();
        for (ScoredRow { row, .. }, numbers) in wanted.iter().zip(values[0].as_chunks::<6>().0) {
            let [a, b, c, d, e, f] = *numbers;
            let both = [Best::of([a, b, c]), Best::of([d, e, f])];
            chosen[*row] = scores[*row].and_then(|score| score.candidates(both, first));
        }
        let all: Vec<usize> = (0..rows.len()).filter(|row| chosen[*row].is_none()).collect();
        if all.len() == whole.len() {
            return Ok((read, chosen));
        }
        // Too close, or not finite: these rows decide by all their logits.
        let values = backend.read(backend.select_rows(&logits, &all), self.ranks)?;
        Ok((values, chosen))
    }
}
