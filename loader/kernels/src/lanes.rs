//! The one order of summation: element `i` goes to lane `i mod 16`, and the lanes are added as a
//! fixed tree. Sixteen lanes fill the widest vector registers, and narrower ones several times. Products with
//! matrices are fused with their sums ([`accumulate_fused`]), which most processors do twice as fast.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

/// Number of partial sums.
pub const LANES: usize = 16;

/// Partial sums of one output element.
pub type Lanes = [f32; LANES];

/// Adds the products of `a` and `b`, which stand at a multiple of [`LANES`] in their rows.
#[inline(always)]
pub fn accumulate(lanes: &mut Lanes, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "factors of a product");
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    // A local copy stays in registers; through the reference every block would be stored.
    let mut sums = *lanes;
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    *lanes = sums;
}

/// The same with fused operations; what is left of a row at its end is filled up with zeros, as where rows are
/// held in whole vectors: a lane may be -0, which a zero changes.
#[inline(always)]
pub fn accumulate_fused(lanes: &mut Lanes, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "factors of a product");
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = *lanes;
    let add = |sums: &mut Lanes, a: &Lanes, b: &Lanes| {
        for lane in 0..LANES {
            sums[lane] = a[lane].mul_add(b[lane], sums[lane]);
        }
    };
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        add(&mut sums, a, b);
    }
    if !a_rest.is_empty() {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        a[..a_rest.len()].copy_from_slice(a_rest);
        b[..b_rest.len()].copy_from_slice(b_rest);
        add(&mut sums, &a, &b);
    }
    *lanes = sums;
}

/// The sum of the lanes: halves are added to halves.
#[inline(always)]
#[must_use]
pub fn tree(mut lanes: Lanes) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ a·b`, product and sum apart.
#[inline(always)]
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    accumulate(&mut lanes, a, b);
    tree(lanes)
}

/// `Σ a`.
#[inline(always)]
#[must_use]
pub fn sum(a: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += block[lane];
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value;
    }
    tree(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_in_pieces_has_the_bits_of_the_whole_row() {
        let a: Vec<f32> = (0..200).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..200).map(|i| (i as f32 * 1.91).cos()).collect();
        for piece in [16, 32, 64, 128] {
            let mut lanes = [0.0; LANES];
            for (a, b) in a.chunks(piece).zip(b.chunks(piece)) {
                accumulate(&mut lanes, a, b);
            }
            assert_eq!(tree(lanes).to_bits(), dot(&a, &b).to_bits(), "pieces of {piece}");
        }
    }

    #[test]
    fn short_and_ragged_rows_are_summed_whole() {
        for len in [0_usize, 1, 15, 16, 17, 31, 33] {
            let ones = vec![1.0; len];
            assert_eq!(dot(&ones, &ones), len as f32);
            assert_eq!(sum(&ones), len as f32);
        }
    }
}
