//! Sums over tokens and what they estimate.

use serde::Serialize;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Its standard error.
    pub error: f64,
}

/// A distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Half are below.
    pub median: f64,
    /// 99 % are below.
    pub p99: f64,
    /// 99.9 % are below.
    pub p999: f64,
    /// The largest.
    pub maximum: f64,
}

/// Values of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Series {
    count: usize,
    sum: f64,
    squares: f64,
}

impl Series {
    pub(super) fn add(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    pub(super) fn mean(&self) -> Estimate {
        let count = self.count.max(1) as f64;
        let value = self.sum / count;
        let variance = (self.squares / count - value * value).max(0.0);
        Estimate { value, error: (variance / (count - 1.0).max(1.0)).sqrt() }
    }

    /// Of a series of negative log likelihoods.
    pub(super) fn perplexity(&self) -> Estimate {
        let Estimate { value, error } = self.mean();
        Estimate { value: value.exp(), error: error * value.exp() }
    }
}

/// Everything that is counted.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// Negative log likelihoods, the model's and the other's.
    pub(super) own: Series,
    pub(super) base: Series,
    pub(super) kl: Series,
    pub(super) divergences: Vec<f64>,
    pub(super) same_top: Series,
    /// Squares of differences.
    pub(super) probability: Series,
}

impl Sums {
    /// Takes the predictions of one token.
    pub(super) fn add(&mut self, own: &LogSoftmax, base: Option<&LogSoftmax>, next: usize) {
        self.own.add(-own.values[next]);
        let Some(base) = base else { return };
        self.base.add(-base.values[next]);
        let term = |(p, q): (&f64, &f64)| if *p > -700.0 { p.exp() * (p - q) } else { 0.0 };
        // What is below zero is rounding.
        let divergence = base.values.iter().zip(&own.values).map(term).sum::<f64>().max(0.0);
        self.kl.add(divergence);
        self.divergences.push(divergence);
        self.same_top.add(if own.top == base.top { 1.0 } else { 0.0 });
        let difference = own.values[next].exp() - base.values[next].exp();
        self.probability.add(difference * difference);
    }
}

/// Logarithms of probabilities.
#[derive(Debug)]
pub(super) struct LogSoftmax {
    values: Vec<f64>,
    /// The most likely token.
    top: usize,
}

impl LogSoftmax {
    pub(super) fn of(logits: &[f32]) -> Self {
        let top = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
        let top = top.unwrap_or(0);
        let maximum = logits.get(top).map_or(0.0, |logit| f64::from(*logit));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - maximum).exp()).sum();
        let shift = maximum + sum.ln();
        Self { values: logits.iter().map(|logit| f64::from(*logit) - shift).collect(), top }
    }
}

/// Linear between the values at both sides.
pub(super) fn quantiles(mut values: Vec<f64>) -> Quantiles {
    values.sort_by(f64::total_cmp);
    let at = |fraction: f64| {
        let place = fraction * values.len().saturating_sub(1) as f64;
        let low = values.get(place as usize).copied().unwrap_or(0.0);
        let high = values.get(place as usize + 1).copied().unwrap_or(low);
        low + (high - low) * place.fract()
    };
    Quantiles { median: at(0.5), p99: at(0.99), p999: at(0.999), maximum: at(1.0) }
}
