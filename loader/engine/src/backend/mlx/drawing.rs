//! The graph of a step, drawn and not computed: how many kernels a GPU would run.

use shardpack_mlx::Array;

use super::{Cache, Mlx};
use crate::{
    backend::{KvCache as _, Ranks, StepError, Tensors as _},
    model::{Batch, Model},
};

impl Mlx {
    /// The graph of a step of `rows` tokens after a prompt of `prompt`, in the DOT language, with one
    /// node for each kernel that a GPU runs where MLX spells it out on a processor. Weights, and what
    /// the prompt left in the cache, are there already.
    pub fn graph_of_step(
        &self,
        model: &Model<Self>,
        prompt: usize,
        rows: usize,
        ranks: &Ranks<'_>,
    ) -> Result<String, StepError> {
        let mut cache = self.cache(&model.cache_shape(), &[]);
        self.run(|| {
            let logits = self.step(model, &mut cache, 0..prompt, ranks)?;
            let computed: Vec<&Array> = cache.arrays().chain(&logits).collect();
            let failed = |error| StepError::Backend(format!("{error}"));
            self.library.eval(&computed).map_err(failed)?;
            self.library.mark_kernels(true);
            let logits = self.step(model, &mut cache, prompt..prompt + rows, ranks);
            self.library.mark_kernels(false);
            let logits = logits?;
            let arrays: Vec<&Array> = logits.iter().chain(cache.arrays()).collect();
            Ok(self.library.graph(&arrays))
        })
    }

    /// Logits after the last token of some positions.
    fn step(
        &self,
        model: &Model<Self>,
        cache: &mut Cache,
        positions: std::ops::Range<usize>,
        ranks: &Ranks<'_>,
    ) -> Result<Option<Array>, StepError> {
        let rows = positions.len();
        let batch = Batch {
            tokens: (0..rows as u32).collect(),
            positions: positions.map(|position| position as u32).collect(),
            lengths: vec![rows],
            logit_rows: vec![rows - 1],
            ..Batch::default()
        };
        let logits = model.forward(self, &batch, &mut [cache], ranks)?;
        Ok(logits.map(|logits| logits.array))
    }
}
