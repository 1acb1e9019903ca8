//! Normalisation by the root of the mean square, or by mean and variance.

use std::ops::Range;

use crate::{
    lanes::{dot, sum},
    platform::{self, Task},
    team,
};

/// `out = gain · x / sqrt(mean(x²) + eps)` for each consecutive run of `gain.len()` elements:
/// hidden vectors, or single heads.
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    runs(x, gain, out, |x, out| Rms { x, gain, eps, out });
}

/// `out = gain · (x − mean(x)) / sqrt(variance(x) + eps)` for each consecutive run of
/// `gain.len()` elements.
pub fn layer_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    runs(x, gain, out, |x, out| Layer { x, gain, eps, out });
}

/// Shares whole runs out among threads.
fn runs<'a, T: Task<Output = ()>>(
    x: &'a [f32],
    gain: &[f32],
    out: &'a mut [f32],
    task: impl Fn(&'a [f32], &'a mut [f32]) -> T + Sync,
) {
    assert!(!gain.is_empty(), "a norm has a width");
    assert!(x.len().is_multiple_of(gain.len()), "runs of {}", gain.len());
    assert_eq!(x.len(), out.len(), "results of a norm");
    let on = team::current();
    let length = on.units_per_task(x.len() / gain.len(), 2 * gain.len()) * gain.len();
    let mut parts: Vec<_> = x.chunks(length).zip(out.chunks_mut(length)).map(Some).collect();
    team::chunks(&on, &mut parts, 1, |_, part| {
        if let Some((x, out)) = part[0].take() {
            platform::run(on.platform, task(x, out));
        }
    });
}

struct Rms<'a, 'b> {
    x: &'a [f32],
    gain: &'b [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Task for Rms<'_, '_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mean = dot(x, x) / width as f32;
            let factor = 1.0 / (mean + self.eps).sqrt();
            for ((out, x), gain) in out.iter_mut().zip(x).zip(self.gain) {
                *out = x * factor * gain;
            }
        }
    }
}

struct Layer<'a, 'b> {
    x: &'a [f32],
    gain: &'b [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Task for Layer<'_, '_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let width = self.gain.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mean = sum(x) / width as f32;
            for (out, x) in out.iter_mut().zip(x) {
                *out = x - mean;
            }
            let factor = 1.0 / (dot(out, out) / width as f32 + self.eps).sqrt();
            for (out, gain) in out.iter_mut().zip(self.gain) {
                *out = *out * factor * gain;
            }
        }
    }
}

/// The sum of the squares of each row's `columns`, to every `stride`-th element of `out` from
/// `offset` on. Rows of `x` have `width` elements.
pub fn square_sums(
    x: &[f32],
    width: usize,
    columns: Range<usize>,
    out: &mut [f32],
    [offset, stride]: [usize; 2],
) {
    for (row, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(stride)) {
        let part = &row[columns.clone()];
        out[offset] = dot(part, part);
    }
}

/// Multiplies each row by `gain / sqrt(sum / full + eps)`, with the row's sum of squares over all
/// `full` elements of which the row may be a part.
pub fn scale_by_square_sums(
    x: &mut [f32],
    gain: &[f32],
    sums: impl Iterator<Item = f32>,
    full: usize,
    eps: f32,
) {
    for (row, sum) in x.chunks_exact_mut(gain.len()).zip(sums) {
        let factor = 1.0 / (sum / full as f32 + eps).sqrt();
        for (x, gain) in row.iter_mut().zip(gain) {
            *x = *x * factor * gain;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_is_normalised_by_itself() {
        let mut out = [0.0; 4];
        rms_norm(&[3.0, -3.0, 0.5, 0.5], &[1.0, 2.0], 0.0, &mut out);
        assert_eq!(out, [1.0, -2.0, 1.0, 2.0]);
    }

    #[test]
    fn epsilon_stands_under_the_root() {
        let mut out = [0.0];
        rms_norm(&[3.0], &[1.0], 16.0, &mut out);
        assert!((out[0] - 0.6).abs() < 1e-6, "{out:?}");
    }

    #[test]
    fn a_layer_norm_takes_the_mean_away() {
        let mut out = [0.0; 4];
        layer_norm(&[1.0, 3.0, 6.0, 0.0], &[1.0, 2.0], 0.0, &mut out);
        assert_eq!(out, [-1.0, 2.0, 1.0, -2.0]);
    }

    #[test]
    fn parts_with_the_sum_of_all_are_normalised_as_the_whole() {
        let (x, gain) = ([3.0, -1.0, 2.0, 0.5, 0.25, -4.0], [1.0, 2.0, 0.5]);
        let mut whole = [0.0; 6];
        rms_norm(&x, &gain, 1e-3, &mut whole);
        let mut sums = [0.0; 4];
        square_sums(&x, 3, 0..3, &mut sums, [1, 2]);
        let mut last: Vec<f32> = x.chunks(3).flat_map(|row| row[1..].to_vec()).collect();
        let each = sums.chunks(2).map(|pair| pair[1]);
        scale_by_square_sums(&mut last, &gain[1..], each, 3, 1e-3);
        assert_eq!(last, [whole[1], whole[2], whole[4], whole[5]]);
    }
}
