//! Sums over tokens and what they estimate.

use serde::Serialize;

use super::stored::Row;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Its standard error.
    pub error: f64,
}

impl Estimate {
    /// The mean of values.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let mut series = Series::default();
        for value in values {
            series.add(*value);
        }
        series.mean()
    }

    /// Of a mean of logarithms, what they are of: the geometric mean.
    #[must_use]
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, error: self.error * value }
    }
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

    fn extend(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
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
        self.mean().exp()
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
    /// Probability that is known only as a sum.
    pub(super) rest: Series,
}

/// The prediction that another one is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Truth<'a> {
    /// Of every token.
    Whole(&'a LogSoftmax),
    /// Of the most likely tokens, and the sum of all others.
    Top(&'a Row),
}

impl Truth<'_> {
    fn top(&self) -> usize {
        match self {
            Self::Whole(base) => base.top,
            Self::Top(row) => row.top() as usize,
        }
    }

    /// The logarithm of the probability of the text's next token.
    fn next(&self, next: usize) -> f64 {
        match self {
            Self::Whole(base) => base.values[next],
            Self::Top(row) => row.next,
        }
    }

    /// `Σ p · ln(p / q)`. Tokens that only their sum is known of count as one: that is never more
    /// than the whole divergence, and is all of it where `q` divides the sum among them as `p` does.
    pub(super) fn divergence(&self, own: &LogSoftmax) -> f64 {
        let term = |(p, q): (f64, f64)| if p > -700.0 { p.exp() * (p - q) } else { 0.0 };
        let sum = match self {
            Self::Whole(base) => {
                base.values.iter().copied().zip(own.values.iter().copied()).map(term).sum::<f64>()
            }
            Self::Top(row) => {
                let mut others = vec![true; own.values.len()];
                let mut sum = 0.0;
                for (id, log) in &row.likely {
                    others[*id as usize] = false;
                    sum += term((*log, own.values[*id as usize]));
                }
                let rest = own.values.iter().zip(others).filter(|it| it.1);
                let rest: f64 = rest.map(|(log, _)| log.exp()).sum();
                sum + term((row.rest, rest.max(f64::MIN_POSITIVE).ln()))
            }
        };
        // What is below zero is rounding.
        sum.max(0.0)
    }
}

impl Sums {
    /// Takes the predictions of one token.
    pub(super) fn add(&mut self, own: &LogSoftmax, base: Option<Truth<'_>>, next: usize) {
        self.own.add(-own.values[next]);
        let Some(base) = base else { return };
        self.base.add(-base.next(next));
        let divergence = base.divergence(own);
        self.kl.add(divergence);
        self.divergences.push(divergence);
        self.same_top.add(if own.top == base.top() { 1.0 } else { 0.0 });
        let difference = own.values[next].exp() - base.next(next).exp();
        self.probability.add(difference * difference);
        if let Truth::Top(row) = base {
            self.rest.add(row.rest.exp());
        }
    }

    /// Takes those of another text.
    pub(super) fn extend(&mut self, other: &Self) {
        self.own.extend(&other.own);
        self.base.extend(&other.base);
        self.kl.extend(&other.kl);
        self.divergences.extend(&other.divergences);
        self.same_top.extend(&other.same_top);
        self.probability.extend(&other.probability);
        self.rest.extend(&other.rest);
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

    /// The logarithm of a token's probability.
    pub(super) fn log(&self, token: usize) -> f64 {
        self.values[token]
    }

    pub(super) const fn top(&self) -> usize {
        self.top
    }

    /// The `count` most likely tokens, most likely first, the lower id first among equals; the
    /// others as a sum.
    pub(super) fn row(&self, count: usize, next: usize) -> Row {
        let mut ids: Vec<u32> = (0..self.values.len() as u32).collect();
        let order = |a: &u32, b: &u32| {
            let [x, y] = [a, b].map(|id| self.values[*id as usize]);
            y.total_cmp(&x).then(a.cmp(b))
        };
        if count < ids.len() {
            ids.select_nth_unstable_by(count, order);
        }
        let (likely, others) = ids.split_at_mut(count.min(self.values.len()));
        likely.sort_unstable_by(order);
        let rest: f64 = others.iter().map(|id| self.values[*id as usize].exp()).sum();
        let log = |id: &u32| (*id, self.values[*id as usize]);
        Row { likely: likely.iter().map(log).collect(), rest: rest.ln(), next: self.values[next] }
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
