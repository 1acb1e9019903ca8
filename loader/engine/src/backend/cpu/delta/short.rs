//! Short convolutions, token by token, as in linear attention.

use std::ops::Range;

use super::{Change, Heads, State, Tensor, Trail};
use crate::backend::{ConvolutionInputs, ConvolutionStep};

/// Runs the rows of one sequence, the last of them `drafts`, `[rows, channels]` to `out`.
pub(in crate::backend::cpu) fn run(
    inputs: &ConvolutionInputs<'_, Tensor>,
    (rows, drafts): (Range<usize>, usize),
    state: &mut State,
    step: &ConvolutionStep<'_, Vec<f32>>,
    out: &mut [f32],
) {
    let (width, kernel) = (inputs.x.width, step.kernel);
    if state.window.is_empty() {
        state.window = vec![vec![0.0; width]; kernel - 1];
    }
    state.trail = (drafts > 0).then(|| Trail {
        window: state.window.clone(),
        memory: Vec::new(),
        rows: Vec::with_capacity(rows.len()),
        heads: Heads::none(),
    });
    for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
        let of = |x: &Tensor| row * x.width..(row + 1) * x.width;
        let [b, c, x] = [inputs.b, inputs.c, inputs.x].map(|part| &part.values[of(part)]);
        let newest: Vec<f32> = b.iter().zip(x).map(|(b, x)| b * x).collect();
        if let Some(trail) = &mut state.trail {
            trail.rows.push(Change::of_window(newest.clone()));
        }
        state.window.push(newest);
        for (channel, out) in out.iter_mut().enumerate() {
            let taps = &step.taps[channel * kernel..][..kernel];
            let seen = state.window.iter().map(|inputs| inputs[channel]);
            *out = c[channel] * taps.iter().zip(seen).fold(0.0_f32, |sum, (tap, x)| sum + tap * x);
        }
        state.window.remove(0);
    }
}
