//! How far quantized groups are from the weights they stand for.

use rayon::prelude::*;

use super::{AffineFormat, unpack, widen};
use crate::dtype::Dtype;

/// Sums over a tensor; the same bits for any number of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    /// Sum of squared weights.
    pub weights: f64,
    /// Sum of squared differences.
    pub errors: f64,
    /// Sum of products of weights and their stand-ins.
    pub products: f64,
    /// Sum of squared stand-ins.
    pub stored: f64,
    /// Integers at the end of their range that clamping put there are not told apart from those
    /// that fit exactly; this counts both ends.
    pub at_ends: u64,
}

impl ErrorSums {
    fn add(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            errors: self.errors + other.errors,
            products: self.products + other.products,
            stored: self.stored + other.stored,
            at_ends: self.at_ends + other.at_ends,
        }
    }

    /// Root of the squared error over the squared weights; 0 for an all-zero tensor.
    #[must_use]
    pub fn relative_rmse(&self) -> f64 {
        if self.weights == 0.0 { 0.0 } else { (self.errors / self.weights).sqrt() }
    }

    /// Cosine between weights and stand-ins; 1 for an all-zero tensor.
    #[must_use]
    pub fn cosine(&self) -> f64 {
        let norms = (self.weights * self.stored).sqrt();
        if norms == 0.0 { 1.0 } else { self.products / norms }
    }
}

const GROUPS_PER_TASK: usize = 1024;

/// Compares a quantized tensor with its source; arguments as for [`super::quantize`].
///
/// # Panics
/// When lengths do not fit each other.
#[must_use]
pub fn error(
    format: AffineFormat,
    (dtype, source): (Dtype, &[u8]),
    store_dtype: Dtype,
    (packed, scales, biases): (&[u8], &[u8], &[u8]),
) -> ErrorSums {
    let group = format.group_size() as usize;
    let group_source = group * dtype.size_bytes();
    let width = store_dtype.size_bytes();
    let task = |source: &[u8], packed: &[u8], scales: &[u8], biases: &[u8]| {
        let (mut values, mut q) = ([0.0; 128], [0; 128]);
        let (values, q) = (&mut values[..group], &mut q[..group]);
        let parts = source
            .chunks_exact(group_source)
            .zip(packed.chunks_exact(format.group_bytes()))
            .zip(scales.chunks_exact(width).zip(biases.chunks_exact(width)));
        parts.fold(ErrorSums::default(), |sums, ((source, packed), (scale, bias))| {
            let mut affine = [0.0; 2];
            widen(store_dtype, scale, &mut affine[..1]);
            widen(store_dtype, bias, &mut affine[1..]);
            widen(dtype, source, values);
            unpack(format, packed, q);
            sums.add(group_error(format, values, q, affine))
        })
    };
    let tasks: Vec<ErrorSums> = source
        .par_chunks(GROUPS_PER_TASK * group_source)
        .zip(packed.par_chunks(GROUPS_PER_TASK * format.group_bytes()))
        .zip(
            scales
                .par_chunks(GROUPS_PER_TASK * width)
                .zip(biases.par_chunks(GROUPS_PER_TASK * width)),
        )
        .map(|((source, packed), (scales, biases))| task(source, packed, scales, biases))
        .collect();
    tasks.into_iter().fold(ErrorSums::default(), ErrorSums::add)
}

fn group_error(
    format: AffineFormat,
    values: &[f32],
    q: &[u8],
    [scale, bias]: [f32; 2],
) -> ErrorSums {
    let mut sums = ErrorSums::default();
    for (value, q) in values.iter().zip(q) {
        let (weight, stored) =
            (f64::from(*value), f64::from(scale) * f64::from(*q) + f64::from(bias));
        sums.weights += weight * weight;
        sums.errors += (weight - stored) * (weight - stored);
        sums.products += weight * stored;
        sums.stored += stored * stored;
        sums.at_ends += u64::from(*q == 0 || u32::from(*q) == format.max_q());
    }
    sums
}
