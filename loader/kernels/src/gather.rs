//! Rows of an embedding matrix.

use std::ops::Range;

use crate::matrix::Matrix;

/// Writes the rows of `tokens` to `out` `[tokens, in]`. The matrix holds the rows of the tokens
/// `held`; other tokens give zeros, as another rank has them.
pub fn gather(tokens: &[u32], matrix: &Matrix<'_>, held: Range<usize>, out: &mut [f32]) {
    let width = matrix.cols();
    assert_eq!(held.len(), matrix.rows(), "tokens held");
    assert_eq!(out.len(), tokens.len() * width, "embeddings of {} tokens", tokens.len());
    for (token, out) in tokens.iter().zip(out.chunks_exact_mut(width.max(1))) {
        let token = *token as usize;
        if held.contains(&token) {
            matrix.dequantize_row(token - held.start, out);
        } else {
            out.fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::Floats;

    #[test]
    fn tokens_of_other_ranks_give_zeros() {
        let weights: Vec<f32> = (0..6).map(|i| i as f32 + 1.0).collect();
        let matrix = Matrix::plain(3, 2, Floats::F32(&weights));
        let mut out = [9.0; 8];
        gather(&[4, 6, 3, 7], &matrix, 4..7, &mut out);
        assert_eq!(out, [1.0, 2.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
