//! The best tokens of rows of logits, found where the logits are.

use super::Tensors;

/// The best tokens of rows of logits.
pub trait TokenChoice: Tensors {
    /// Whether tokens are chosen here, with noise or without.
    fn chooses(&self, _noise: bool) -> bool {
        false
    }

    /// For each of `rows` its two columns with the highest scores as six numbers, see [`Best`]; none
    /// where the logits are read anyway. The first column stands for token `first`.
    fn best_tokens(
        &self,
        _logits: &Self::Tensor,
        _rows: &[ScoredRow],
        _first: u32,
    ) -> Option<Self::Tensor> {
        None
    }
}

/// A row whose best tokens are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredRow {
    /// Which one.
    pub row: usize,
    /// Gumbel noise on the logits over the temperature; without it the logits are the scores.
    pub noise: Option<ScoreNoise>,
}

/// Noise on a row's scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreNoise {
    /// The noise of a token is a function of this key and the token.
    pub key: u64,
    /// Divides the logits.
    pub temperature: f32,
}

/// One of the best columns of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// The column.
    pub column: u32,
    /// Its logit.
    pub logit: f32,
    /// Its score, in f32 arithmetic.
    pub score: f32,
}

impl Best {
    /// From the numbers that are read.
    #[must_use]
    pub const fn of(numbers: [f32; 3]) -> Self {
        // Columns are below 2^24.
        Self { column: numbers[0] as u32, logit: numbers[1], score: numbers[2] }
    }
}
