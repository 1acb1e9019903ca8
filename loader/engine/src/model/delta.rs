//! Linear attention: a state per head instead of a cache that grows.

use shardpack_formats::spec::{Delta as DeltaSpec, StateRule};

use super::{
    LoadError,
    group_norm::GroupNorm,
    load::{Loader, Part},
    shard::Linear,
    step::Step,
};
use crate::backend::{Backend, DeltaInputs, DeltaStep, StepError};

/// One rank's part of linear attention.
pub(super) struct Delta<B: Backend> {
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
    /// Where ranks share what is normalised.
    norm: Option<GroupNorm<B>>,
}

struct Weights<B: Backend> {
    q: B::Matrix,
    k: B::Matrix,
    v: B::Matrix,
    z: B::Matrix,
    a: B::Matrix,
    /// By Kimi's rule, what `a` and `z` are made of, unless they are projected at once.
    latents: Option<[B::Matrix; 2]>,
    /// Absent by Mamba 2's rule.
    b: Option<B::Matrix>,
    /// Of queries, keys and values: `[channels, kernel]`.
    convolutions: [B::Vector; 3],
    conv_biases: Option<[B::Vector; 3]>,
    /// By Mamba 2's rule.
    skip: Option<B::Vector>,
    a_log: B::Vector,
    dt_bias: B::Vector,
    /// Absent where heads are not normalised, or their group is on several ranks.
    gain: Option<B::Vector>,
    out: B::Matrix,
}

impl<B: Backend> Delta<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        delta: &DeltaSpec,
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let held = &loader.shard.linear;
        let keys = Part::heads(&held.keys, delta.key_heads, delta.key_dim);
        let values = Part::heads(&held.values, delta.value_heads, delta.value_dim);
        let each = Part::heads(&held.values, delta.value_heads, 1);
        let hidden = loader.hidden();
        let is_mamba = delta.rule == StateRule::Mamba2;
        let (gain, norm) = gains(loader, (delta, held), &values, &format!("{prefix}.norm.weight"))?;
        let latents = latents(loader, delta, prefix)?;
        if held.values.is_empty() {
            return Ok(Self { weights: None, norm });
        }
        let matrix = |name: &str, outputs: &Part, inputs: &Part| {
            let matrix = loader.matrix(&format!("{prefix}.{name}"), outputs, inputs)?;
            Ok::<_, LoadError>(matrix.expect("this rank has heads"))
        };
        let exact = |name: &str, outputs: &Part, inputs: &Part| {
            loader.plain_matrix(&format!("{prefix}.{name}"), outputs, inputs)
        };
        let fading = if delta.rule == StateRule::KimiDelta { &keys } else { &each };
        let latent = |width: u32| match &latents {
            Some(_) => Part::whole(width as usize),
            None => hidden.clone(),
        };
        let a_inputs = latent(delta.key_dim);
        let kernel = Part::whole(delta.kernel as usize);
        let convolution = |name: &str, channels: &Part| {
            loader.stacked_vector(&format!("{prefix}.{name}.weight"), channels, &kernel)
        };
        let conv_biases = || {
            let bias = |name: &str, channels: &Part| {
                loader.vector(&format!("{prefix}.{name}.bias"), channels)
            };
            Ok::<_, LoadError>([
                bias("conv1d_q", &keys)?,
                bias("conv1d_k", &keys)?,
                bias("conv1d_v", &values)?,
            ])
        };
        Ok(Self {
            norm,
            weights: Some(Weights {
                q: matrix("in_proj_q", &keys, &hidden)?,
                k: matrix("in_proj_k", &keys, &hidden)?,
                v: matrix("in_proj_v", &values, &hidden)?,
                z: matrix("in_proj_z", &values, &latent(delta.value_dim))?,
                a: if delta.direct {
                    matrix("in_proj_a", fading, &a_inputs)?
                } else {
                    exact("in_proj_a", fading, &a_inputs)?
                },
                latents,
                b: if is_mamba { None } else { Some(exact("in_proj_b", &each, &hidden)?) },
                conv_biases: if delta.conv_bias { Some(conv_biases()?) } else { None },
                skip: is_mamba.then(|| loader.vector(&format!("{prefix}.D"), &each)).transpose()?,
                convolutions: [
                    convolution("conv1d_q", &keys)?,
                    convolution("conv1d_k", &keys)?,
                    convolution("conv1d_v", &values)?,
                ],
                a_log: loader.vector(&format!("{prefix}.A_log"), &each)?,
                dt_bias: loader.vector(&format!("{prefix}.dt_bias"), fading)?,
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
    ) -> Result<Option<B::Tensor>, StepError> {
        let heads =
            self.weights.as_ref().map(|weights| weights.heads(step, (layer, delta), x, caches));
        let heads = match &self.norm {
            Some(norm) => norm.apply(step, heads)?,
            None => heads,
        };
        let (Some(weights), Some(heads)) = (&self.weights, heads) else { return Ok(None) };
        let out = step.backend.linear(&heads, &weights.out);
        Ok(Some(match delta.factors {
            Some(factors) => step.backend.scale(out, factors.out.0),
            None => out,
        }))
    }
}

/// By Kimi's rule, what `a` and `z` are made of, which every rank holds whole; none where they are
/// projected at once.
fn latents<B: Backend>(
    loader: &Loader<'_, B>,
    delta: &DeltaSpec,
    prefix: &str,
) -> Result<Option<[B::Matrix; 2]>, LoadError> {
    if delta.rule != StateRule::KimiDelta || delta.direct {
        return Ok(None);
    }
    let [key, value] = [delta.key_dim, delta.value_dim].map(|width| Part::whole(width as usize));
    let a = loader.plain_matrix(&format!("{prefix}.a_latent"), &key, &loader.hidden())?;
    let z = loader.matrix(&format!("{prefix}.z_latent"), &value, &loader.hidden())?;
    Ok(Some([a, z.expect("it is held whole")]))
}

/// The gains of heads, or a norm over what ranks share.
type Gains<B> = (Option<<B as Backend>::Vector>, Option<GroupNorm<B>>);

fn gains<B: Backend>(
    loader: &Loader<'_, B>,
    (delta, held): (&DeltaSpec, &Linear),
    values: &Part,
    name: &str,
) -> Result<Gains<B>, LoadError> {
    if delta.unnormed {
        return Ok((None, None));
    }
    if delta.rule != StateRule::Mamba2 {
        // One gain for every head, which is held whole.
        let gain = loader.vector(name, &Part::whole(delta.value_dim as usize))?;
        return Ok((Some(gain), None));
    }
    // A gain for every element is cut as they are.
    let own = || loader.vector(name, values);
    let gain = if held.values.is_empty() { None } else { Some(own()?) };
    if !held.by_values {
        return Ok((gain, None));
    }
    let groups = delta.key_heads as usize;
    let norm = GroupNorm::new(gain, [groups, values.full / groups], delta.eps, values.held.clone());
    Ok((None, Some(norm)))
}

impl<B: Backend> Weights<B> {
    /// What the heads held here give.
    fn heads(
        &self,
        step: &Step<'_, B>,
        (layer, delta): (usize, &DeltaSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Tensor {
        let (weights, backend) = (self, step.backend);
        let project = |matrix| backend.linear(x, matrix);
        let [q, k, v] = [&weights.q, &weights.k, &weights.v].map(project);
        let [a, z] = match &weights.latents {
            None => [&weights.a, &weights.z].map(project),
            Some([a, z]) => [(a, &weights.a), (z, &weights.z)]
                .map(|(latent, matrix)| backend.linear(&project(latent), matrix)),
        };
        let [q, k, v, z, a] = match delta.factors {
            None => [q, k, v, z, a],
            Some(by) => [(q, by.q), (k, by.k), (v, by.v), (z, by.z), (a, by.a)]
                .map(|(x, factor)| backend.scale(x, factor.0)),
        };
        let b = weights.b.as_ref().map(project);
        let inputs = DeltaInputs { q: &q, k: &k, v: &v, z: &z, a: &a, b: b.as_ref().unwrap_or(&a) };
        let at = DeltaStep {
            layer: step.state(layer),
            lengths: &step.batch.lengths,
            drafts: &step.batch.drafts,
            key_heads: step.shard.linear.keys.len(),
            v_to_k: &step.shard.linear.v_to_k,
            delta,
            convolutions: weights.convolutions.each_ref(),
            a_log: &weights.a_log,
            dt_bias: &weights.dt_bias,
            gain: weights.gain.as_ref(),
            conv_biases: weights.conv_biases.as_ref().map(<[_; 3]>::each_ref),
            skip: weights.skip.as_ref(),
        };
        backend.gated_delta(&inputs, caches, &at)
    }
}
