//! Everything is computed at once: there is nothing to look ahead for, and logits are at hand.

use std::{convert::Infallible, ops::Range};

use super::{Cache, Cpu, StoredMatrix, Tensor};
use crate::backend::{Lookahead, Ranks, ScoredRow, StepError, TensorParallel, TokenChoice};

impl Lookahead for Cpu {
    type LateTokens = Infallible;

    fn late_tokens(&self, _: usize, _: Range<usize>, _: usize) -> Option<Infallible> {
        None
    }

    fn embed_late(&self, tokens: &Infallible, _: &StoredMatrix) -> Tensor {
        match *tokens {}
    }

    fn set_aside(&self, tokens: &mut Infallible) {
        match *tokens {}
    }

    fn take_up(&self, tokens: Infallible, _: &[u32]) -> Result<(), StepError> {
        match tokens {}
    }

    fn fork(&self, tokens: &Infallible, _: &Cache) -> Cache {
        match *tokens {}
    }

    fn read_and_flush(
        &self,
        tensors: Vec<Tensor>,
        caches: &mut [&mut Cache],
        ranks: &Ranks<'_>,
        _: &mut dyn FnMut(&[&mut Cache]),
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let values = tensors.into_iter().map(|tensor| self.read(tensor, ranks));
        let values = values.collect::<Result<_, _>>()?;
        self.flush(caches, ranks)?;
        Ok(values)
    }
}

impl TokenChoice for Cpu {
    fn chooses(&self, _: bool) -> bool {
        false
    }

    fn best_tokens(&self, _: &Tensor, _: &[ScoredRow], _: u32) -> Option<Tensor> {
        None
    }
}
