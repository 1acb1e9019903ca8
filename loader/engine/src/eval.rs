//! How well a model predicts a text, and how far its predictions are from another's: perplexity,
//! Kullback-Leibler divergence and agreement, counted as llama.cpp's `perplexity` does.
//!
//! The text is split into windows of the context's length, each beginning with the model's first
//! token if it has one. Only the second half of each window counts, so that every counted token
//! has at least half a context before it; a rest at the end is ignored. A text
//! shorter than a window is one window of which every token counts.

mod likelihood;
mod stats;
mod stored;

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use serde::Serialize;
use shardpack_engine_api::TokenId;

use crate::engine::{LocalModel, LogitsError};
pub use likelihood::{Likelihood, likelihood};
pub use stats::{Estimate, Quantiles};
use stats::{LogSoftmax, Sums, Truth, quantiles};
pub use stored::{LogitsDocument, LogitsReader, LogitsWriter, MAX_TOP, StoredError, StoredText};

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

/// What a model is compared with.
pub enum Reference<'a> {
    /// Nothing.
    None,
    /// Another model, which reads the same texts.
    Model(&'a LocalModel),
    /// What another model's reading of the same texts left in a file.
    Stored(&'a mut LogitsReader),
}

/// What was found in several texts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluations {
    /// In all of them: every token counts the same.
    pub all: Evaluation,
    /// In each.
    pub texts: Vec<Evaluation>,
    /// Tokens that the model has read in a second.
    pub tokens_per_second: f64,
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
    /// With a file of logits: the mean probability of all tokens that are in it only as a sum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rest: Option<f64>,
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
    /// A file of logits cannot be used.
    #[error(transparent)]
    Stored(#[from] StoredError),
}

/// Reads texts with a model, each by itself, and compares its predictions with the reference's.
/// `note` hears after each window how many of how many are done.
pub fn evaluate(
    model: &LocalModel,
    mut reference: Reference<'_>,
    texts: &[Vec<TokenId>],
    options: &EvalOptions,
    note: &mut dyn FnMut(usize, usize),
) -> Result<Evaluations, EvalError> {
    if let Reference::Stored(reader) = &mut reference {
        reader.check(model.spec().vocab_size, texts, options)?;
        reader.rewind()?;
    }
    let mut reading = Reading::new(model, texts, options, note);
    if let Reference::Model(other) = reference {
        reading.against = Some(other);
    }
    reading.all(texts, &mut |sums, own, other, next| {
        match (&mut reference, other) {
            (Reference::Stored(reader), _) => sums.add(own, Some(Truth::Top(reader.row()?)), next),
            (_, other) => sums.add(own, other.map(Truth::Whole), next),
        }
        Ok(())
    })
}

/// Reads texts with a model and keeps its predictions for later comparisons.
pub fn record(
    model: &LocalModel,
    texts: &[Vec<TokenId>],
    options: &EvalOptions,
    writer: &mut LogitsWriter<'_>,
    note: &mut dyn FnMut(usize, usize),
) -> Result<Evaluations, EvalError> {
    Reading::new(model, texts, options, note).all(texts, &mut |sums, own, _, next| {
        sums.add(own, None, next);
        Ok(writer.row(&own.row(writer.top(), next))?)
    })
}

/// Hears of a token's predictions, the model's and the other's, and which token came.
type Hear<'a> =
    &'a mut dyn FnMut(&mut Sums, &LogSoftmax, Option<&LogSoftmax>, usize) -> Result<(), EvalError>;

/// A model that reads texts, and how far it is.
struct Reading<'a> {
    model: &'a LocalModel,
    against: Option<&'a LocalModel>,
    options: &'a EvalOptions,
    note: &'a mut dyn FnMut(usize, usize),
    windows: usize,
    done: usize,
    /// Tokens that the model has read, and how long that took it.
    tokens: usize,
    taken: Duration,
}

impl<'a> Reading<'a> {
    fn new(
        model: &'a LocalModel,
        texts: &[Vec<TokenId>],
        options: &'a EvalOptions,
        note: &'a mut dyn FnMut(usize, usize),
    ) -> Self {
        let windows = texts.iter().map(|text| options.windows(text).len()).sum();
        let (done, tokens, taken) = (0, 0, Duration::ZERO);
        Self { model, against: None, options, note, windows, done, tokens, taken }
    }

    fn all(mut self, texts: &[Vec<TokenId>], hear: Hear<'_>) -> Result<Evaluations, EvalError> {
        let (mut sums, mut results) = (Sums::default(), Vec::new());
        for text in texts {
            check(self.model, self.against, self.options.len(text), self.options)?;
            let before = self.done;
            let found = self.text(text, hear)?;
            sums.extend(&found);
            results.push(result(self.done - before, found));
        }
        let tokens_per_second = self.tokens as f64 / self.taken.as_secs_f64().max(1e-9);
        Ok(Evaluations { all: result(self.windows, sums), texts: results, tokens_per_second })
    }

    fn text(&mut self, text: &[TokenId], hear: Hear<'_>) -> Result<Sums, EvalError> {
        let all: Vec<TokenId> =
            self.options.first.into_iter().chain(text.iter().copied()).collect();
        let mut sums = Sums::default();
        for (range, counted) in self.options.windows(text) {
            let mut window = all[range].to_vec();
            if let Some(first) = self.options.first {
                window[0] = first;
            }
            self.window(&window, counted, &mut sums, hear)?;
            self.done += 1;
            (self.note)(self.done, self.windows);
        }
        Ok(sums)
    }

    fn window(
        &mut self,
        window: &[TokenId],
        counted: usize,
        sums: &mut Sums,
        hear: Hear<'_>,
    ) -> Result<(), EvalError> {
        let mut own = self.model.sequence(window.len());
        let mut other = self.against.map(|model| (model, model.sequence(window.len())));
        let vocab = self.model.spec().vocab_size as usize;
        for (chunk, tokens) in window.chunks(ROWS).enumerate() {
            let base = chunk * ROWS;
            let first = counted.saturating_sub(base).min(tokens.len());
            let begun = Instant::now();
            let rows = self.model.extend(&mut own, tokens, first)?;
            self.taken += begun.elapsed();
            self.tokens += tokens.len();
            let others = other.as_mut().map(|(model, sequence)| {
                let rows = model.extend(sequence, tokens, first);
                rows.map_err(EvalError::from)
            });
            let others = others.transpose()?;
            for (row, position) in (base + first..base + tokens.len()).enumerate() {
                // The last token's prediction is beyond the window.
                let Some(next) = window.get(position + 1) else { continue };
                let at = |rows: &Vec<f32>| LogSoftmax::of(&rows[row * vocab..(row + 1) * vocab]);
                let other = others.as_ref().map(at);
                hear(sums, &at(&rows), other.as_ref(), next.0 as usize)?;
            }
        }
        Ok(())
    }
}

impl EvalOptions {
    /// Tokens of a text, the first one of the model included.
    fn len(&self, text: &[TokenId]) -> usize {
        text.len() + usize::from(self.first.is_some())
    }

    fn windows(&self, text: &[TokenId]) -> Vec<(Range<usize>, usize)> {
        windows(self.len(text), self.context)
    }

    /// Predictions that count in a text.
    fn counted(&self, text: &[TokenId]) -> u64 {
        let windows = self.windows(text);
        windows
            .iter()
            .map(|(range, counted)| (range.len() - counted).saturating_sub(1) as u64)
            .sum()
    }
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
        rest: sums.rest.count().gt(&0).then(|| sums.rest.mean().value),
    });
    let perplexity = sums.own.perplexity();
    Evaluation { windows, tokens: sums.own.count(), perplexity, against }
}

#[cfg(test)]
mod tests;
