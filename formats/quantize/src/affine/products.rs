//! What the errors of some inputs ask of a group's: the sums that error feedback spends its time with.

#![expect(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables its instructions"
)]

use std::hint::black_box;

use crate::simd::Lanes;

/// Vectors of rows that are computed together: each factor that is read takes part in so many products.
pub(super) const VECTORS: usize = 2;

/// Columns of a group whose sums stay in registers, for each vector of rows.
const TILE: usize = 4;

/// Inputs whose errors stay in the L1 cache, and their factors in the L2 cache, while all columns pass.
const INPUTS_AT_ONCE: usize = 256;

/// Numbers of a cache line.
const LINE: usize = 16;

/// Factors that are still in the L2 cache when the next rows need them.
const NEAR: usize = 1 << 18;

/// `Σ error_j · factors[j]` for each column of a group; `factors` is `[inputs, G]`. Sums run over inputs in
/// order, product and sum apart.
#[inline(always)]
pub(super) fn sum_errors<V: Lanes, const G: usize>(
    proof: V::Proof,
    factors: &[f32],
    errors: [&[V]; VECTORS],
    out: &mut [[V; G]; VECTORS],
) {
    let [a, b] = errors;
    let [out_a, out_b] = out;
    out_a.fill(V::splat(proof, 0.0));
    out_b.fill(V::splat(proof, 0.0));
    let parts = a.chunks(INPUTS_AT_ONCE).zip(b.chunks(INPUTS_AT_ONCE));
    let is_far = factors.len() > NEAR;
    for ((a, b), part) in parts.zip(factors.chunks(INPUTS_AT_ONCE * G)) {
        if is_far {
            // From beginning to end first: processors read ahead so, and not where a few columns of each row are
            // read.
            let lines = part.iter().step_by(LINE);
            black_box(lines.fold(0, |all, factor| all ^ factor.to_bits()));
        }
        let outs = out_a.as_chunks_mut::<TILE>().0.iter_mut().zip(out_b.as_chunks_mut::<TILE>().0);
        for (tile, (out_a, out_b)) in outs.enumerate() {
            let (mut sums_a, mut sums_b) = (*out_a, *out_b);
            let rows = part.as_chunks::<G>().0;
            for ((row, a), b) in rows.iter().zip(a).zip(b) {
                let row = &row[tile * TILE..(tile + 1) * TILE];
                for k in 0..TILE {
                    let factor = V::splat(proof, row[k]);
                    sums_a[k] = sums_a[k].add(a.mul(factor));
                    sums_b[k] = sums_b[k].add(b.mul(factor));
                }
            }
            (*out_a, *out_b) = (sums_a, sums_b);
        }
    }
}
