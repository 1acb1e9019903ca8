//! Floats into float groups, as `mx.quantize` of MLX 0.32.4 does on its CPU backend: the scale is
//! computed in the type of the weights, and so is the quotient for `nvfp4`.
//!
//! MLX's scales below 2⁻¹²⁷ wrap around to huge ones; here they are 2⁻¹²⁷.

use rayon::prelude::*;

use super::{FloatFormat, dequantize};
use crate::{
    affine::{CastError, ErrorSums, GROUPS_PER_TASK, narrow, widen},
    dtype::Dtype,
    simd::Platform,
    small_floats::{E2M1, E4M3},
};

/// Largest group.
const MOST: usize = 32;

/// Most values of E4M3 from 0 on that are finite.
const FINITE_E4M3: u8 = 0x7e;

/// Magnitudes of E2M1 above which the next one is nearer; at a tie the smaller one is taken.
const MIDDLES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// Up to this magnitude, distances to values of E2M1 are exact, and [`MIDDLES`] says which is
/// least.
const EXACT_DISTANCES: f32 = 16.0;

/// What weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Floats as they were trained.
    Floats,
    /// Decoded from quantized weights, in f32: a group that some scale holds exactly gets that
    /// scale. With powers of two MLX's rule finds it; scales in E4M3 are tried.
    Decoded,
}

/// Quantizes the rows that follow those with the sums `before`, which must be whole tasks of
/// [`GROUPS_PER_TASK`] groups. Returns the sums with these; the same bits for any number of threads.
///
/// # Errors
/// When a weight is infinite or no number.
///
/// # Panics
/// When lengths do not fit each other.
pub fn quantize_after(
    before: ErrorSums,
    (format, source): (FloatFormat, Source),
    (dtype, weights): (Dtype, &[u8]),
    (packed, scales): (&mut [u8], &mut [u8]),
) -> Result<ErrorSums, CastError> {
    let group_source = format.group_size() as usize * dtype.size_bytes();
    assert_eq!(weights.len(), scales.len() * group_source, "whole groups");
    assert_eq!(packed.len(), scales.len() * format.group_bytes(), "values of every group");
    let tasks: Vec<Result<ErrorSums, CastError>> = weights
        .par_chunks(GROUPS_PER_TASK * group_source)
        .zip(packed.par_chunks_mut(GROUPS_PER_TASK * format.group_bytes()))
        .zip(scales.par_chunks_mut(GROUPS_PER_TASK))
        .enumerate()
        .map(|(task, ((weights, packed), scales))| {
            let groups = Groups { format, source, dtype };
            let first = task * GROUPS_PER_TASK * format.group_size() as usize;
            groups.quantize(weights, packed, scales).map_err(|bad| bad.after(first))
        })
        .collect();
    tasks.into_iter().try_fold(before, |sums, task| Ok(sums.plus(task?)))
}

struct Groups {
    format: FloatFormat,
    source: Source,
    dtype: Dtype,
}

impl Groups {
    fn quantize(
        &self,
        weights: &[u8],
        packed: &mut [u8],
        scales: &mut [u8],
    ) -> Result<ErrorSums, CastError> {
        let platform = Platform::detect_for_quantizing();
        let group = self.format.group_size() as usize;
        let (mut values, mut back) = ([0.0; MOST], [0.0; MOST]);
        let (values, back) = (&mut values[..group], &mut back[..group]);
        let mut sums = ErrorSums::default();
        let sources = weights.chunks_exact(group * self.dtype.size_bytes());
        let out = packed.chunks_exact_mut(self.format.group_bytes()).zip(scales);
        for (index, (weights, (packed, scale))) in sources.zip(out).enumerate() {
            widen(platform, self.dtype, weights, values);
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                return Err(CastError::NotFinite { index: index * group + at, value: values[at] });
            }
            *scale = self.group(values, packed);
            dequantize(self.format, packed, std::slice::from_ref(scale), back);
            add(&mut sums, values, back);
            sums.at_ends += self.at_ends(packed);
        }
        Ok(sums)
    }

    /// Writes a group's values and returns its scale.
    fn group(&self, values: &[f32], packed: &mut [u8]) -> u8 {
        let most = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        if self.format == FloatFormat::Nvfp4 && self.source == Source::Decoded {
            let exact = exact_scale(values, most);
            if let Some(scale) = exact {
                let factor = E4M3[usize::from(scale)];
                put(packed, values, |value| e2m1(value / factor));
                return scale;
            }
        }
        let step = self.rounded(most / self.format.largest());
        if self.format == FloatFormat::Nvfp4 {
            let byte = e4m3(step);
            let scale = E4M3[usize::from(byte)];
            // MLX divides by zero here, and finds every value as far from infinity.
            let quotient = |value| if scale == 0.0 { 0.0 } else { self.rounded(value / scale) };
            put(packed, values, |value| e2m1(quotient(value)));
            return byte;
        }
        let exponent = exponent_above(step);
        // Two factors, of which neither is beyond f32.
        let factor = [-exponent / 2, -exponent - -exponent / 2].map(power_of_two);
        if self.format == FloatFormat::Mxfp4 {
            put(packed, values, |value| e2m1(value * factor[0] * factor[1]));
        } else {
            for (value, byte) in values.iter().zip(packed) {
                *byte = e4m3(value * factor[0] * factor[1]);
            }
        }
        (exponent + 127) as u8
    }

    /// Rounded to the type of the weights.
    fn rounded(&self, value: f32) -> f32 {
        if self.dtype == Dtype::F32 {
            return value;
        }
        let (mut bytes, mut wide) = ([0; 2], [0.0]);
        narrow(Platform::Portable, self.dtype, &[value], &mut bytes);
        widen(Platform::Portable, self.dtype, &bytes, &mut wide);
        wide[0]
    }

    /// Values at either end of their range.
    fn at_ends(&self, packed: &[u8]) -> u64 {
        let is_end = |byte: &u8| match self.format.bits() {
            4 => u64::from(byte & 7 == 7) + u64::from(byte >> 4 & 7 == 7),
            _ => u64::from(byte & 0x7f == FINITE_E4M3),
        };
        packed.iter().map(is_end).sum()
    }
}

/// The scale in E4M3 with which every value is one of E2M1, if there is one.
fn exact_scale(values: &[f32], most: f32) -> Option<u8> {
    let is_exact = |scale: f32| {
        values.iter().all(|value| {
            let found = E2M1[usize::from(e2m1(value / scale))];
            found * scale == *value
        })
    };
    E2M1[1..8].iter().rev().map(|largest| (e4m3(most / largest), largest)).find_map(
        |(byte, largest)| {
            let scale = E4M3[usize::from(byte)];
            (scale > 0.0 && scale * largest == most && is_exact(scale)).then_some(byte)
        },
    )
}

fn add(sums: &mut ErrorSums, values: &[f32], back: &[f32]) {
    for (value, stored) in values.iter().zip(back) {
        let (value, stored) = (f64::from(*value), f64::from(*stored));
        sums.weights += value * value;
        sums.errors += (value - stored) * (value - stored);
        sums.products += value * stored;
        sums.stored += stored * stored;
    }
}

/// Two nibbles a byte, the low one first.
fn put(packed: &mut [u8], values: &[f32], nibble: impl Fn(f32) -> u8) {
    for (pair, byte) in values.as_chunks::<2>().0.iter().zip(packed) {
        *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
    }
}

/// The nibble of the nearest value; at a tie the first in the order of E2M1's table.
fn e2m1(value: f32) -> u8 {
    let magnitude = value.abs();
    if magnitude > EXACT_DISTANCES {
        return first_nearest(value);
    }
    let place = MIDDLES.iter().map(|middle| u8::from(magnitude > *middle)).sum::<u8>();
    // There is one zero: MLX takes the first of both.
    if value < 0.0 && place > 0 { place | 8 } else { place }
}

/// The same by distances in f32, which round: beyond 2²⁷ all are the same.
#[cold]
fn first_nearest(value: f32) -> u8 {
    let distance = |place: usize| (value - E2M1[place]).abs();
    let nearest = (0..E2M1.len())
        .reduce(|best, place| if distance(place) < distance(best) { place } else { best });
    nearest.unwrap_or(0) as u8
}

/// The nearest E4M3, ties to even; what is beyond its range becomes its end.
fn e4m3(value: f32) -> u8 {
    let (sign, magnitude) = ((value.to_bits() >> 24) as u8 & 0x80, value.abs());
    // Half a step beyond the largest would be the next, were there one.
    if magnitude >= 464.0 {
        return sign | FINITE_E4M3;
    }
    let byte = if magnitude < f32::from_bits(121 << 23) {
        // Steps of 2⁻⁹ below 2⁻⁶; the sum's last bit is one of them.
        let step_is_last_bit = f32::from_bits(141 << 23);
        (magnitude + step_is_last_bit).to_bits() - (141 << 23)
    } else {
        let bits = magnitude.to_bits();
        (bits - (120 << 23) + 0x7_ffff + (bits >> 20 & 1)) >> 20
    };
    sign | byte as u8
}

/// The least `n` from −127 on with `2ⁿ ≥ value`, and 0 for zero.
fn exponent_above(value: f32) -> i32 {
    if value == 0.0 {
        return 0;
    }
    // Subnormal numbers are below the least exponent.
    let (exponent, fraction) = ((value.to_bits() >> 23) as i32 - 127, value.to_bits() & 0x7f_ffff);
    if exponent < -126 {
        let is_above = value > f32::from_bits(0x40_0000);
        return if is_above { -126 } else { -127 };
    }
    exponent + i32::from(fraction > 0)
}

/// `2ⁿ` for an exponent of normal numbers.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
