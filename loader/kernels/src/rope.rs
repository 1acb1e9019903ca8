//! Rotary position embeddings.

/// Cosines and sines of every row's angles; computed once per step and used by all layers.
#[derive(Clone, Debug)]
pub struct Rotation {
    pairs: usize,
    /// `[rows, pairs]`.
    cos: Vec<f32>,
    /// `[rows, pairs]`.
    sin: Vec<f32>,
}

impl Rotation {
    /// Angle of pair `i` at position `p` is `p · inv_freq[i]` in f32; `factor` multiplies cosine
    /// and sine.
    #[must_use]
    pub fn new(inv_freq: &[f32], factor: f32, positions: &[u32]) -> Self {
        let angles = || positions.iter().flat_map(|p| inv_freq.iter().map(|freq| *p as f32 * freq));
        Self {
            pairs: inv_freq.len(),
            cos: angles().map(|angle| libm::cosf(angle) * factor).collect(),
            sin: angles().map(|angle| libm::sinf(angle) * factor).collect(),
        }
    }

    /// Rotates the first `2 · pairs` elements of each head in place, element `i` with element
    /// `i + pairs` (`rotate_half`). `x` is `[rows, heads, head_dim]`.
    pub fn rotate_half(&self, x: &mut [f32], head_dim: usize) {
        let rows = self.cos.len().checked_div(self.pairs).unwrap_or(0);
        if rows == 0 || x.is_empty() {
            return;
        }
        assert!(2 * self.pairs <= head_dim, "{} pairs in a head of {head_dim}", self.pairs);
        assert!(x.len().is_multiple_of(rows * head_dim), "{rows} rows of heads of {head_dim}");
        let angles = self.cos.chunks_exact(self.pairs).zip(self.sin.chunks_exact(self.pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(x.len() / rows).zip(angles) {
            for head in row.chunks_exact_mut(head_dim) {
                let (low, high) = head[..2 * self.pairs].split_at_mut(self.pairs);
                for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (a, b) = (*low, *high);
                    *low = a * cos - b * sin;
                    *high = b * cos + a * sin;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_moves_the_first_half_into_the_second() {
        let rotation = Rotation::new(&[std::f32::consts::FRAC_PI_2, 0.0], 2.0, &[1]);
        // One head of six: two pairs are rotated, the last two elements stay.
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotation.rotate_half(&mut x, 6);
        let expected = [-6.0, 4.0, 2.0, 8.0, 5.0, 6.0];
        for (x, expected) in x.iter().zip(expected) {
            assert!((x - expected).abs() < 1e-5, "{x} instead of {expected}");
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let mut x = [1.0, -2.0, 3.0, 4.0];
        Rotation::new(&[0.3], 1.0, &[0]).rotate_half(&mut x, 2);
        assert_eq!(x, [1.0, -2.0, 3.0, 4.0]);
    }
}
