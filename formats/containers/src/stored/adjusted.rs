//! Values that another tool has changed before it stored them, changed back: an offset, or factors
//! of some rows each.

use std::{ops::Range, sync::Arc};

use super::{Damage, Grid, Integers, Layout, Logical, Window, elements::number};
use shardpack_quantize::dtype::Dtype;

/// What was done to a tensor's values.
#[derive(Clone, Debug, PartialEq)]
pub enum Adjustment {
    /// This was added to each.
    Added(f32),
    /// Each of so many rows, one run after the other, was multiplied by a factor.
    Multiplied(Vec<(u64, f32)>),
}

/// Floats as they stand in the file.
#[derive(Clone, Debug)]
struct Plain {
    dtype: Dtype,
    width: u64,
}

impl Layout for Plain {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows, self.width * self.dtype.size_bytes() as u64)]
    }

    fn decode(&self, _: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        for (index, out) in out.iter_mut().enumerate() {
            *out = number(self.dtype, parts[0], index);
        }
        Ok(())
    }
}

/// A layout whose values are changed back after they were decoded.
#[derive(Clone, Debug)]
struct Adjusted {
    inner: Arc<dyn Layout>,
    width: u64,
    adjustment: Adjustment,
}

impl Adjusted {
    /// What the values of a row were multiplied by.
    fn factor(&self, row: u64) -> f32 {
        let Adjustment::Multiplied(runs) = &self.adjustment else { return 1.0 };
        let mut end = 0;
        let run = runs.iter().find(|(rows, _)| {
            end += rows;
            row < end
        });
        run.map_or(1.0, |(_, factor)| *factor)
    }
}

impl Layout for Adjusted {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        self.inner.windows(rows)
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        self.inner.decode(rows.clone(), parts, out)?;
        if let Adjustment::Added(offset) = self.adjustment {
            for value in out {
                *value -= offset;
            }
            return Ok(());
        }
        for (row, values) in rows.zip(out.chunks_exact_mut(self.width.max(1) as usize)) {
            let factor = self.factor(row);
            for value in values {
                *value /= factor;
            }
        }
        Ok(())
    }

    /// A factor goes into scale and bias of each group; an offset has no such place.
    fn grid(&self) -> Option<Grid> {
        match self.adjustment {
            Adjustment::Added(_) => None,
            Adjustment::Multiplied(_) => self.inner.grid(),
        }
    }

    fn integers(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Integers,
    ) -> Result<bool, Damage> {
        let before = out.scales.len();
        if !self.inner.integers(rows.clone(), parts, out)? {
            return Ok(false);
        }
        let groups = (out.scales.len() - before) / ((rows.end - rows.start).max(1) as usize);
        for (row, at) in rows.zip((before..).step_by(groups.max(1))) {
            let factor = self.factor(row);
            let (scales, biases) =
                (&mut out.scales[at..at + groups], &mut out.biases[at..at + groups]);
            scales.iter_mut().chain(biases).for_each(|value| *value /= factor);
        }
        Ok(true)
    }
}

impl Logical {
    /// Changes the tensor's values back, whatever they are stored as.
    pub fn undo(&mut self, adjustment: Adjustment) {
        let inner = self.layout.take().unwrap_or_else(|| {
            Arc::new(Plain { dtype: self.dtype, width: self.shape.last().copied().unwrap_or(1) })
        });
        let width = self.shape.last().copied().unwrap_or(1);
        self.layout = Some(Arc::new(Adjusted { inner, width, adjustment }));
        self.dtype = Dtype::F32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_or_multiplied_is_taken_back_row_by_row() {
        let bytes: Vec<u8> =
            [2.0_f32, 4.0, 6.0, 8.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let check = |adjustment: Adjustment, rows: Range<u64>, expected: &[f32]| {
            let mut tensor = Logical::plain("t".to_owned(), Dtype::F32, vec![2, 2]);
            tensor.undo(adjustment);
            let (first, last) = (rows.start as usize * 8, rows.end as usize * 8);
            let mut out = Vec::new();
            tensor.decode(rows, &[&bytes[first..last]], &mut out).unwrap();
            assert_eq!(out, expected);
        };
        check(Adjustment::Added(1.0), 0..2, &[1.0, 3.0, 5.0, 7.0]);
        let factors = Adjustment::Multiplied(vec![(1, 2.0), (1, 4.0)]);
        check(factors.clone(), 0..2, &[1.0, 2.0, 1.5, 2.0]);
        check(factors, 1..2, &[1.5, 2.0]);
    }
}
