//! The exponential function and what follows from it: the same bits on every machine, which the
//! platform's own are not, and without branches, so that loops over them vectorize.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

/// 1.5 · 2²³: adding it rounds a float of modest size to an integer in its low bits.
pub(crate) const ROUNDER: f32 = 12_582_912.0;

/// Below, results would not be normal numbers.
pub(crate) const LEAST: f32 = -87.0;

// ln 2 in two parts, so that the first product is exact.
pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;

/// The polynomial's coefficients: of the highest power, and of those below.
pub(crate) const HIGHEST: f32 = 1.987_569_1e-4;
pub(crate) const COEFFICIENTS: [f32; 5] =
    [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `e^x` within 2 units in the last place. Arguments are limited to -87..=88, where the result
/// is a normal number: below, `1.6e-38` stands for zero.
///
/// Source: Cephes `expf` (Moshier), polynomial of degree 5 after reduction by `ln 2`.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(LEAST, 88.0);
    let rounded = x * std::f32::consts::LOG2_E + ROUNDER;
    let power = rounded.to_bits().wrapping_sub(ROUNDER.to_bits());
    let whole = rounded - ROUNDER;
    let rest = x - whole * LN2_HIGH - whole * LN2_LOW;
    let mut sum = HIGHEST;
    for coefficient in COEFFICIENTS {
        sum = sum * rest + coefficient;
    }
    let value = sum * rest * rest + rest + 1.0;
    value * f32::from_bits(power.wrapping_add(127) << 23)
}

/// The same for arguments up to 0, in which products are fused with sums: within 2 units in the
/// last place, and in fewer operations where the processor fuses.
#[inline(always)]
#[must_use]
pub fn exp_of_negative(x: f32) -> f32 {
    // The other way round it would lose NaN.
    let x = if LEAST > x { LEAST } else { x };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let power = rounded.to_bits().wrapping_sub(ROUNDER.to_bits());
    let whole = rounded - ROUNDER;
    let rest = whole.mul_add(-LN2_LOW, whole.mul_add(-LN2_HIGH, x));
    let mut sum = HIGHEST;
    for coefficient in COEFFICIENTS {
        sum = sum.mul_add(rest, coefficient);
    }
    let value = (sum * rest).mul_add(rest, rest) + 1.0;
    value * f32::from_bits(power.wrapping_add(127) << 23)
}

/// The hyperbolic tangent, within 2e-7 of its value.
#[inline(always)]
#[must_use]
pub fn tanh(x: f32) -> f32 {
    let small = exp(-2.0 * x.abs());
    ((1.0 - small) / (1.0 + small)).copysign(x)
}

/// `ln(1 + e^x)`; beyond 20 that is `x` in f32.
#[must_use]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(exp(x)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_agrees_with_f64() {
        for step in -40_000..=40_000 {
            let x = step as f32 * 5e-4;
            let error = (f64::from(tanh(x)) - f64::from(x).tanh()).abs();
            assert!(error < 2e-7, "tanh({x}) is off by {error:e}");
        }
        assert!(tanh(f32::NAN).is_nan());
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)], [1.0, -1.0]);
    }

    /// Two units in the last place of an f32.
    const TOLERANCE: f64 = 2.4e-7;

    #[test]
    fn agrees_with_f64_over_its_range() {
        let mut worst: f64 = 0.0;
        for step in -870_000..=880_000 {
            let x = step as f32 * 1e-4;
            let expected = f64::from(x).exp();
            let error = |found: f32| (f64::from(found) - expected).abs() / expected;
            worst = worst.max(error(exp(x)));
            if step <= 0 {
                worst = worst.max(error(exp_of_negative(x)));
            }
        }
        assert!(worst < TOLERANCE, "relative error {worst:e}");
    }

    #[test]
    fn edges_are_finite_and_nan_stays() {
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(f32::INFINITY).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert!(exp_of_negative(f32::NEG_INFINITY) < 2e-38);
        assert!(exp_of_negative(f32::NAN).is_nan());
    }
}
