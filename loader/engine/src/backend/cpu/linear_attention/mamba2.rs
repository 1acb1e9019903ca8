//! The output gate and norm of Mamba-2.

use shardpack_kernels::lanes::sum;

use super::{Params, sigmoid};

/// Lets as much of the result through as `z` says, and normalises the value heads of each key head
/// together if they are all here.
pub(super) fn gate(out: &mut [f32], z: &[f32], gain: Option<&Vec<f32>>, params: &Params<'_>) {
    for (x, z) in out.iter_mut().zip(z) {
        *x *= z * sigmoid(*z);
    }
    let Some(gain) = gain else { return };
    let width = out.len() / params.key_heads;
    for (group, gain) in out.chunks_exact_mut(width).zip(gain.chunks_exact(width)) {
        let squares: Vec<f32> = group.iter().map(|x| x * x).collect();
        let factor = 1.0 / (sum(&squares) / width as f32 + params.spec.eps.0).sqrt();
        for (x, gain) in group.iter_mut().zip(gain) {
            *x = *gain * (*x * factor);
        }
    }
}
