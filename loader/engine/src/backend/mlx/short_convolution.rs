//! Short convolutions.

use std::ops::Range;

use shardpack_mlx::{Array, Binary, Element};

use super::{Cache, Mlx, Tensor, Vector};
use crate::backend::{ShortConvolution, ShortConvolutionInputs, ShortConvolutionParams};

impl ShortConvolution for Mlx {
    fn short_convolution(
        &self,
        inputs: ShortConvolutionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &ShortConvolutionParams<'_, Vector>,
    ) -> Tensor {
        short_convolution(&inputs, caches, params)
    }
}

/// Short convolutions of all sequences; each cache's state moves on by its rows.
fn short_convolution(
    inputs: &ShortConvolutionInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &ShortConvolutionParams<'_, Vector>,
) -> Tensor {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    let library = inputs.x.array.library();
    let width = inputs.x.width;
    let newest = inputs.b.exact().binary(Binary::Multiply, &inputs.x.exact());
    let taps = params.taps.reshape(&[width, params.kernel]);
    let mut outputs = Vec::with_capacity(caches.len());
    let mut row = 0;
    for (cache, &length) in caches.iter_mut().zip(params.lengths) {
        let own = newest.slice(0, row, row + length);
        outputs.push(sequence(&own, &taps, cache.state(params.layer), 0..length));
        row += length;
    }
    let array = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    inputs.x.with_exact(&array.binary(Binary::Multiply, &inputs.c.exact()))
}

/// `[rows, channels]` of one sequence; the state is the last inputs `[kernel − 1, channels]`.
fn sequence(new: &Array, taps: &Array, state: &mut Vec<Array>, rows: Range<usize>) -> Array {
    let library = new.library();
    let [width, kernel] = taps.shape()[..] else { unreachable!("taps have two axes") };
    let window =
        state.pop().unwrap_or_else(|| library.full(0.0, Element::F32, &[kernel - 1, width]));
    let all = library.concat(&[&window, new], 0);
    let tap = |index: usize| {
        let taps = taps.slice(1, index, index + 1).transpose(&[1, 0]);
        all.slice(0, index, index + rows.len()).binary(Binary::Multiply, &taps)
    };
    state.push(all.slice(0, rows.len(), rows.len() + kernel - 1));
    (1..kernel).fold(tap(0), |sum, index| sum.binary(Binary::Add, &tap(index)))
}
