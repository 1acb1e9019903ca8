//! Normalisation by the root of the mean square.

use rayon::prelude::*;

use crate::lanes::dot;

/// Elements below which another thread costs more than it saves.
const MIN_ELEMENTS_PER_TASK: usize = 1 << 14;

/// `out = gain · x / sqrt(mean(x²) + eps)` for each consecutive run of `gain.len()` elements:
/// hidden vectors, or single heads.
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    assert!(!gain.is_empty(), "a norm has a width");
    assert!(x.len().is_multiple_of(gain.len()), "runs of {}", gain.len());
    assert_eq!(x.len(), out.len(), "results of a norm");
    let runs = x.par_chunks_exact(gain.len()).zip(out.par_chunks_exact_mut(gain.len()));
    runs.with_min_len(MIN_ELEMENTS_PER_TASK.div_ceil(gain.len())).for_each(|(x, out)| {
        let mean = dot(x, x) / gain.len() as f32;
        let factor = 1.0 / (mean + eps).sqrt();
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = x * factor * gain;
        }
    });
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
}
