//! What Mamba 2 does with the result of a token.

use shardpack_kernels::lanes::sum;

use super::sigmoid;
use crate::backend::DeltaStep;

/// Lets as much of the result through as `z` says, and normalises the value heads of each key head
/// together if they are all here.
pub(super) fn gate(out: &mut [f32], z: &[f32], step: &DeltaStep<'_, Vec<f32>>) {
    for (x, z) in out.iter_mut().zip(z) {
        *x *= z * sigmoid(*z);
    }
    let Some(gain) = step.gain else { return };
    let width = out.len() / step.key_heads;
    for (group, gain) in out.chunks_exact_mut(width).zip(gain.chunks_exact(width)) {
        let squares: Vec<f32> = group.iter().map(|x| x * x).collect();
        let factor = 1.0 / (sum(&squares) / width as f32 + step.delta.eps.0).sqrt();
        for (x, gain) in group.iter_mut().zip(gain) {
            *x = *gain * (*x * factor);
        }
    }
}
