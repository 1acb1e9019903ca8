//! The graph of a step, drawn and not computed: how many kernels a GPU would run.

use std::ops::Range;

use shardpack_mlx::Array;

use super::{Cache, Mlx, Tensor};
use crate::backend::{CacheShape, KvCache as _, StepError, Tensors as _};

/// The logits of a step over some positions, and what it appends to a cache.
pub type Forward<'a> =
    &'a (dyn Fn(&mut Cache, Range<usize>) -> Result<Option<Tensor>, StepError> + Sync);

impl Mlx {
    /// The graph of a step of `rows` tokens after a prompt of `prompt`, in the DOT language, with one
    /// node for each kernel that a GPU runs where MLX spells it out on a processor. Weights, and what
    /// the prompt left in the cache, are there already; without a prompt nothing is computed.
    pub fn graph_of_step(
        &self,
        shape: &CacheShape,
        [prompt, rows]: [usize; 2],
        forward: Forward<'_>,
    ) -> Result<String, StepError> {
        let mut cache = self.cache(shape, &[]);
        self.run(|| {
            if prompt > 0 {
                let logits = forward(&mut cache, 0..prompt)?.map(|logits| logits.array);
                let computed: Vec<&Array> = cache.arrays().chain(&logits).collect();
                let failed = |error| StepError::Backend(format!("{error}"));
                self.library.eval(&computed).map_err(failed)?;
            }
            self.library.mark_kernels(true);
            let logits = forward(&mut cache, prompt..prompt + rows);
            self.library.mark_kernels(false);
            let logits = logits?.map(|logits| logits.array);
            let last = self.all_reduces.end();
            let arrays: Vec<&Array> = logits.iter().chain(cache.arrays()).chain(&last).collect();
            Ok(self.library.graph(&arrays))
        })
    }
}
