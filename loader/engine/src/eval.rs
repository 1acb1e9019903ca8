//! How well a model predicts a text, and how far its predictions are from another's: perplexity,
//! Kullback-Leibler divergence and agreement, counted as llama.cpp's `perplexity` does.
//!
//! The text is split into windows of the context's length, each beginning with the model's first
//! token if it has one. Only the second half of each window counts, so that every counted token
//! has at least half a context before it; a rest at the end is ignored. A text
//! shorter than a window is one window of which every token counts.

mod stats;

use std::ops::Range;

use serde::Serialize;
use shardpack_engine_api::TokenId;

use crate::engine::{LocalModel, LogitsError};
pub use stats::{Estimate, Quantiles};
use stats::{LogSoftmax, Sums, quantiles};

/// Rows of logits that are held at a time: with large vocabularies they are most of the memory.
const ROWS: usize = 64;

/// How a text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// Tokens of a window.
    pub context: usize,
    /// Begins every window, if the model was trained so.
    pub first: Option<TokenId>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Windows read.
    pub windows: usize,
    /// Tokens that count.
    pub tokens: usize,
    /// Perplexity with its standard error.
    pub perplexity: Estimate,
    /// Against the other model.
    pub against: Option<Divergence>,
}

/// How a model's predictions differ from those of another, taken for the truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// The other's perplexity.
    pub perplexity: Estimate,
    /// Mean of `Σ p · ln(p / q)` over the vocabulary, `p` being the other's.
    pub kl_mean: Estimate,
    /// Its distribution over tokens.
    pub kl: Quantiles,
    /// How often both find the same token most likely.
    pub same_top: Estimate,
    /// Root of the mean square of the differences in the probability of the text's token.
    pub rms_probability_difference: f64,
}

/// Why a text cannot be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Nothing to predict.
    #[error("the text has {0} tokens: at least 2 are needed")]
    Short(usize),
    /// A window longer than the model's longest sequence, or too short to have a half.
    #[error("a context of {found} tokens: 4 to {most} can be evaluated")]
    Context {
        /// What was asked for.
        found: usize,
        /// The model's longest sequence.
        most: usize,
    },
    /// The models have different vocabularies.
    #[error("the sets have vocabularies of {found} and {other} tokens: they are different models")]
    Vocabulary {
        /// Of the set.
        found: u32,
        /// Of the other set.
        other: u32,
    },
    /// A model failed.
    #[error(transparent)]
    Logits(#[from] LogitsError),
}

/// Reads `tokens` with a model, and with another one for comparison. `note` hears after each
/// window how many of how many are done.
pub fn evaluate(
    model: &LocalModel,
    against: Option<&LocalModel>,
    tokens: &[TokenId],
    options: &EvalOptions,
    note: &mut dyn FnMut(usize, usize),
) -> Result<Evaluation, EvalError> {
    let all: Vec<TokenId> = options.first.into_iter().chain(tokens.iter().copied()).collect();
    let models = || [Some(model), against].into_iter().flatten();
    check(model, against, all.len(), options)?;
    let windows = windows(all.len(), options.context);
    let mut sums = Sums::default();
    for (index, (range, counted)) in windows.iter().enumerate() {
        let mut window = all[range.clone()].to_vec();
        if let Some(first) = options.first {
            window[0] = first;
        }
        let mut sequences: Vec<_> =
            models().map(|model| (model, model.sequence(window.len()))).collect();
        for (chunk, tokens) in window.chunks(ROWS).enumerate() {
            let base = chunk * ROWS;
            let first = counted.saturating_sub(base).min(tokens.len());
            let mut rows = Vec::with_capacity(sequences.len());
            for (model, sequence) in &mut sequences {
                rows.push(model.extend(sequence, tokens, first)?);
            }
            let vocab = model.spec().vocab_size as usize;
            for (row, position) in (base + first..base + tokens.len()).enumerate() {
                // The last token's prediction is beyond the window.
                let Some(next) = window.get(position + 1) else { continue };
                let at = |rows: &Vec<f32>| LogSoftmax::of(&rows[row * vocab..(row + 1) * vocab]);
                sums.add(&at(&rows[0]), rows.get(1).map(at).as_ref(), next.0 as usize);
            }
        }
        note(index + 1, windows.len());
    }
    Ok(result(windows.len(), sums))
}

fn check(
    model: &LocalModel,
    against: Option<&LocalModel>,
    tokens: usize,
    options: &EvalOptions,
) -> Result<(), EvalError> {
    let spec = model.spec();
    let mut most = spec.max_positions as usize;
    if let Some(other) = against.map(LocalModel::spec) {
        most = most.min(other.max_positions as usize);
        if other.vocab_size != spec.vocab_size {
            let (found, other) = (spec.vocab_size, other.vocab_size);
            return Err(EvalError::Vocabulary { found, other });
        }
    }
    if !(4..=most).contains(&options.context) {
        return Err(EvalError::Context { found: options.context, most });
    }
    if tokens < 2 { Err(EvalError::Short(tokens)) } else { Ok(()) }
}

/// Windows, and from which of its tokens on each window's predictions count.
fn windows(len: usize, context: usize) -> Vec<(Range<usize>, usize)> {
    if len <= context {
        return vec![(0..len, 0)];
    }
    (0..len / context).map(|index| (index * context..(index + 1) * context, context / 2)).collect()
}

fn result(windows: usize, sums: Sums) -> Evaluation {
    let against = sums.base.count().gt(&0).then(|| Divergence {
        perplexity: sums.base.perplexity(),
        kl_mean: sums.kl.mean(),
        kl: quantiles(sums.divergences),
        same_top: sums.same_top.mean(),
        rms_probability_difference: sums.probability.mean().value.sqrt(),
    });
    let perplexity = sums.own.perplexity();
    Evaluation { windows, tokens: sums.own.count(), perplexity, against }
}

#[cfg(test)]
mod tests;
