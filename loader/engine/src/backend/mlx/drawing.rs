//! The graph of a step, drawn and not computed: how many kernels a GPU would run.

use std::ops::Range;

use shardpack_mlx::Array;

use super::{Cache, Mlx, Tensor};
use crate::backend::{CacheShape, KvCache as _, StepError, Tensors as _};

/// The logits of a step over the same positions of each sequence, and what it appends to the caches.
pub type Forward<'a> =
    &'a (dyn Fn(&mut [&mut Cache], Range<usize>) -> Result<Option<Tensor>, StepError> + Sync);

/// A step.
#[derive(Clone, Copy, Debug)]
pub struct DrawnStep {
    /// Sequences in it.
    pub sequences: usize,
    /// Tokens of each that are cached before.
    pub prompt: usize,
    /// Tokens of each in it.
    pub rows: usize,
}

impl Mlx {
    /// The graph of a step, in the DOT language, with one node for each kernel that a GPU runs where
    /// MLX spells it out on a processor. Weights, and what the tokens before left in the caches, are
    /// there already; without a prompt nothing is computed.
    pub fn graph_of_step(
        &self,
        shape: &CacheShape,
        DrawnStep { sequences, prompt, rows }: DrawnStep,
        forward: Forward<'_>,
    ) -> Result<String, StepError> {
        let mut caches: Vec<Cache> = (0..sequences).map(|_| self.cache(shape, &[])).collect();
        self.run(|| {
            let mut caches: Vec<&mut Cache> = caches.iter_mut().collect();
            let all = |caches: &[&mut Cache]| -> Vec<Array> {
                caches.iter().flat_map(|cache| cache.arrays()).cloned().collect()
            };
            // The last token before comes by itself: the caches are as a step of one token leaves
            // them.
            let before = [0..prompt.saturating_sub(1), prompt.saturating_sub(1)..prompt];
            for positions in before.into_iter().filter(|positions| !positions.is_empty()) {
                let logits = forward(&mut caches, positions)?.map(|logits| logits.array);
                let cached = all(&caches);
                let computed: Vec<&Array> = cached.iter().chain(&logits).collect();
                let failed = |error| StepError::Backend(format!("{error}"));
                self.library.eval(&computed).map_err(failed)?;
            }
            self.library.mark_kernels(true);
            let logits = forward(&mut caches, prompt..prompt + rows);
            self.library.mark_kernels(false);
            let logits = logits?.map(|logits| logits.array);
            let (last, cached) = (self.all_reduces.end(), all(&caches));
            let arrays: Vec<&Array> = logits.iter().chain(&cached).chain(&last).collect();
            Ok(self.library.graph(&arrays))
        })
    }
}
