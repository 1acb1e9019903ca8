//! RMS norm over groups of columns that ranks share.

use std::ops::Range;

use shardpack_formats::spec::NormKind;

use super::step::ForwardPass;
use crate::backend::{Backend, Columns, NormParams, SquareSums, StepError};

/// A norm by the root mean square over each of several groups of columns, of which ranks hold parts.
pub(super) struct GroupNorm<B: Backend> {
    /// One for each column held here; absent where none are.
    pub(super) gain: Option<B::Vector>,
    /// Groups of the whole vector.
    pub(super) groups: usize,
    /// Columns of a group.
    pub(super) width: usize,
    pub(super) eps: f32,
    /// The columns held here.
    pub(super) held: Range<usize>,
}

impl<B: Backend> GroupNorm<B> {
    /// Normalises what is held here, `[tokens, columns held]`; every rank takes part in the
    /// all-reduce.
    pub(super) fn apply(
        &self,
        pass: &ForwardPass<'_, B>,
        x: Option<B::Tensor>,
    ) -> Result<Option<B::Tensor>, StepError> {
        let backend = pass.backend;
        let local = |group: usize| {
            let all = group * self.width..(group + 1) * self.width;
            let of_rank = |at: usize| at.clamp(self.held.start, self.held.end) - self.held.start;
            of_rank(all.start)..of_rank(all.end)
        };
        let (Some(x), Some(gain)) = (x, &self.gain) else {
            let nothing = backend.zeros(pass.tokens(), 1);
            let none: Vec<_> =
                (0..self.groups).map(|_| Columns { x: &nothing, columns: 0..0 }).collect();
            backend.all_reduce(backend.square_sums(&none), pass.ranks)?;
            return Ok(None);
        };
        let parts: Vec<_> =
            (0..self.groups).map(|group| Columns { x: &x, columns: local(group) }).collect();
        let sums = backend.all_reduce(backend.square_sums(&parts), pass.ranks)?;
        let params = NormParams { kind: NormKind::Rms, eps: self.eps, gain, bias: None };
        let of = |part: usize| SquareSums { sums: &sums, part, full_width: self.width };
        let held = self.held.len();
        let mut done = None;
        for group in (0..self.groups).filter(|group| !local(*group).is_empty()) {
            if local(group) == (0..held) {
                return Ok(Some(backend.norm_by_sums(x, &params, of(group))));
            }
            let whole = backend.slice_heads(&x, held, 0..held);
            let whole = backend.norm_by_sums(whole, &params, of(group));
            let part = backend.slice_heads(&whole, held, local(group));
            done = Some(match done {
                Some(done) => backend.join_heads(&done, &part, 1),
                None => part,
            });
        }
        Ok(done)
    }
}
