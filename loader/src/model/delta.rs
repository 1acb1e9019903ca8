//! Linear attention by the gated delta rule: a state per head instead of a cache that grows.

use shardpack_formats::spec::Delta as DeltaSpec;

use super::{
    LoadError,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, DeltaInputs, DeltaStep};

/// One rank's part of linear attention.
pub(super) struct Delta<B: Backend> {
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
}

struct Weights<B: Backend> {
    q: B::Matrix,
    k: B::Matrix,
    v: B::Matrix,
    z: B::Matrix,
    a: B::Matrix,
    b: B::Matrix,
    /// Of queries, keys and values: `[channels, kernel]`.
    convolutions: [B::Vector; 3],
    a_log: B::Vector,
    dt_bias: B::Vector,
    gain: B::Vector,
    out: B::Matrix,
}

impl<B: Backend> Delta<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        delta: &DeltaSpec,
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let (held, full) = (&loader.shard.lin_k, delta.key_heads as usize);
        let heads = |width: u32| {
            let width = width as usize;
            Part { held: held.start * width..held.end * width, full: full * width }
        };
        let per_key = delta.value_heads / delta.key_heads;
        let (keys, values) = (heads(delta.key_dim), heads(per_key * delta.value_dim));
        let each = heads(per_key);
        let hidden = loader.hidden();
        let gain = Part::whole(delta.value_dim as usize);
        let gain = loader.vector(&format!("{prefix}.norm.weight"), &gain)?;
        if held.is_empty() {
            return Ok(Self { weights: None });
        }
        let matrix = |name: &str, outputs: &Part, inputs: &Part| {
            let matrix = loader.matrix(&format!("{prefix}.{name}"), outputs, inputs)?;
            Ok::<_, LoadError>(matrix.expect("this rank has heads"))
        };
        let exact = |name: &str, outputs: &Part| {
            loader.plain_matrix(&format!("{prefix}.{name}"), outputs, &hidden)
        };
        let kernel = Part::whole(delta.kernel as usize);
        let convolution = |name: &str, channels: &Part| {
            loader.stacked_vector(&format!("{prefix}.{name}.weight"), channels, &kernel)
        };
        Ok(Self {
            weights: Some(Weights {
                q: matrix("in_proj_q", &keys, &hidden)?,
                k: matrix("in_proj_k", &keys, &hidden)?,
                v: matrix("in_proj_v", &values, &hidden)?,
                z: matrix("in_proj_z", &values, &hidden)?,
                a: exact("in_proj_a", &each)?,
                b: exact("in_proj_b", &each)?,
                convolutions: [
                    convolution("conv1d_q", &keys)?,
                    convolution("conv1d_k", &keys)?,
                    convolution("conv1d_v", &values)?,
                ],
                a_log: loader.vector(&format!("{prefix}.A_log"), &each)?,
                dt_bias: loader.vector(&format!("{prefix}.dt_bias"), &each)?,
                gain,
                out: matrix("out_proj", &hidden, &values)?,
            }),
        })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (layer, delta): (usize, &DeltaSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref()?;
        let backend = step.backend;
        let project = |matrix| backend.linear(x, matrix);
        let [q, k, v] = [&weights.q, &weights.k, &weights.v].map(project);
        let [z, a, b] = [&weights.z, &weights.a, &weights.b].map(project);
        let inputs = DeltaInputs { q: &q, k: &k, v: &v, z: &z, a: &a, b: &b };
        let at = DeltaStep {
            layer: step.cached(layer),
            lengths: &step.batch.lengths,
            drafts: &step.batch.drafts,
            key_heads: step.shard.lin_k.len(),
            values_per_key: (delta.value_heads / delta.key_heads) as usize,
            delta,
            convolutions: weights.convolutions.each_ref(),
            a_log: &weights.a_log,
            dt_bias: &weights.dt_bias,
            gain: &weights.gain,
        };
        let heads = backend.gated_delta(&inputs, caches, &at);
        Some(backend.linear(&heads, &weights.out))
    }
}
