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
/// Meanwhile `ahead` is fetched.
pub(crate) fn dots(few: &[f32], (rows, ahead): (&[f32], &[f32]), width: usize, out: &mut [f32]) {
    let count = rows.len() / width;
    assert!(super::is_available() && out.len() == few.len() / width * count, "rows of one width");
    // SAFETY: the processor has been asked.
    unsafe {
        match width {
            64 => dots_of::<64, 4, 4>(few, rows, ahead, out),
            128 => dots_of::<128, 8, 2>(few, rows, ahead, out),
            256 => dots_of::<256, 16, 1>(few, rows, ahead, out),
            other => unreachable!("rows of {other} are not admitted"),
        }
    }
}

/// `Σ weight · row`, row after row, for each of several runs of weights: `weights` is
/// `[out, rows]`. Meanwhile `ahead` is fetched.
pub(crate) fn weighted_sums(
    weights: &[f32],
    (rows, ahead): (&[f32], &[f32]),
    width: usize,
    out: &mut [f32],
) {
    let count = rows.len() / width;
    assert!(super::is_available() && weights.len() == out.len() / width * count, "weights");
    // SAFETY: the processor has been asked.
    unsafe {
        match width {
            64 => weighted_of::<64, 4>(weights, rows, ahead, out),
            128 => weighted_of::<128, 8>(weights, rows, ahead, out),
            256 => weighted_of::<256, 16>(weights, rows, ahead, out),
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

/// Has some floats brought to the second cache.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch(ahead: &[f32]) {
    for line in ahead.chunks(LANES) {
        _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
    }
}

/// `FEW` rows of `VECTORS` vectors fill half of the registers, so that each vector of the others is
/// loaded once for all of them.
#[target_feature(enable = "avx512f,avx512dq")]
fn dots_of<const WIDTH: usize, const VECTORS: usize, const FEW: usize>(
    few: &[f32],
    rows: &[f32],
    ahead: &[f32],
    out: &mut [f32],
) {
    let rows = rows.as_chunks::<WIDTH>().0;
    let (fews, rest) = few.as_chunks::<WIDTH>().0.as_chunks::<FEW>();
    let (out, rest_out) = out.split_at_mut(fews.len() * FEW * rows.len());
    let mut products = [[_mm512_setzero_ps(); ROWS_AT_ONCE]; FEW];
    let mut ahead = ahead.chunks(ROWS_AT_ONCE * WIDTH);
    for (few, out) in fews.iter().zip(out.chunks_exact_mut(FEW * rows.len())) {
        for (index, some) in rows.chunks(ROWS_AT_ONCE).enumerate() {
            match ahead.next() {
                Some(ahead) => {
                    products_of::<WIDTH, VECTORS, FEW, true>(few, (some, ahead), &mut products);
                }
                None => products_of::<WIDTH, VECTORS, FEW, false>(few, (some, &[]), &mut products),
            }
            for (products, out) in products.iter().zip(out.chunks_exact_mut(rows.len())) {
                let sums = trees(products);
                out[index * ROWS_AT_ONCE..][..some.len()].copy_from_slice(&sums[..some.len()]);
            }
        }
    }
    for (row, out) in rest.iter().zip(rest_out.chunks_exact_mut(rows.len())) {
        let mut products = [[_mm512_setzero_ps(); ROWS_AT_ONCE]; 1];
        for (index, some) in rows.chunks(ROWS_AT_ONCE).enumerate() {
            products_of::<WIDTH, VECTORS, 1, false>(&[*row], (some, &[]), &mut products);
            let sums = trees(&products[0]);
            out[index * ROWS_AT_ONCE..][..some.len()].copy_from_slice(&sums[..some.len()]);
        }
    }
}

/// The lanes of the products of each of `few` with each of `rows`. Meanwhile `ahead` is fetched, a
/// row for each row: more at once would fill what the processor keeps of reads under way.
#[inline]
#[target_feature(enable = "avx512f")]
fn products_of<const WIDTH: usize, const VECTORS: usize, const FEW: usize, const FETCH: bool>(
    few: &[[f32; WIDTH]; FEW],
    (rows, ahead): (&[[f32; WIDTH]], &[f32]),
    products: &mut [[__m512; ROWS_AT_ONCE]; FEW],
) {
    let mut held = [[_mm512_setzero_ps(); VECTORS]; FEW];
    for (held, row) in held.iter_mut().zip(few) {
        for (held, row) in held.iter_mut().zip(row.as_chunks::<LANES>().0) {
            *held = load(row);
        }
    }
    let mut ahead = ahead.chunks(WIDTH);
    for (place, row) in rows.iter().enumerate() {
        if FETCH {
            fetch(ahead.next().unwrap_or_default());
        }
        let mut sums = [_mm512_setzero_ps(); FEW];
        for (vector, part) in row.as_chunks::<LANES>().0.iter().enumerate() {
            let part = load(part);
            for (sum, held) in sums.iter_mut().zip(&held) {
                *sum = _mm512_add_ps(*sum, _mm512_mul_ps(held[vector], part));
            }
        }
        for (products, sum) in products.iter_mut().zip(sums) {
            products[place] = sum;
        }
    }
}

#[target_feature(enable = "avx512f")]
fn weighted_of<const WIDTH: usize, const VECTORS: usize>(
    weights: &[f32],
    rows: &[f32],
    ahead: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    let rows = rows.as_chunks::<WIDTH>().0;
    let mut ahead = ahead.chunks(ROWS_AT_ONCE * WIDTH);
    for (index, some) in rows.chunks(ROWS_AT_ONCE).enumerate() {
        // All of it is fetched with the first weights.
        let mut ahead = ahead.next();
        let all = out.as_chunks_mut::<WIDTH>().0;
        for (weights, out) in weights.chunks_exact(rows.len()).zip(all) {
            let weights = &weights[index * ROWS_AT_ONCE..][..some.len()];
            let out = out.as_chunks_mut::<LANES>().0;
            let mut sums = [_mm512_setzero_ps(); VECTORS];
            for (sum, out) in sums.iter_mut().zip(&*out) {
                *sum = load(out);
            }
            match ahead.take() {
                Some(ahead) => add_rows::<WIDTH, VECTORS, true>(weights, (some, ahead), &mut sums),
                None => add_rows::<WIDTH, VECTORS, false>(weights, (some, &[]), &mut sums),
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                // SAFETY: the array is as long as the vector.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) }
            }
        }
    }
}

/// Adds `weight · row` for each row. Meanwhile `ahead` is fetched, a row for each row.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_rows<const WIDTH: usize, const VECTORS: usize, const FETCH: bool>(
    weights: &[f32],
    (rows, ahead): (&[[f32; WIDTH]], &[f32]),
    sums: &mut [__m512; VECTORS],
) {
    let mut ahead = ahead.chunks(WIDTH);
    let mut held = *sums;
    for (weight, row) in weights.iter().zip(rows) {
        if FETCH {
            fetch(ahead.next().unwrap_or_default());
        }
        let weight = _mm512_set1_ps(*weight);
        for (sum, row) in held.iter_mut().zip(row.as_chunks::<LANES>().0) {
            *sum = _mm512_add_ps(*sum, _mm512_mul_ps(weight, load(row)));
        }
    }
    *sums = held;
}
