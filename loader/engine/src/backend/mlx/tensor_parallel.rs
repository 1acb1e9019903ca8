//! Collectives within the graph, and norms whose rows are sharded over ranks.

use shardpack_mlx::{Array, Binary, Element, Reduce, Unary};

use super::{Cache, Mlx, Tensor, Vector, ranks};
use crate::backend::{Columns, NormParams, Ranks, SquareSums, StepError, TensorParallel};

impl TensorParallel for Mlx {
    fn all_reduce(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
        if ranks.count() == 1 || x.rows * x.width == 0 {
            return Ok(x);
        }
        Ok(x.with(self.all_reduces.sum(&x.array)))
    }

    fn gather_columns(
        &self,
        x: Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Tensor, StepError> {
        if let [width] = widths {
            assert_eq!(x.width, *width, "columns of the only rank");
            return Ok(x);
        }
        assert_eq!(x.width, widths[ranks.group.rank() as usize], "columns of this rank");
        let array = self.all_reduces.gather(&x.array, x.rows, widths);
        Ok(Tensor::new(x.rows, widths.iter().sum(), array))
    }

    fn square_sums(&self, parts: &[Columns<'_, Tensor>]) -> Tensor {
        let rows = parts.first().map_or(0, |part| part.x.rows);
        let sums: Vec<Array> = parts
            .iter()
            .map(|Columns { x, columns }| {
                if columns.is_empty() {
                    return self.library.full(0.0, Element::F32, &[rows, 1]);
                }
                let part = x.exact().slice(1, columns.start, columns.end);
                part.unary(Unary::Square).reduce(Reduce::Sum, 1)
            })
            .collect();
        let array = self.library.concat(&sums.iter().collect::<Vec<_>>(), 1);
        Tensor::new(rows, parts.len(), array)
    }

    fn norm_by_sums(
        &self,
        x: Tensor,
        params: &NormParams<'_, Vector>,
        SquareSums { sums, part, full_width }: SquareSums<'_, Tensor>,
    ) -> Tensor {
        let sum = sums.array.slice(1, part, part + 1);
        let mean = sum.with_constant(Binary::Divide, full_width as f32);
        let root = mean.with_constant(Binary::Add, params.eps).unary(Unary::Rsqrt);
        let scaled = x.exact().binary(Binary::Multiply, &root);
        x.with_exact(&scaled.binary(Binary::Multiply, params.gain))
    }

    fn read(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Vec<f32>, StepError> {
        // Evaluated together with every all-reduce of the step so far, in their order.
        let last = self.all_reduces.end();
        let arrays: Vec<&Array> = last.iter().chain([&x.array]).collect();
        ranks::evaluate(&self.library, ranks, last.as_ref(), || {
            self.library.eval(&arrays)?;
            x.array.read()
        })
    }

    fn flush(&self, caches: &mut [&mut Cache], ranks: &Ranks<'_>) -> Result<(), StepError> {
        let last = self.all_reduces.end();
        let arrays = caches.iter().flat_map(|cache| cache.arrays()).chain(&last);
        let arrays: Vec<&Array> = arrays.collect();
        ranks::evaluate(&self.library, ranks, last.as_ref(), || self.library.eval(&arrays))
    }
}
