//! Work on the next step while the device computes this one.
//!
//! The next step's graph is built before its tokens are known, on copies of the caches' handles. If
//! the next plan is what was expected, the tokens are written into the graph's input and the copies
//! take the caches' places; otherwise both are dropped, and nothing has been computed.

use std::{convert::Infallible, ops::Range};

use super::{Ranks, StepError, TensorParallel};

/// Work on the next step while the device computes this one.
pub trait Lookahead: TensorParallel {
    /// Tokens that are known after the graph is built, and the collectives of that graph.
    type LateTokens: Send;

    /// Room for tokens that are known later; of the `vocab_size` possible ones the embedding here
    /// has those of `held`. None where steps are computed at once.
    fn late_tokens(
        &self,
        rows: usize,
        held: Range<usize>,
        vocab_size: usize,
    ) -> Option<Self::LateTokens>;

    /// [`DenseOps::embed`](super::DenseOps::embed) of such tokens.
    fn embed_late(&self, tokens: &Self::LateTokens, table: &Self::Matrix) -> Self::Tensor;

    /// Ends the building of a graph with such tokens.
    fn set_aside(&self, tokens: &mut Self::LateTokens);

    /// Takes up a graph that was set aside: its tokens are these.
    fn take_up(&self, tokens: Self::LateTokens, ids: &[u32]) -> Result<(), StepError>;

    /// A second handle to a cache's contents, for a graph with such tokens; it must be dropped before the next evaluation, which
    /// would copy the cache otherwise.
    fn fork(&self, tokens: &Self::LateTokens, cache: &Self::Cache) -> Self::Cache;

    /// The values of each tensor and the flushed caches, with `ahead` called while the device
    /// computes them, if it does so on its own.
    fn read_and_flush(
        &self,
        tensors: Vec<Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        ranks: &Ranks<'_>,
        ahead: &mut dyn FnMut(&[&mut Self::Cache]),
    ) -> Result<Vec<Vec<f32>>, StepError>;
}

/// A backend that computes each operation when it is called: there is nothing to look ahead for.
pub trait ComputesAtOnce: TensorParallel {}

impl<B: ComputesAtOnce> Lookahead for B {
    type LateTokens = Infallible;

    fn late_tokens(&self, _: usize, _: Range<usize>, _: usize) -> Option<Infallible> {
        None
    }

    fn embed_late(&self, tokens: &Infallible, _: &B::Matrix) -> B::Tensor {
        match *tokens {}
    }

    fn set_aside(&self, tokens: &mut Infallible) {
        match *tokens {}
    }

    fn take_up(&self, tokens: Infallible, _: &[u32]) -> Result<(), StepError> {
        match tokens {}
    }

    fn fork(&self, tokens: &Infallible, _: &B::Cache) -> B::Cache {
        match *tokens {}
    }

    fn read_and_flush(
        &self,
        tensors: Vec<B::Tensor>,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
        _: &mut dyn FnMut(&[&mut B::Cache]),
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let values = tensors.into_iter().map(|tensor| self.read(tensor, ranks));
        let values = values.collect::<Result<_, _>>()?;
        self.flush(caches, ranks)?;
        Ok(values)
    }
}
