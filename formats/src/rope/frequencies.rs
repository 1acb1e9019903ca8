//! Frequencies and factor of each kind of position embedding.
//!
//! Formulas of transformers' `modeling_rope_utils.py`, evaluated in f64 with portable functions
//! and rounded once. transformers evaluates them in f32, so its values lie up to a few units in
//! the last place away from these.

use std::f64::consts::PI;

use super::{Long, MAX_WIDTH, RopeError, RopeParameters, Scaling, Yarn};
use crate::{
    hex::HexF32,
    spec::{LongRope, Rope, RopeStyle},
};

impl RopeParameters {
    /// The embedding that rotates the first `width` elements of a head.
    pub fn resolve(&self, width: u32, style: RopeStyle) -> Result<Rope, RopeError> {
        if width == 0 || !width.is_multiple_of(2) || width > MAX_WIDTH {
            return Err(RopeError::Width(width));
        }
        let theta = match self.scaling {
            Scaling::Stretched { alpha } if width > 2 => {
                self.theta * libm::pow(alpha, f64::from(width) / f64::from(width - 2))
            }
            _ => self.theta,
        };
        let plain = (0..width / 2)
            .map(move |pair| libm::pow(theta, -f64::from(2 * pair) / f64::from(width)));
        let inv_freq: Vec<f64> = match &self.scaling {
            Scaling::Default | Scaling::Dynamic { .. } | Scaling::Stretched { .. } => {
                plain.clone().collect()
            }
            Scaling::Linear { factor } => {
                plain.clone().map(|frequency| frequency / factor).collect()
            }
            Scaling::Llama3 { factor, low, high, original } => plain
                .clone()
                .map(|frequency| llama3(frequency, *factor, *low, *high, f64::from(*original)))
                .collect(),
            Scaling::Proportional { partial } => {
                let turning = libm::floor(partial * f64::from(width) / 2.0) as usize;
                let turns = |(pair, frequency)| if pair < turning { frequency } else { 0.0 };
                plain.clone().enumerate().map(turns).collect()
            }
            Scaling::Long(long) => divided(plain.clone(), "short_factor", &long.short_factor)?,
            Scaling::Yarn(yarn) => {
                let (low, high) = yarn.ramp(self.theta, f64::from(width));
                plain
                    .clone()
                    .enumerate()
                    .map(|(pair, frequency)| {
                        let scaled = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        frequency / yarn.factor * scaled + frequency * (1.0 - scaled)
                    })
                    .collect()
            }
        };
        let attention_factor = match &self.scaling {
            Scaling::Yarn(yarn) => yarn.attention_factor,
            Scaling::Long(long) => long.attention_factor,
            _ => 1.0,
        };
        let rounded =
            |all: Vec<f64>| all.into_iter().map(|frequency| HexF32(frequency as f32)).collect();
        let long = match &self.scaling {
            Scaling::Long(Long { long_factor, original, .. }) => Some(LongRope {
                beyond: *original,
                inv_freq: rounded(divided(plain, "long_factor", long_factor)?),
            }),
            _ => None,
        };
        Ok(Rope {
            style,
            inv_freq: rounded(inv_freq),
            attention_factor: HexF32(attention_factor as f32),
            long,
        })
    }
}

/// Frequencies with a divisor each.
fn divided(
    plain: impl ExactSizeIterator<Item = f64>,
    key: &'static str,
    divisors: &[f64],
) -> Result<Vec<f64>, RopeError> {
    if divisors.len() != plain.len() {
        return Err(RopeError::Divisors { key, found: divisors.len(), pairs: plain.len() });
    }
    Ok(plain.zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect())
}

fn llama3(frequency: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / frequency;
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high || high <= low {
        frequency
    } else {
        let kept = (original / wavelength - low) / (high - low);
        (1.0 - kept) * frequency / factor + kept * frequency
    }
}

impl Yarn {
    /// First pair that is scaled a little and first that is scaled in full; never equal.
    fn ramp(&self, theta: f64, width: f64) -> (f64, f64) {
        let pair_that_turns = |turns: f64| {
            let original = f64::from(self.original);
            width * libm::log(original / (turns * 2.0 * PI)) / (2.0 * libm::log(theta))
        };
        let (mut low, mut high) =
            (pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (libm::floor(low), libm::ceil(high));
        }
        (low, high) = (low.max(0.0), high.min(width - 1.0));
        #[expect(clippy::float_cmp, reason = "the reference compares exactly")]
        if low == high {
            high += 0.001;
        }
        (low, high)
    }
}

/// How much longer sequences blur the softmax, and what makes up for it.
pub(super) fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * libm::log(factor) + 1.0 }
}
