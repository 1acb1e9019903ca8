//! Norms over groups of columns that ranks share.

use std::ops::Range;

use shardpack_formats::{hex::HexF32, spec::NormKind};

use super::step::Step;
use crate::backend::{Backend, NormStep, StepError};

/// A norm by the root of the mean square over each of several groups of columns, of which ranks hold
/// parts.
pub(super) struct GroupNorm<B: Backend> {
    /// One for each column held here; absent where none are.
    gain: Option<B::Vector>,
    /// Groups of the whole vector.
    groups: usize,
    /// Columns of a group.
    width: usize,
    eps: f32,
    /// The columns held here.
    held: Range<usize>,
}

impl<B: Backend> GroupNorm<B> {
    pub(super) fn new(
        gain: Option<B::Vector>,
        [groups, width]: [usize; 2],
        eps: HexF32,
        held: Range<usize>,
    ) -> Self {
        Self { gain, groups, width, eps: eps.0, held }
    }

    /// Normalises what is held here; every rank takes part in the sums.
    pub(super) fn apply(
        &self,
        step: &Step<'_, B>,
        x: Option<B::Tensor>,
    ) -> Result<Option<B::Tensor>, StepError> {
        let backend = step.backend;
        let rows = step.batch.tokens.len();
        let local = |group: usize| {
            let all = group * self.width..(group + 1) * self.width;
            let of_rank = |at: usize| at.clamp(self.held.start, self.held.end) - self.held.start;
            of_rank(all.start)..of_rank(all.end)
        };
        let (Some(x), Some(gain)) = (x, &self.gain) else {
            backend.all_reduce(backend.zeros(rows, self.groups), step.ranks)?;
            return Ok(None);
        };
        let parts: Vec<_> = (0..self.groups).map(|group| (&x, local(group))).collect();
        let sums = backend.all_reduce(backend.square_sums(&parts), step.ranks)?;
        let norm = NormStep { kind: NormKind::Rms, eps: self.eps, gain, bias: None };
        let held = self.held.len();
        let mut done = None;
        for group in (0..self.groups).filter(|group| !local(*group).is_empty()) {
            if local(group) == (0..held) {
                return Ok(Some(backend.norm_by_sums(x, &norm, (&sums, group), self.width)));
            }
            let whole = backend.slice_heads(&x, held, 0..held);
            let whole = backend.norm_by_sums(whole, &norm, (&sums, group), self.width);
            let part = backend.slice_heads(&whole, held, local(group));
            done = Some(match done {
                Some(done) => backend.join_heads(&done, &part, 1),
                None => part,
            });
        }
        Ok(done)
    }
}
