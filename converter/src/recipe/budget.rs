//! Bits given out by what they buy: every matrix may have one of several formats, each with its bytes and
//! the divergence that it is expected to cost; all together may take so many bytes.
//!
//! On the lower convex hull of each matrix's formats, steps up are taken in the order of divergence saved
//! per byte, until the next one would take too much (Lagrangian relaxation of the knapsack; Shoham and
//! Gersho 1988). What is left over goes to steps that still fit. Knows no names and no files.

use std::{fmt, str::FromStr};

/// How much a model may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Bits per weight, everything that is stored counted.
    BitsPerWeight(f64),
    /// Bytes of all weights.
    Bytes(u64),
    /// As much as the nodes' memory allows.
    Fit,
}

impl Budget {
    /// Bytes for a model of so many weights; no limit where nodes decide.
    #[must_use]
    pub fn bytes(self, weights: u64) -> u64 {
        match self {
            Self::BitsPerWeight(bits) => (bits * weights as f64 / 8.0) as u64,
            Self::Bytes(bytes) => bytes,
            Self::Fit => u64::MAX,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BitsPerWeight(bits) => write!(formatter, "--bpw {bits}"),
            Self::Bytes(bytes) => write!(formatter, "--size {bytes}"),
            Self::Fit => formatter.write_str("--bpw fit"),
        }
    }
}

impl FromStr for Budget {
    type Err = String;

    /// Bits per weight, or `fit`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "fit" {
            return Ok(Self::Fit);
        }
        let bits = text.parse::<f64>().ok().filter(|bits| (2.0..=16.0).contains(bits));
        bits.map(Self::BitsPerWeight).ok_or_else(|| {
            format!("{text:?} is neither a number from 2 to 16, such as 4.8, nor fit")
        })
    }
}

/// What a format takes and costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FormatCost {
    pub(crate) bytes: u64,
    pub(crate) divergence: f64,
}

/// The format of each matrix, an index into its list, so that all together take at most `budget` bytes.
/// `Err` has the fewest bytes that are possible, if those are too many.
pub(crate) fn give_out(matrices: &[Vec<FormatCost>], budget: u64) -> Result<Vec<usize>, u64> {
    let hulls: Vec<Vec<usize>> = matrices.iter().map(|formats| hull(formats)).collect();
    let mut at = vec![0; matrices.len()];
    let cost = |matrix: usize, step: usize| matrices[matrix][hulls[matrix][step]];
    let least: u64 = (0..matrices.len()).map(|matrix| cost(matrix, 0).bytes).sum();
    let Some(mut left) = budget.checked_sub(least) else { return Err(least) };
    // Slopes fall along a hull, so that sorting keeps each matrix's steps in order.
    let mut steps: Vec<(usize, usize, f64)> = Vec::new();
    for (matrix, hull) in hulls.iter().enumerate() {
        for step in 1..hull.len() {
            let [from, to] = [cost(matrix, step - 1), cost(matrix, step)];
            let saved = from.divergence - to.divergence;
            steps.push((matrix, step, saved / (to.bytes - from.bytes) as f64));
        }
    }
    steps.sort_by(|a, b| b.2.total_cmp(&a.2).then((a.0, a.1).cmp(&(b.0, b.1))));
    for (matrix, step, _) in steps {
        // A step that does not fit ends its matrix's climb.
        if at[matrix] + 1 != step {
            continue;
        }
        let more = cost(matrix, step).bytes - cost(matrix, step - 1).bytes;
        if more <= left {
            left -= more;
            at[matrix] = step;
        }
    }
    Ok(at.iter().zip(&hulls).map(|(step, hull)| hull[*step]).collect())
}

/// The formats on the lower convex hull, from the smallest up.
fn hull(formats: &[FormatCost]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..formats.len()).collect();
    order.sort_by(|a, b| {
        let [a, b] = [formats[*a], formats[*b]];
        a.bytes.cmp(&b.bytes).then(a.divergence.total_cmp(&b.divergence))
    });
    let mut hull: Vec<usize> = Vec::new();
    for next in order {
        if hull.last().is_some_and(|last| formats[next].divergence >= formats[*last].divergence) {
            continue;
        }
        while let [.., before, last] = hull[..] {
            let slope = |from: usize, to: usize| {
                let [from, to] = [formats[from], formats[to]];
                (from.divergence - to.divergence) / (to.bytes - from.bytes) as f64
            };
            if slope(before, last) > slope(last, next) {
                break;
            }
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn costs(of: &[(u64, f64)]) -> Vec<FormatCost> {
        of.iter().map(|&(bytes, divergence)| FormatCost { bytes, divergence }).collect()
    }

    #[test]
    fn only_formats_that_buy_something_are_steps() {
        let formats = costs(&[(10, 8.0), (20, 7.5), (30, 1.0), (35, 1.5), (40, 0.5)]);
        assert_eq!(hull(&formats), [0, 2, 4]);
        assert_eq!(hull(&costs(&[(10, 1.0), (10, 0.5)])), [1]);
    }

    #[test]
    fn bits_go_where_they_save_most() {
        let sensitive = costs(&[(10, 8.0), (20, 1.0), (30, 0.5)]);
        let other = costs(&[(10, 1.0), (20, 0.5)]);
        let matrices = [sensitive, other];
        let given = |budget| give_out(&matrices, budget);
        assert_eq!(given(19), Err(20));
        assert_eq!(given(20), Ok(vec![0, 0]));
        assert_eq!(given(30), Ok(vec![1, 0]));
        assert_eq!(given(49), Ok(vec![2, 0]));
        assert_eq!(given(1000), Ok(vec![2, 1]));
    }

    /// The least divergence of all choices within a budget.
    fn best(matrices: &[Vec<FormatCost>], budget: u64) -> Option<f64> {
        let Some((first, others)) = matrices.split_first() else { return Some(0.0) };
        let of = |format: &FormatCost| {
            Some(format.divergence + best(others, budget.checked_sub(format.bytes)?)?)
        };
        first.iter().filter_map(of).min_by(f64::total_cmp)
    }

    proptest! {
        #[test]
        fn what_is_given_fits_and_is_near_the_best(
            matrices in prop::collection::vec(
                prop::collection::vec((1..50_u64, 0.0..10.0), 1..5), 1..5),
            budget in 0..200_u64,
        ) {
            let matrices: Vec<_> = matrices.iter().map(|formats| costs(formats)).collect();
            let best = best(&matrices, budget);
            match give_out(&matrices, budget) {
                Err(least) => prop_assert!(best.is_none() && least > budget),
                Ok(given) => {
                    let chosen = || given.iter().zip(&matrices).map(|(at, formats)| formats[*at]);
                    let bytes: u64 = chosen().map(|it| it.bytes).sum();
                    let divergence: f64 = chosen().map(|it| it.divergence).sum();
                    prop_assert!(bytes <= budget);
                    // One step of one matrix is what relaxation may miss.
                    let step = matrices.iter().flatten().map(|it| it.divergence).fold(0.0, f64::max);
                    prop_assert!(divergence <= best.unwrap() + step + 1e-9);
                }
            }
        }
    }
}
