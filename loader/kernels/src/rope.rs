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
        let rows = positions.iter().map(|position| (*position, inv_freq));
        Self::by_rows(inv_freq.len(), factor, &rows.collect::<Vec<_>>())
    }

    /// Rows at positions with frequencies of their own, `pairs` each.
    #[must_use]
    pub fn by_rows(pairs: usize, factor: f32, rows: &[(u32, &[f32])]) -> Self {
        assert!(rows.iter().all(|(_, frequencies)| frequencies.len() == pairs), "{pairs} pairs");
        let angles =
            || rows.iter().flat_map(|(p, frequencies)| frequencies.iter().map(|f| *p as f32 * f));
        Self {
            pairs,
            cos: angles().map(|angle| libm::cosf(angle) * factor).collect(),
            sin: angles().map(|angle| libm::sinf(angle) * factor).collect(),
        }
    }

    /// Rotates `2 · pairs` elements of each head in place, from its element `first` on: element `i`
    /// of them with element `i + pairs` (`rotate_half`). `x` is `[rows, heads, head_dim]`.
    pub fn rotate_half(&self, x: &mut [f32], (head_dim, first): (usize, usize)) {
        self.each_head(x, (head_dim, first), |head, cos, sin| {
            let (low, high) = head.split_at_mut(cos.len());
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                let (a, b) = (*low, *high);
                *low = a * cos - b * sin;
                *high = b * cos + a * sin;
            }
        });
    }

    /// Rotates `2 · pairs` elements of each head in place, from its element `first` on: element `2i`
    /// of them with element `2i + 1`. `x` is `[rows, heads, head_dim]`.
    pub fn rotate_interleaved(&self, x: &mut [f32], (head_dim, first): (usize, usize)) {
        self.each_head(x, (head_dim, first), |head, cos, sin| {
            for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, b * cos + a * sin];
            }
        });
    }

    /// Calls `rotate` with the rotated part, the cosines and the sines of every head.
    fn each_head(
        &self,
        x: &mut [f32],
        (head_dim, first): (usize, usize),
        rotate: impl Fn(&mut [f32], &[f32], &[f32]),
    ) {
        let rows = self.cos.len().checked_div(self.pairs).unwrap_or(0);
        if rows == 0 || x.is_empty() {
            return;
        }
        let turned = first..first + 2 * self.pairs;
        assert!(turned.end <= head_dim, "elements {turned:?} of a head of {head_dim}");
        assert!(x.len().is_multiple_of(rows * head_dim), "{rows} rows of heads of {head_dim}");
        let angles = self.cos.chunks_exact(self.pairs).zip(self.sin.chunks_exact(self.pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(x.len() / rows).zip(angles) {
            for head in row.chunks_exact_mut(head_dim) {
                rotate(&mut head[turned.clone()], cos, sin);
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
        rotation.rotate_half(&mut x, (6, 0));
        let expected = [-6.0, 4.0, 2.0, 8.0, 5.0, 6.0];
        for (x, expected) in x.iter().zip(expected) {
            assert!((x - expected).abs() < 1e-5, "{x} instead of {expected}");
        }
    }

    #[test]
    fn interleaved_pairs_are_neighbours() {
        let rotation = Rotation::new(&[std::f32::consts::FRAC_PI_2, 0.0], 1.0, &[1]);
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotation.rotate_interleaved(&mut x, (5, 0));
        for (x, expected) in x.iter().zip([-2.0, 1.0, 3.0, 4.0, 5.0]) {
            assert!((x - expected).abs() < 1e-5, "{x} instead of {expected}");
        }
    }

    #[test]
    fn a_last_part_turns_as_a_head_of_its_own_does() {
        let rotation = Rotation::new(&[0.3, 0.01], 1.0, &[5, 9]);
        let x: Vec<f32> = (0..24).map(|x| x as f32).collect();
        for rotate in [Rotation::rotate_half, Rotation::rotate_interleaved] {
            // Two rows of two heads of six, of which the last four elements turn.
            let mut last = x.clone();
            rotate(&rotation, &mut last, (6, 2));
            let part = |x: &[f32]| x.chunks_exact(6).flat_map(|head| head[2..].to_vec()).collect();
            let mut alone: Vec<f32> = part(&x);
            rotate(&rotation, &mut alone, (4, 0));
            assert_eq!(alone, part(&last));
            assert!(x.chunks_exact(6).zip(last.chunks_exact(6)).all(|(x, y)| x[..2] == y[..2]));
        }
    }

    #[test]
    fn rows_may_have_frequencies_of_their_own() {
        let (short, long) = ([0.3_f32], [0.01_f32]);
        let mixed = Rotation::by_rows(1, 1.5, &[(4, &short), (7, &long)]);
        assert_eq!(mixed.cos[0], Rotation::new(&short, 1.5, &[4]).cos[0]);
        assert_eq!(mixed.sin[1], Rotation::new(&long, 1.5, &[7]).sin[0]);
    }

    #[test]
    fn position_zero_changes_nothing() {
        let mut x = [1.0, -2.0, 3.0, 4.0];
        Rotation::new(&[0.3], 1.0, &[0]).rotate_half(&mut x, (2, 0));
        assert_eq!(x, [1.0, -2.0, 3.0, 4.0]);
    }
}
