//! Linear attention within the graph: a convolution, a state update and a gated norm, one kernel
//! each, for each sequence.

use std::ops::Range;

use shardpack_formats::spec;
use shardpack_mlx::{Array, LinearSizes, LinearStateUpdate, LinearStep};

use super::{Cache, Mlx, Tensor, Vector, joined};
use crate::backend::{LinearAttention, LinearAttentionInputs, LinearAttentionParams, StateUpdate};

/// What the rows of a step are told.
type Params<'a> = LinearAttentionParams<'a, Tensor, Vector>;

impl LinearAttention for Mlx {
    fn linear_attention(
        &self,
        inputs: &LinearAttentionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &Params<'_>,
    ) -> Tensor {
        assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
        let library = inputs.v.array.library();
        let each: Vec<u32> = params.v_to_k.iter().map(|head| *head as u32).collect();
        let head_keys = library.indices(&each, &[each.len()]);
        let mut outputs = Vec::new();
        let mut row = 0;
        for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
            let state = cache.state(params.layer);
            outputs.push(sequence(inputs, row..row + rows, state, params, &head_keys));
            row += rows;
        }
        let array = joined(&outputs).cast(inputs.v.array.element());
        Tensor::new(inputs.v.rows, inputs.v.width, array)
    }
}

fn sizes(params: &Params<'_>) -> LinearSizes {
    let spec::LinearAttention { key_dim, value_dim, kernel, .. } = *params.spec;
    LinearSizes {
        update: match params.update {
            StateUpdate::GatedDeltaNet { .. } => LinearStateUpdate::GatedDeltaNet,
            StateUpdate::Kda { .. } => LinearStateUpdate::KimiDeltaAttention,
            StateUpdate::Mamba2 { .. } => LinearStateUpdate::Mamba2,
        },
        key_heads: params.key_heads as i32,
        value_heads: params.v_to_k.len() as i32,
        key_dim: key_dim as i32,
        value_dim: value_dim as i32,
        kernel: kernel as i32,
    }
}

/// `[rows, value_heads · value_dim]` of one sequence. The state is the inputs of the last tokens
/// `[kernel − 1, channels]` and the memory `[value_heads, value_dim, key_dim]`.
fn sequence(
    inputs: &LinearAttentionInputs<'_, Tensor>,
    rows: Range<usize>,
    state: &mut Vec<Array>,
    params: &Params<'_>,
    head_keys: &Array,
) -> Array {
    let size = sizes(params);
    let part = |x: &Tensor| x.some_rows(rows.clone());
    let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(part);
    let weights = params.convolutions.map(|weights| -> &Array { weights });
    let biases = params.conv_biases.map(|biases| biases.map(|bias| -> &Array { bias }));
    let [mixed, window] = size.convolution([&q, &k, &v], weights, biases, state.first());
    let (beta, skip, gain): (_, Option<&Array>, Option<&Array>) = match params.update {
        StateUpdate::GatedDeltaNet { beta, norm } | StateUpdate::Kda { beta, norm } => {
            (Some(part(beta)), None, Some(&**norm))
        }
        StateUpdate::Mamba2 { skip, norm } => {
            (None, Some(&**skip), norm.map(|norm| -> &Array { norm }))
        }
    };
    let [y, memory] = size.update_state(&LinearStep {
        mixed: &mixed,
        a: &part(inputs.a),
        beta: beta.as_ref(),
        a_log: params.a_log,
        dt_bias: params.dt_bias,
        skip,
        head_keys,
        state: state.get(1),
        limit: params.spec.decay_limit.map(|limit| limit.0),
    });
    *state = vec![window, memory];
    size.gated_norm(&y, &part(inputs.z), gain, params.spec.eps.0)
}
