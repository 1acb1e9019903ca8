//! Expressions for the parts of [`crate::Spec`] that only some models have.

use serde::Deserialize;

use crate::{
    expr::Expr,
    spec::{LinearAttentionKind, ParallelDense},
};

/// See [`crate::spec::Moe`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MoeRules {
    pub(crate) experts: Expr,
    /// Experts that give what they read; zero and absent for none.
    pub(crate) identities: Option<Expr>,
    pub(crate) top_k: Expr,
    pub(crate) size: Expr,
    /// Width of what experts read; null and absent for the residual stream's.
    pub(crate) latent: Option<Expr>,
    /// Absent: no.
    pub(crate) bias: Option<Expr>,
    /// Alpha and limit of a clamped activation; null and absent for none.
    pub(crate) clamped_alpha: Option<Expr>,
    pub(crate) clamped_limit: Option<Expr>,
    /// Whether a clamped activation has no offset.
    #[serde(default)]
    pub(crate) clamped_plain: bool,
    pub(crate) router: RouterRules,
    /// Inner width of the shared expert; null, zero and absent for none.
    pub(crate) shared_size: Option<Expr>,
    /// Absent: no.
    pub(crate) shared_gated: Option<Expr>,
    /// Factor on the shared expert; null and absent for none.
    pub(crate) shared_scale: Option<Expr>,
    /// Limit of the shared expert's inner values; null and absent for none.
    pub(crate) shared_limit: Option<Expr>,
    /// Whether weights count for inputs; absent: no.
    pub(crate) weighs_inputs: Option<Expr>,
    /// Norm of what comes out of the block, by its module within the layer.
    pub(crate) after: Option<String>,
    /// A dense part beside the experts.
    pub(crate) beside: Option<ParallelDense>,
    /// Whether what experts give is added a layer later.
    #[serde(default)]
    pub(crate) deferred: bool,
    #[serde(default)]
    pub(crate) names: MoeNameRules,
}

/// See [`crate::spec::Router`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RouterRules {
    /// `'softmax'`, `'softmax_of_taken'`, `'sigmoid'`, `'sqrt_softplus'`, `'sigmoid_of_taken'` or
    /// `'sparse_mixer'`.
    pub(crate) scores: Expr,
    /// Absent: no.
    pub(crate) bias: Option<Expr>,
    /// Cap of logits; null and absent for none.
    pub(crate) softcap: Option<Expr>,
    /// Of a sparse mixer; null and absent for none.
    pub(crate) jitter: Option<Expr>,
    /// Absent: no.
    pub(crate) correction: Option<Expr>,
    /// One and absent for none.
    pub(crate) groups: Option<Expr>,
    pub(crate) groups_kept: Option<Expr>,
    /// `'best'` or `'best_two'`.
    pub(crate) groups_by: Option<Expr>,
    pub(crate) renormalise: Expr,
    /// Absent: 0.
    pub(crate) added: Option<Expr>,
    /// Absent: 0.
    pub(crate) least: Option<Expr>,
    /// Absent: 1.
    pub(crate) scale: Option<Expr>,
    pub(crate) input: Option<RouterInputRules>,
    /// The tensor of each expert's factor, within the block.
    pub(crate) expert_scales: Option<String>,
}

/// See [`crate::spec::RouterInput`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RouterInputRules {
    pub(crate) gain: String,
    pub(crate) scale: Expr,
}

/// See [`crate::spec::MoeNames`]; absent ones are the usual ones.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MoeNameRules {
    pub(crate) block: Option<Expr>,
    pub(crate) router: Option<Expr>,
    pub(crate) correction: Option<Expr>,
    pub(crate) experts: Option<Expr>,
    pub(crate) shared: Option<Expr>,
    pub(crate) shared_gate: Option<Expr>,
}

/// See [`crate::spec::Mla`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MlaRules {
    /// Null for none.
    pub(crate) q_rank: Expr,
    pub(crate) kv_rank: Expr,
    pub(crate) nope: Expr,
    pub(crate) rope: Expr,
    pub(crate) value: Expr,
    pub(crate) eps: Expr,
    /// Absent: no.
    pub(crate) bias: Option<Expr>,
    /// Factor on the latent of keys and values; null and absent for none.
    pub(crate) kv_scale: Option<Expr>,
    pub(crate) index: Option<IndexerRules>,
}

/// See [`crate::spec::Indexer`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IndexerRules {
    /// Null for no index.
    pub(crate) heads: Expr,
    pub(crate) width: Expr,
    pub(crate) top_k: Expr,
    /// `'half'` or `'interleaved'`.
    pub(crate) style: Expr,
    pub(crate) eps: Expr,
    #[serde(default)]
    pub(crate) rotated_last: bool,
}

/// See [`crate::spec::CompressedAttention`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompressedAttentionRules {
    pub(crate) q_rank: Expr,
    pub(crate) rope: Expr,
    pub(crate) eps: Expr,
    pub(crate) groups: Expr,
    pub(crate) group_rank: Expr,
    /// Read where a layer has sparse compressed KV entries.
    pub(crate) index: Option<IndexerRules>,
}

/// See [`crate::spec::HyperConnections`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HyperConnectionRules {
    pub(crate) count: Expr,
    pub(crate) magnitude: Expr,
    pub(crate) eps: Expr,
    /// Null and absent where streams are not mixed.
    pub(crate) mixed: Option<Expr>,
}

/// See [`crate::spec::LinearAttention`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinearAttentionRules {
    pub(crate) key_heads: Expr,
    pub(crate) value_heads: Expr,
    pub(crate) key_dim: Expr,
    pub(crate) value_dim: Expr,
    pub(crate) kernel: Expr,
    pub(crate) eps: Expr,
    #[serde(default)]
    pub(crate) rule: LinearAttentionKind,
    /// Absent: no.
    pub(crate) conv_bias: Option<Expr>,
    /// Whether results are normalised; absent: yes.
    pub(crate) normed: Option<Expr>,
    pub(crate) factors: Option<MultiplierRules>,
    /// Whether the gates of Kimi delta attention are full-rank; absent: no.
    pub(crate) direct: Option<Expr>,
    /// Bound of the decay of Kimi delta attention; null and absent for none.
    pub(crate) fade_limit: Option<Expr>,
}

/// See [`crate::spec::LinearAttentionMultipliers`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MultiplierRules {
    pub(crate) q: Expr,
    pub(crate) k: Expr,
    pub(crate) v: Expr,
    pub(crate) z: Expr,
    pub(crate) a: Expr,
    pub(crate) out: Expr,
}

/// See [`crate::spec::ShortConvolution`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShortConvolutionRules {
    pub(crate) kernel: Expr,
}

impl MoeRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let (router, names) = (&self.router, &self.names);
        [&self.experts, &self.top_k, &self.size, &router.scores, &router.renormalise]
            .into_iter()
            .chain(router.input.iter().map(|input| &input.scale))
            .chain(
                [
                    &self.identities,
                    &self.latent,
                    &self.bias,
                    &self.clamped_alpha,
                    &self.clamped_limit,
                    &self.shared_size,
                    &self.shared_gated,
                    &self.shared_scale,
                    &self.shared_limit,
                    &self.weighs_inputs,
                    &router.softcap,
                    &router.jitter,
                    &router.bias,
                    &router.correction,
                    &router.groups,
                    &router.groups_kept,
                    &router.groups_by,
                    &router.added,
                    &router.least,
                    &router.scale,
                    &names.block,
                    &names.router,
                    &names.correction,
                    &names.experts,
                    &names.shared,
                    &names.shared_gate,
                ]
                .into_iter()
                .flatten(),
            )
    }
}

impl MlaRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [&self.q_rank, &self.kv_rank, &self.nope, &self.rope, &self.value, &self.eps]
            .into_iter()
            .chain([&self.bias, &self.kv_scale].into_iter().flatten())
            .chain(self.index.iter().flat_map(IndexerRules::expressions))
    }
}

impl IndexerRules {
    fn expressions(&self) -> [&Expr; 5] {
        [&self.heads, &self.width, &self.top_k, &self.style, &self.eps]
    }
}

impl CompressedAttentionRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [&self.q_rank, &self.rope, &self.eps, &self.groups, &self.group_rank]
            .into_iter()
            .chain(self.index.iter().flat_map(IndexerRules::expressions))
    }
}

impl HyperConnectionRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [&self.count, &self.magnitude, &self.eps].into_iter().chain(&self.mixed)
    }
}

impl LinearAttentionRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [
            &self.key_heads,
            &self.value_heads,
            &self.key_dim,
            &self.value_dim,
            &self.kernel,
            &self.eps,
        ]
        .into_iter()
        .chain(&self.conv_bias)
        .chain([&self.normed, &self.direct, &self.fade_limit].into_iter().flatten())
        .chain(self.factors.iter().flat_map(|it| [&it.q, &it.k, &it.v, &it.z, &it.a, &it.out]))
    }
}
