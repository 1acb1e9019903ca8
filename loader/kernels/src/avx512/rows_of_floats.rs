//! Rows of floats in attention: products of one row with many, and weighted sums of many. The
//! compiler's code for the same loops adds each row's lanes by themselves and keeps sums in
//! memory.

use std::arch::x86_64::*;

use super::trees;
use crate::lanes::LANES;

/// Widths of rows whose sums stay in registers.
pub(crate) const fn admits(width: usize) -> bool {
    matches!(width, 64 | 128 | 256)
}

/// As [`crate::lanes::dot`] of each row of `few` with each of `rows`: `out` is `[few, rows]`.
pub(crate) fn dots(few: &[f32], rows: &[f32], width: usize, out: &mut [f32]) {
    let count = rows.len() / width;
    assert!(super::is_available() && out.len() == few.len() / width * count, "rows of one width");
    // SAFETY: the processor has been asked.
    unsafe {
        match width {
            64 => dots_of::<64>(few, rows, out),
            128 => dots_of::<128>(few, rows, out),
            256 => dots_of::<256>(few, rows, out),
            other => unreachable!("rows of {other} are not admitted"),
        }
    }
}

/// `Σ weight · row`, row after row, for each of several runs of weights: `weights` is
/// `[out, rows]`.
pub(crate) fn weighted_sums(weights: &[f32], rows: &[f32], width: usize, out: &mut [f32]) {
    let count = rows.len() / width;
    assert!(super::is_available() && weights.len() == out.len() / width * count, "weights");
    // SAFETY: the processor has been asked.
    unsafe {
        match width {
            64 => weighted_of::<64, 4>(weights, rows, out),
            128 => weighted_of::<128, 8>(weights, rows, out),
            256 => weighted_of::<256, 16>(weights, rows, out),
            other => unreachable!("rows of {other} are not admitted"),
        }
    }
}

/// Rows that all meet before the next ones are read.
const ROWS_AT_ONCE: usize = 16;

#[inline]
#[target_feature(enable = "avx512f")]
fn load(from: &[f32; LANES]) -> __m512 {
    // SAFETY: the array is as long as the vector.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512dq")]
fn dots_of<const WIDTH: usize>(few: &[f32], rows: &[f32], out: &mut [f32]) {
    let rows = rows.as_chunks::<WIDTH>().0;
    for (index, some) in rows.chunks(ROWS_AT_ONCE).enumerate() {
        for (row, out) in few.as_chunks::<WIDTH>().0.iter().zip(out.chunks_exact_mut(rows.len())) {
            let mut products = [_mm512_setzero_ps(); ROWS_AT_ONCE];
            for (product, other) in products.iter_mut().zip(some) {
                let mut sum = _mm512_setzero_ps();
                for (a, b) in row.as_chunks::<LANES>().0.iter().zip(other.as_chunks::<LANES>().0) {
                    sum = _mm512_add_ps(sum, _mm512_mul_ps(load(a), load(b)));
                }
                *product = sum;
            }
            let sums = trees(&products);
            out[index * ROWS_AT_ONCE..][..some.len()].copy_from_slice(&sums[..some.len()]);
        }
    }
}

#[target_feature(enable = "avx512f")]
fn weighted_of<const WIDTH: usize, const VECTORS: usize>(
    weights: &[f32],
    rows: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    let rows = rows.as_chunks::<WIDTH>().0;
    for (index, some) in rows.chunks(ROWS_AT_ONCE).enumerate() {
        let all = out.as_chunks_mut::<WIDTH>().0;
        for (weights, out) in weights.chunks_exact(rows.len()).zip(all) {
            let weights = &weights[index * ROWS_AT_ONCE..][..some.len()];
            let out = out.as_chunks_mut::<LANES>().0;
            let mut sums = [_mm512_setzero_ps(); VECTORS];
            for (sum, out) in sums.iter_mut().zip(&*out) {
                *sum = load(out);
            }
            for (weight, row) in weights.iter().zip(some) {
                let weight = _mm512_set1_ps(*weight);
                for (sum, row) in sums.iter_mut().zip(row.as_chunks::<LANES>().0) {
                    *sum = _mm512_add_ps(*sum, _mm512_mul_ps(weight, load(row)));
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                // SAFETY: the array is as long as the vector.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) }
            }
        }
    }
}
