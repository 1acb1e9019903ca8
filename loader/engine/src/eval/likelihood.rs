//! How likely a model finds the end of a sequence.

use shardpack_engine_api::TokenId;

use super::{EvalError, ROWS, stats::LogSoftmax};
use crate::engine::LocalModel;

/// What a model makes of a continuation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likelihood {
    /// The logarithm of its probability.
    pub log: f64,
    /// Whether each of its tokens is the most likely one.
    pub is_greedy: bool,
}

/// The likelihood of `tokens[from..]` after the others.
///
/// # Panics
/// If nothing stands before the continuation, or it is empty.
pub fn likelihood(
    model: &LocalModel,
    tokens: &[TokenId],
    from: usize,
) -> Result<Likelihood, EvalError> {
    assert!((1..tokens.len()).contains(&from), "a continuation from {from} of {}", tokens.len());
    let read = &tokens[..tokens.len() - 1];
    let vocab = model.spec().vocab_size as usize;
    let mut sequence = model.sequence(read.len());
    let mut found = Likelihood { log: 0.0, is_greedy: true };
    for (chunk, part) in read.chunks(ROWS).enumerate() {
        let base = chunk * ROWS;
        let first = (from - 1).saturating_sub(base).min(part.len());
        let rows = model.extend(&mut sequence, part, first)?;
        for (row, position) in rows.chunks_exact(vocab).zip(base + first..) {
            let (row, next) = (LogSoftmax::of(row), tokens[position + 1].0 as usize);
            found.log += row.log(next);
            found.is_greedy &= row.top() == next;
        }
    }
    Ok(found)
}
