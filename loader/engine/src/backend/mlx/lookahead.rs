//! The next step's graph, built while this one is computed.

use std::ops::Range;

use shardpack_mlx::{Array, Binary, Element, LateInput, MlxError};
use zerocopy::IntoBytes;

use super::{Cache, Matrix, Mlx, Tensor, ranks};
use crate::backend::{Lookahead, Ranks, StepError};

/// Tokens of a graph whose values are written before it is computed.
#[derive(Debug)]
pub struct LateTokens {
    held: Range<usize>,
    /// Rows of the embedding.
    indices: LateInput,
    /// Factors on them, 0 for tokens that other ranks hold; none where all are here.
    mask: Option<LateInput>,
    /// The latest all-reduce of the graph.
    last: Option<Array>,
}

impl Lookahead for Mlx {
    type LateTokens = LateTokens;

    fn late_tokens(
        &self,
        rows: usize,
        held: Range<usize>,
        vocab_size: usize,
    ) -> Option<LateTokens> {
        let indices = self.library.late_input(Element::U32, &[rows]);
        let mask =
            (held.len() < vocab_size).then(|| self.library.late_input(Element::F32, &[rows, 1]));
        Some(LateTokens { held, indices, mask, last: None })
    }

    fn embed_late(&self, tokens: &LateTokens, table: &Matrix) -> Tensor {
        let indices = tokens.indices.array();
        let rows = table.rows(indices);
        let array = match &tokens.mask {
            Some(mask) => rows.binary(Binary::Multiply, mask.array()),
            None => rows,
        };
        Tensor::new(indices.shape()[0], table.inputs(), array.cast(self.activations))
    }

    fn set_aside(&self, tokens: &mut LateTokens) {
        tokens.last = self.all_reduces.end();
    }

    fn take_up(&self, tokens: LateTokens, ids: &[u32]) -> Result<(), StepError> {
        let LateTokens { held, indices, mask, last } = tokens;
        let inside = |token: &u32| held.contains(&(*token as usize));
        let index = |token: &u32| if inside(token) { *token - held.start as u32 } else { 0 };
        let failed = |error: MlxError| StepError::Backend(error.to_string());
        let values: Vec<u32> = ids.iter().map(index).collect();
        indices.write(values.as_bytes()).map_err(failed)?;
        if let Some(mask) = mask {
            let factor = |token: &u32| if inside(token) { 1.0_f32 } else { 0.0 };
            let values: Vec<f32> = ids.iter().map(factor).collect();
            mask.write(values.as_bytes()).map_err(failed)?;
        }
        self.all_reduces.resume(last);
        Ok(())
    }

    fn fork(&self, _: &LateTokens, cache: &Cache) -> Cache {
        cache.clone()
    }

    fn read_and_flush(
        &self,
        tensors: Vec<Tensor>,
        caches: &mut [&mut Cache],
        ranks: &Ranks<'_>,
        ahead: &mut dyn FnMut(&[&mut Cache]),
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let last = self.all_reduces.end();
        // Row-contiguous f32, so that reading adds nothing to the graph.
        let arrays = tensors.iter().map(|tensor| &tensor.array).chain(&last);
        let wanted: Vec<Array> = arrays.cloned().collect();
        drop(tensors);
        let kept: Vec<Array> = caches.iter().flat_map(|cache| cache.arrays()).cloned().collect();
        let all: Vec<&Array> = wanted.iter().chain(&kept).collect();
        let count = wanted.len() - usize::from(last.is_some());
        ranks::evaluate(&self.library, ranks, last.as_ref(), || {
            self.library.start(&all)?;
            ahead(caches);
            self.library.eval(&all)?;
            wanted[..count].iter().map(Array::read).collect()
        })
    }
}
