//! What operations give in exact arithmetic, with the error that each element may have: computed in
//! f64 on plain slices, from the values that the device is given.

/// An element and its bound.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub value: f64,
    pub bound: f64,
}

/// The arithmetic of a device in one element type.
#[derive(Clone, Copy)]
pub(super) struct Rounding {
    /// Largest relative error of rounding a value to the type.
    pub unit: f64,
}

/// Relative error of an f32.
const UNIT_F32: f64 = 1.0 / (1 << 24) as f64;

/// Independent roundings add up like a random walk; six standard deviations are never seen.
const DEVIATIONS: f64 = 6.0;

/// Sums of some hundred terms in f32 lose at most this many units of their largest partial sum.
const SUM_UNITS: f64 = 64.0;

impl Rounding {
    /// A sum of products: the result is rounded to the type, every product has factors that may
    /// have been rounded to it (`sizes` are the products' sizes before anything cancels), and the
    /// sum is kept in f32.
    pub(super) fn sum(self, value: f64, sizes: impl Iterator<Item = f64>) -> Expected {
        let (mut squares, mut all) = (0.0, 0.0);
        for size in sizes {
            squares += size * size;
            all += size;
        }
        let bound = self.unit * (value.abs() + DEVIATIONS * squares.sqrt())
            + SUM_UNITS * UNIT_F32 * all
            + f64::from(f32::MIN_POSITIVE);
        Expected { value, bound }
    }

    /// `steps` roundings of a value one after the other.
    pub(super) fn steps(self, value: f64, size: f64, steps: f64) -> Expected {
        let bound = steps * self.unit * size + SUM_UNITS * UNIT_F32 * size;
        Expected { value, bound: bound + f64::from(f32::MIN_POSITIVE) }
    }
}

/// `x · wᵀ` for a quantized matrix: its integers, with a scale and a bias per group of inputs.
pub(super) struct Matrix {
    pub integers: Vec<u8>,
    pub scales: Vec<f32>,
    pub biases: Vec<f32>,
    pub inputs: usize,
    pub group: usize,
}

impl Matrix {
    /// Output `output` for one row of `x`.
    pub(super) fn product(&self, x: &[f32], output: usize, rounding: Rounding) -> Expected {
        let term = |input: usize| {
            let element = output * self.inputs + input;
            let group = element / self.group;
            let scaled = f64::from(self.integers[element]) * f64::from(self.scales[group]);
            (f64::from(x[input]), scaled, f64::from(self.biases[group]))
        };
        let terms = || (0..self.inputs).map(term);
        let value = terms().map(|(x, scaled, bias)| x * (scaled + bias)).sum();
        // Scale times integer and bias cancel: both count.
        rounding.sum(value, terms().map(|(x, scaled, bias)| x.abs() * (scaled.abs() + bias.abs())))
    }
}

/// One head's attention of the row at position `last` over `keys` and `values` `[keys, dim]`.
pub(super) fn attention(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    last: usize,
    scale: f64,
    rounding: Rounding,
) -> Vec<Expected> {
    let dim = query.len();
    let dot = |key: &[f32]| -> f64 {
        query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale
    };
    let scores: Vec<f64> = keys.chunks(dim).take(last + 1).map(dot).collect();
    let most = scores.iter().copied().fold(f64::MIN, f64::max);
    let largest = scores.iter().fold(0.0_f64, |largest, it| largest.max(it.abs()));
    let shares: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let all: f64 = shares.iter().sum();
    (0..dim)
        .map(|column| {
            let term = |row: usize| shares[row] / all * f64::from(values[row * dim + column]);
            let value = (0..=last).map(term).sum();
            let size: f64 = (0..=last).map(|row| term(row).abs()).sum();
            // Scaled queries, shares and the result are rounded; an error of a score is one of its
            // share, relative.
            rounding.steps(value, size * (1.0 + largest), 4.0)
        })
        .collect()
}

/// Root-mean-square norm of a row.
pub(super) fn rms_norm(x: &[f32], gain: &[f32], eps: f64, rounding: Rounding) -> Vec<Expected> {
    let squares: f64 = x.iter().map(|it| f64::from(*it).powi(2)).sum();
    let factor = 1.0 / (squares / x.len() as f64 + eps).sqrt();
    let element = |(x, gain): (&f32, &f32)| {
        let value = f64::from(*x) * factor * f64::from(*gain);
        // The normed value, its product with the gain.
        rounding.steps(value, value.abs(), 3.0)
    };
    x.iter().zip(gain).map(element).collect()
}

/// Rotary embedding of a row: the halves are the pairs' first and second values.
pub(super) fn rope(x: &[f32], cos: &[f32], sin: &[f32], rounding: Rounding) -> Vec<Expected> {
    let half = x.len() / 2;
    let element = |index: usize| {
        let pair = index % half;
        let (a, b) = (f64::from(x[pair]), f64::from(x[pair + half]));
        let (cos, sin) = (f64::from(cos[pair]), f64::from(sin[pair]));
        let value = if index < half { a * cos - b * sin } else { b * cos + a * sin };
        rounding.steps(value, (a * cos).abs() + (b * sin).abs() + (b * cos).abs(), 3.0)
    };
    (0..x.len()).map(element).collect()
}

/// The largest error as a share of its bound; an error when it is above one, or no number.
pub(super) fn worst(expected: &[Expected], found: &[f32]) -> anyhow::Result<f64> {
    anyhow::ensure!(expected.len() == found.len(), "{} elements", found.len());
    let mut worst = 0.0_f64;
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        let share = (f64::from(*found) - expected.value).abs() / expected.bound;
        let Expected { value, bound } = expected;
        anyhow::ensure!(
            share <= 1.0,
            "element {index} is {found}, expected {value:.6} within {bound:.1e}"
        );
        worst = worst.max(share);
    }
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: Rounding = Rounding { unit: 1.0 / 256.0 };

    #[test]
    fn a_wrong_element_is_outside_its_bound() {
        let gain = [1.0; 4];
        let expected = rms_norm(&[1.0, -1.0, 1.0, -1.0], &gain, 0.0, BF16);
        assert!(worst(&expected, &[1.0, -1.0, 1.0, -1.0]).unwrap() < 0.01);
        assert!(worst(&expected, &[1.004, -1.0, 1.0, -1.0]).unwrap() > 0.1);
        worst(&expected, &[1.05, -1.0, 1.0, -1.0]).unwrap_err();
        worst(&expected, &[f32::NAN, -1.0, 1.0, -1.0]).unwrap_err();
        worst(&expected, &[1.0]).unwrap_err();
    }

    #[test]
    fn a_query_that_knows_one_key_takes_its_value() {
        let keys = [100.0, 0.0, 0.0, 100.0];
        let values = [1.0, 2.0, 3.0, 4.0];
        let found = attention(&[0.0, 1.0], &keys, &values, 1, 1.0, BF16);
        assert!((found[0].value - 3.0).abs() < 1e-9 && (found[1].value - 4.0).abs() < 1e-9);
        let first = attention(&[0.0, 1.0], &keys, &values, 0, 1.0, BF16);
        assert!((first[0].value - 1.0).abs() < 1e-9, "later keys are not seen");
    }
}
