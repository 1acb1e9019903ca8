//! Short convolutions, token by token, as in linear attention.

use super::{Cache, Change, Cpu, Heads, SequenceRows, State, Tensor, UndoLog};
use crate::backend::{ShortConvolution, ShortConvolutionInputs, ShortConvolutionParams};

impl ShortConvolution for Cpu {
    fn short_convolution(
        &self,
        inputs: ShortConvolutionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &ShortConvolutionParams<'_, Vec<f32>>,
    ) -> Tensor {
        assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
        let width = inputs.x.width;
        let mut out = Tensor::zeros(inputs.x.rows(), width);
        let mut row = 0;
        let drafts = params.drafts.iter().copied().chain(std::iter::repeat(0));
        for ((cache, length), drafts) in caches.iter_mut().zip(params.lengths).zip(drafts) {
            let rows = SequenceRows { rows: row..row + length, drafts };
            let place = &mut out.values[row * width..(row + length) * width];
            run(&inputs, rows, cache.state(params.layer), params, place);
            row += length;
        }
        out
    }
}

/// Runs the rows of one sequence, `[rows, channels]` to `out`.
fn run(
    inputs: &ShortConvolutionInputs<'_, Tensor>,
    SequenceRows { rows, drafts }: SequenceRows,
    state: &mut State,
    params: &ShortConvolutionParams<'_, Vec<f32>>,
    out: &mut [f32],
) {
    let (width, kernel) = (inputs.x.width, params.kernel);
    if state.window.is_empty() {
        state.window = vec![vec![0.0; width]; kernel - 1];
    }
    state.undo = (drafts > 0).then(|| UndoLog {
        window: state.window.clone(),
        memory: Vec::new(),
        rows: Vec::with_capacity(rows.len()),
        heads: Heads::none(),
    });
    for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
        let of = |x: &Tensor| row * x.width..(row + 1) * x.width;
        let [b, c, x] = [inputs.b, inputs.c, inputs.x].map(|part| &part.values[of(part)]);
        let newest: Vec<f32> = b.iter().zip(x).map(|(b, x)| b * x).collect();
        if let Some(undo) = &mut state.undo {
            undo.rows.push(Change::of_window(newest.clone()));
        }
        state.window.push(newest);
        for (channel, out) in out.iter_mut().enumerate() {
            let taps = &params.taps[channel * kernel..][..kernel];
            let seen = state.window.iter().map(|inputs| inputs[channel]);
            *out = c[channel] * taps.iter().zip(seen).fold(0.0_f32, |sum, (tap, x)| sum + tap * x);
        }
        state.window.remove(0);
    }
}
