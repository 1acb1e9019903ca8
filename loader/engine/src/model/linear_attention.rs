//! Linear attention: a state per head in place of keys and values.
//!
//! ```text
//! q, k = silu(conv(x · Wq)), silu(conv(x · Wk))    [tokens, key_heads, key_dim]
//! v = silu(conv(x · Wv))                           [tokens, value_heads, value_dim]
//! S ← update(S, k, v), out = Sᵀ · q                S: [value_heads, key_dim, value_dim]
//! y = norm and gate by z (out) · Wo                [tokens, hidden_size]
//! ```
//!
//! How the state moves on is one of [`gated_delta_net`](super::gated_delta_net),
//! [`kda`](super::kda) and [`mamba2`](super::mamba2). Heads are sharded over ranks.

use shardpack_formats::spec::{self, LinearAttentionKind};

use super::{
    LoadError,
    gated_delta_net::GatedDeltaNet,
    group_norm::GroupNorm,
    kda::Kda,
    load::{LayerInfo, Loader, TensorSlice},
    mamba2::Mamba2,
    shard::LinearHeads,
    step::ForwardPass,
};
use crate::backend::{
    Backend, LinearAttentionInputs, LinearAttentionParams, StateUpdate, StepError,
};

/// One rank's part of linear attention.
pub(super) struct LinearAttention<B: Backend> {
    form: spec::LinearAttention,
    heads: LinearHeads,
    /// The layer in the caches.
    state_slot: usize,
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
    /// The norm of a result of which ranks share groups (Mamba-2); every rank takes part in it.
    group_norm: Option<GroupNorm<B>>,
}

struct Weights<B: Backend> {
    q: B::Matrix,
    k: B::Matrix,
    v: B::Matrix,
    /// Of queries, keys and values: `[channels, kernel]`.
    convolutions: [B::Vector; 3],
    conv_biases: Option<[B::Vector; 3]>,
    a_log: B::Vector,
    dt_bias: B::Vector,
    rule: Rule<B>,
    out: B::Matrix,
}

/// How the state moves on.
enum Rule<B: Backend> {
    GatedDeltaNet(GatedDeltaNet<B>),
    Kda(Kda<B>),
    Mamba2(Mamba2<B>),
}

/// What this rank holds of a layer's projections.
pub(super) struct LinearSlices {
    /// Rows of queries and keys.
    pub(super) keys: TensorSlice,
    /// Rows of values.
    pub(super) values: TensorSlice,
    /// One row for each value head.
    pub(super) per_value_head: TensorSlice,
    pub(super) hidden: TensorSlice,
}

impl LinearSlices {
    fn new(form: &spec::LinearAttention, held: &LinearHeads, hidden: TensorSlice) -> Self {
        Self {
            keys: TensorSlice::heads(&held.keys, form.key_heads, form.key_dim),
            values: TensorSlice::heads(&held.values, form.value_heads, form.value_dim),
            per_value_head: TensorSlice::heads(&held.values, form.value_heads, 1),
            hidden,
        }
    }

    /// Whether this rank holds heads.
    pub(super) fn has_heads(&self) -> bool {
        !self.values.held.is_empty()
    }
}

impl<B: Backend> LinearAttention<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::LinearAttention,
    ) -> Result<Self, LoadError> {
        let (heads, module) = (&loader.shard.linear, layer.name("linear_attn"));
        let slices = LinearSlices::new(form, heads, loader.hidden());
        let (rule, group_norm) = match form.kind {
            LinearAttentionKind::GatedDeltaNet => {
                let rule = GatedDeltaNet::load(loader, &slices, form, &module)?;
                (rule.map(Rule::GatedDeltaNet), None)
            }
            LinearAttentionKind::KimiDeltaAttention => {
                (Kda::load(loader, &slices, form, &module)?.map(Rule::Kda), None)
            }
            LinearAttentionKind::Mamba2 => {
                let norm = Mamba2::load_norm(loader, &slices, form, &module)?;
                let rule = Mamba2::load(loader, &slices, form, norm.gain, &module)?;
                (rule.map(Rule::Mamba2), norm.over_ranks)
            }
        };
        let weights = rule.map(|rule| Weights::load(loader, &slices, form, &module, rule));
        Ok(Self {
            form: form.clone(),
            heads: heads.clone(),
            state_slot: layer.slots.state,
            weights: weights.transpose()?,
            group_norm,
        })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<Option<B::Tensor>, StepError> {
        let heads = self.weights.as_ref().map(|weights| self.attend(pass, weights, x, caches));
        let heads = match &self.group_norm {
            Some(norm) => norm.apply(pass, heads)?,
            None => heads,
        };
        let (Some(weights), Some(heads)) = (&self.weights, heads) else { return Ok(None) };
        let out = pass.backend.linear(&heads, &weights.out);
        Ok(Some(match self.form.multipliers {
            Some(factors) => pass.backend.scale(out, factors.out.0),
            None => out,
        }))
    }

    /// The result of the heads held here, `[tokens, value_heads · value_dim]`.
    fn attend(
        &self,
        pass: &ForwardPass<'_, B>,
        weights: &Weights<B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Tensor {
        let backend = pass.backend;
        let [q, k, v] = [&weights.q, &weights.k, &weights.v].map(|it| backend.linear(x, it));
        let Gates { a, z } = match &weights.rule {
            Rule::GatedDeltaNet(rule) => rule.gates(backend, x),
            Rule::Kda(rule) => rule.gates(backend, x),
            Rule::Mamba2(rule) => rule.gates(backend, x),
        };
        let [q, k, v, z, a] = match self.form.multipliers {
            None => [q, k, v, z, a],
            Some(by) => [(q, by.q), (k, by.k), (v, by.v), (z, by.z), (a, by.a)]
                .map(|(x, factor)| backend.scale(x, factor.0)),
        };
        let beta;
        let update = match &weights.rule {
            Rule::GatedDeltaNet(rule) => {
                beta = rule.beta(backend, x);
                StateUpdate::GatedDeltaNet { beta: &beta, norm: rule.norm() }
            }
            Rule::Kda(rule) => {
                beta = rule.beta(backend, x);
                StateUpdate::Kda { beta: &beta, norm: rule.norm() }
            }
            Rule::Mamba2(rule) => StateUpdate::Mamba2 { skip: rule.skip(), norm: rule.norm() },
        };
        let params = LinearAttentionParams {
            layer: self.state_slot,
            lengths: &pass.batch.lengths,
            drafts: &pass.batch.drafts,
            key_heads: self.heads.keys.len(),
            v_to_k: &self.heads.v_to_k,
            spec: &self.form,
            convolutions: weights.convolutions.each_ref(),
            conv_biases: weights.conv_biases.as_ref().map(<[_; 3]>::each_ref),
            a_log: &weights.a_log,
            dt_bias: &weights.dt_bias,
            update,
        };
        let inputs = LinearAttentionInputs { q: &q, k: &k, v: &v, z: &z, a: &a };
        backend.linear_attention(&inputs, caches, &params)
    }
}

/// What decides on the decay of the state, and the output gate.
pub(super) struct Gates<T> {
    /// Decay, `[tokens, value_heads]`; as wide as the keys in KDA.
    pub(super) a: T,
    /// Output gate `[tokens, value_heads, value_dim]`.
    pub(super) z: T,
}

impl<B: Backend> Weights<B> {
    /// On a rank with heads.
    fn load(
        loader: &Loader<'_, B>,
        slices: &LinearSlices,
        form: &spec::LinearAttention,
        module: &str,
        rule: Rule<B>,
    ) -> Result<Self, LoadError> {
        let LinearSlices { keys, values, per_value_head, hidden } = slices;
        let matrix = |name: &str, outputs: &TensorSlice, inputs: &TensorSlice| {
            loader.held_matrix(&format!("{module}.{name}"), outputs, inputs)
        };
        let kernel = TensorSlice::whole(form.kernel as usize);
        let convolution = |name: &str, channels: &TensorSlice| {
            loader.stacked_vector(&format!("{module}.{name}.weight"), channels, &kernel)
        };
        let bias = |name: &str, channels: &TensorSlice| {
            loader.vector(&format!("{module}.{name}.bias"), channels)
        };
        let conv_biases = || {
            let [q, k, v] = ["conv1d_q", "conv1d_k", "conv1d_v"];
            Ok::<_, LoadError>([bias(q, keys)?, bias(k, keys)?, bias(v, values)?])
        };
        let decayed = if form.kind == LinearAttentionKind::KimiDeltaAttention {
            keys
        } else {
            per_value_head
        };
        Ok(Self {
            q: matrix("in_proj_q", keys, hidden)?,
            k: matrix("in_proj_k", keys, hidden)?,
            v: matrix("in_proj_v", values, hidden)?,
            convolutions: [
                convolution("conv1d_q", keys)?,
                convolution("conv1d_k", keys)?,
                convolution("conv1d_v", values)?,
            ],
            conv_biases: form.conv_bias.then(conv_biases).transpose()?,
            a_log: loader.vector(&format!("{module}.A_log"), per_value_head)?,
            dt_bias: loader.vector(&format!("{module}.dt_bias"), decayed)?,
            rule,
            out: matrix("out_proj", hidden, values)?,
        })
    }
}
