//! Limits for figures of the report: `--fail-on 'rmse>0.1'`.

use std::{fmt, str::FromStr};

use super::{Report, TensorReport};

/// A threshold that cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "threshold {text:?}: {problem}; write 'figure>limit' or 'figure<limit' with a figure of rmse, cosine, bits_per_weight and imbalance"
)]
pub struct ThresholdError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
    pub problem: String,
}

/// A figure of the report and the values that are not accepted.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    text: String,
    figure: Figure,
    relation: Relation,
    limit: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    /// Relative RMSE of each quantized matrix.
    Rmse,
    /// Cosine of each quantized matrix.
    Cosine,
    /// Of the whole model.
    BitsPerWeight,
    /// Largest node over the mean, minus 1.
    Imbalance,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Above,
    AtLeast,
    Below,
    AtMost,
}

impl Relation {
    /// Whether the relation holds. It holds for what is no number: nobody asked for that.
    fn holds(self, value: f64, limit: f64) -> bool {
        value.is_nan()
            || match self {
                Self::Above => value > limit,
                Self::AtLeast => value >= limit,
                Self::Below => value < limit,
                Self::AtMost => value <= limit,
            }
    }

    /// Whether `a` is further on the wrong side than `b`.
    fn is_worse(self, a: f64, b: f64) -> bool {
        match self {
            Self::Above | Self::AtLeast => a > b || a.is_nan(),
            Self::Below | Self::AtMost => a < b || a.is_nan(),
        }
    }
}

impl FromStr for Threshold {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Self, ThresholdError> {
        let wrong = |problem: String| ThresholdError { text: text.to_owned(), problem };
        let at = text.find(['<', '>']).ok_or_else(|| wrong("it has no '<' or '>'".to_owned()))?;
        let (figure, rest) = text.split_at(at);
        let relations = [
            (">=", Relation::AtLeast),
            ("<=", Relation::AtMost),
            (">", Relation::Above),
            ("<", Relation::Below),
        ];
        let found = relations
            .into_iter()
            .find_map(|(sign, relation)| Some((relation, rest.strip_prefix(sign)?)));
        let (relation, limit) = found.expect("the rest begins with one of the signs");
        let figure = match figure.trim() {
            "rmse" => Figure::Rmse,
            "cosine" => Figure::Cosine,
            "bits_per_weight" => Figure::BitsPerWeight,
            "imbalance" => Figure::Imbalance,
            other => return Err(wrong(format!("{other:?} is no figure of the report"))),
        };
        let limit = limit.trim();
        let limit = limit.parse::<f64>().ok().filter(|limit| limit.is_finite());
        let limit = limit.ok_or_else(|| wrong("the limit is not a number".to_owned()))?;
        Ok(Self { text: text.to_owned(), figure, relation, limit })
    }
}

/// A figure beyond a threshold.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// The threshold as it was given.
    pub threshold: String,
    /// The tensor that is furthest beyond it; absent for figures of the whole model.
    pub tensor: Option<String>,
    /// Its value.
    pub found: f64,
    /// How many other tensors are beyond it too.
    pub others: usize,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { threshold, tensor, found, others } = self;
        write!(formatter, "{threshold}: ")?;
        if let Some(tensor) = tensor {
            write!(formatter, "tensor {tensor:?} has ")?;
        } else {
            write!(formatter, "it is ")?;
        }
        write!(formatter, "{found:.6}")?;
        match others {
            0 => Ok(()),
            1 => write!(formatter, ", and 1 more is beyond it"),
            others => write!(formatter, ", and {others} more are beyond it"),
        }
    }
}

/// What of a conversion is beyond the thresholds, in their order; empty if all is well. Figures
/// of tensors are judged one by one; those that a model of 16 bits does not have are beyond none.
#[must_use]
pub fn violations(report: &Report, thresholds: &[Threshold]) -> Vec<Violation> {
    thresholds.iter().filter_map(|threshold| threshold.violation(report)).collect()
}

impl Threshold {
    fn violation(&self, report: &Report) -> Option<Violation> {
        let tensors = |figure: fn(&TensorReport) -> Option<f64>| {
            let found = report.tensors.iter();
            found
                .filter_map(|(name, tensor)| Some((Some(name.as_str()), figure(tensor)?)))
                .collect()
        };
        let figures: Vec<(Option<&str>, f64)> = match self.figure {
            Figure::Rmse => tensors(|tensor| tensor.relative_rmse),
            Figure::Cosine => tensors(|tensor| tensor.cosine),
            Figure::BitsPerWeight => vec![(None, report.bits_per_weight)],
            Figure::Imbalance => vec![(None, report.imbalance)],
        };
        let mut beyond =
            figures.into_iter().filter(|(_, value)| self.relation.holds(*value, self.limit));
        let first = beyond.next()?;
        let (others, (tensor, found)) = beyond.fold((0, first), |(others, worst), next| {
            let worse = self.relation.is_worse(next.1, worst.1);
            (others + 1, if worse { next } else { worst })
        });
        let tensor = tensor.map(str::to_owned);
        Some(Violation { threshold: self.text.clone(), tensor, found, others })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let tensor = |rmse: f64| TensorReport {
            relative_rmse: Some(rmse),
            cosine: Some(1.0 - rmse),
            ..TensorReport::plain()
        };
        let tensors = [
            ("a".to_owned(), tensor(0.05)),
            ("b".to_owned(), tensor(0.125)),
            ("c".to_owned(), tensor(0.0625)),
            ("d".to_owned(), TensorReport::plain()),
        ];
        Report::new(tensors.into(), (16, 9), vec![60, 40], Vec::new())
    }

    #[track_caller]
    fn check(threshold: &str, expected: &str) {
        let found = violations(&report(), &[threshold.parse().unwrap()]);
        let found: Vec<String> = found.iter().map(Violation::to_string).collect();
        assert_eq!(found.join("; "), expected, "{threshold}");
    }

    #[test]
    fn the_tensor_furthest_beyond_is_named() {
        check("rmse>0.1", "rmse>0.1: tensor \"b\" has 0.125000");
        check("rmse > 0.06", "rmse > 0.06: tensor \"b\" has 0.125000, and 1 more is beyond it");
        check("rmse>=0.05", "rmse>=0.05: tensor \"b\" has 0.125000, and 2 more are beyond it");
        check("rmse>0.125", "");
        check("rmse<0.06", "rmse<0.06: tensor \"a\" has 0.050000");
        check("cosine<0.9", "cosine<0.9: tensor \"b\" has 0.875000");
        check("cosine<=0.875", "cosine<=0.875: tensor \"b\" has 0.875000");
        check("cosine<0.875", "");
    }

    #[test]
    fn figures_of_the_model_are_judged_once() {
        check("bits_per_weight>4.4", "bits_per_weight>4.4: it is 4.500000");
        check("bits_per_weight>4.5", "");
        check("imbalance>1e-1", "imbalance>1e-1: it is 0.200000");
        check("imbalance>0.3", "");
    }

    #[test]
    fn what_is_no_number_is_beyond_every_threshold() {
        let mut report = report();
        report.imbalance = f64::NAN;
        let thresholds = ["imbalance>9".parse().unwrap(), "imbalance<0".parse().unwrap()];
        assert_eq!(violations(&report, &thresholds).len(), 2);
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &str) {
        let error = text.parse::<Threshold>().unwrap_err();
        assert_eq!((error.text.as_str(), error.problem.as_str()), (text, expected));
    }

    #[test]
    fn thresholds_of_another_form_are_refused() {
        check_refused("rmse", "it has no '<' or '>'");
        check_refused("rmse=0.1", "it has no '<' or '>'");
        check_refused(">0.1", "\"\" is no figure of the report");
        check_refused("speed>0.1", "\"speed\" is no figure of the report");
        check_refused("rmse>", "the limit is not a number");
        check_refused("rmse>NaN", "the limit is not a number");
        check_refused("rmse>inf", "the limit is not a number");
        check_refused("rmse>>1", "the limit is not a number");
    }
}
