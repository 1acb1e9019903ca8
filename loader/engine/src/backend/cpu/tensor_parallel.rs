//! Collectives within a step, and norms whose rows are sharded over ranks.

use shardpack_collectives::GroupError;
use shardpack_formats::spec::NormKind;
use shardpack_kernels::norm;
use zerocopy::IntoBytes;

use super::{Cache, Cpu, Tensor};
use crate::backend::{Columns, NormParams, Ranks, SquareSums, StepError, TensorParallel};

impl TensorParallel for Cpu {
    fn all_reduce(&self, mut x: Tensor, ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
        if ranks.count() > 1 {
            ranks.all_reduce(&mut x.values)?;
        }
        Ok(x)
    }

    fn gather_columns(
        &self,
        x: Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Tensor, StepError> {
        let [width] = widths else { return gather_parts(&x, widths, ranks) };
        assert_eq!(x.width, *width, "columns of the only rank");
        Ok(x)
    }

    fn square_sums(&self, parts: &[Columns<'_, Tensor>]) -> Tensor {
        let rows = parts.first().map_or(0, |part| part.x.rows());
        let mut out = Tensor::zeros(rows, parts.len());
        for (index, Columns { x, columns }) in parts.iter().enumerate() {
            assert_eq!(x.rows(), rows, "rows of all parts");
            let place = [index, parts.len()];
            norm::square_sums(&x.values, x.width, columns.clone(), &mut out.values, place);
        }
        out
    }

    fn norm_by_sums(
        &self,
        mut x: Tensor,
        params: &NormParams<'_, Vec<f32>>,
        SquareSums { sums, part, full_width }: SquareSums<'_, Tensor>,
    ) -> Tensor {
        assert!(
            params.kind == NormKind::Rms && params.bias.is_none(),
            "checked when a model is loaded"
        );
        assert_eq!((x.width, x.rows()), (params.gain.len(), sums.rows()), "sums and gains");
        let each = sums.values.chunks_exact(sums.width).map(|row| row[part]);
        norm::scale_by_square_sums(&mut x.values, params.gain, each, full_width, params.eps);
        x
    }

    fn read(&self, x: Tensor, _: &Ranks<'_>) -> Result<Vec<f32>, StepError> {
        Ok(x.values.into_vec())
    }

    fn flush(&self, _: &mut [&mut Cache], _: &Ranks<'_>) -> Result<(), StepError> {
        Ok(())
    }
}

/// Puts the ranks' columns side by side; their sizes are foreign until compared.
fn gather_parts(x: &Tensor, widths: &[usize], ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
    let mine = ranks.group.rank() as usize;
    assert_eq!(x.width, widths[mine], "columns of this rank");
    // A rank without columns has no rows to count; the others' tell.
    let parts = ranks.group.all_gather(x.values.as_bytes(), ranks.deadline())?;
    let rows = widths
        .iter()
        .zip(&parts)
        .find_map(|(width, part)| (part.len() / size_of::<f32>()).checked_div(*width))
        .unwrap_or(0);
    let mut out = Tensor::zeros(rows, widths.iter().sum());
    let mut column = 0;
    for (rank, (width, part)) in widths.iter().zip(&parts).enumerate() {
        let (floats, rest) = part.as_chunks::<4>();
        if floats.len() != rows * width || !rest.is_empty() || parts.len() != widths.len() {
            return Err(StepError::Group(GroupError::OutOfStep {
                rank: rank as u32,
                expected: format!("{rows} rows of {width} columns"),
                found: format!("{} bytes from one of {} ranks", part.len(), parts.len()),
            }));
        }
        for (row, floats) in floats.chunks_exact((*width).max(1)).enumerate() {
            let place = &mut out.values[row * out.width + column..][..*width];
            for (place, float) in place.iter_mut().zip(floats) {
                *place = f32::from_le_bytes(*float);
            }
        }
        column += width;
    }
    Ok(out)
}
