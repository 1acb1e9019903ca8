//! Mixtures of experts.

use serde::{Deserialize, Serialize};

use super::{Activation, is_false};
use crate::hex::HexF32;

/// A mixture of experts in place of a dense feed-forward part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: u32,
    /// Zero-computation experts after the others: they have no weights and return their input.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zero_experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// Inner width of an expert.
    #[serde(rename = "intermediate_size")]
    pub size: u32,
    /// What stands between an expert's projections.
    pub activation: Activation,
    /// In place of the activation.
    #[serde(rename = "clamped_swiglu", default, skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedSwiglu>,
    /// Whether the projections of experts have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Input and output width of the experts, where it is not that of the residual stream (latent
    /// MoE).
    #[serde(rename = "latent_size", default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<u32>,
    /// The router.
    pub router: Router,
    /// Shared expert.
    #[serde(rename = "shared_expert", default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpert>,
    /// Whether router weights multiply the experts' inputs in place of their outputs.
    #[serde(rename = "router_weights_on_input", default, skip_serializing_if = "is_false")]
    pub weighs_inputs: bool,
    /// Norm of what comes out of the block, by its module within the layer.
    #[serde(rename = "post_norm", default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Parallel dense + MoE block: a dense feed-forward part in parallel with the experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel_dense: Option<ParallelDense>,
    /// Whether it is a shortcut-connected MoE: the experts run in parallel with a dense
    /// feed-forward part on the same input, and their output is added with that of the next layer's
    /// dense part.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shortcut: bool,
    /// What its modules are called.
    #[serde(default, skip_serializing_if = "MoeNames::is_usual")]
    pub names: MoeNames,
}

impl Moe {
    /// Experts that a router chooses from.
    #[must_use]
    pub const fn choices(&self) -> u32 {
        self.experts.saturating_add(self.zero_experts)
    }
}

/// For fields that are skipped while they are zero.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// `(clamp(up, −limit, limit) + 1) · g · sigmoid(alpha · g)` with `g = min(gate, limit)`; plain
/// ones have no `+ 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClampedSwiglu {
    /// Factor within the sigmoid.
    pub alpha: HexF32,
    /// Largest gate and largest magnitude of `up`.
    pub limit: HexF32,
    /// Whether nothing is added to `up`.
    #[serde(rename = "no_offset", default, skip_serializing_if = "is_false")]
    pub plain: bool,
}

/// A parallel dense + MoE block: a dense feed-forward part in parallel with the experts. Each has
/// norms of its own, named by their modules within the layer; the experts' norm and the router read
/// the residual stream, and the sum of both goes through the layer's last norm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelDense {
    /// Norm after the dense part.
    #[serde(rename = "post_dense_norm", alias = "after_dense")]
    pub after_dense: String,
    /// Norm before the experts.
    #[serde(rename = "pre_experts_norm", alias = "before_experts")]
    pub before_experts: String,
    /// Norm after the experts.
    #[serde(rename = "post_experts_norm", alias = "after_experts")]
    pub after_experts: String,
}

/// What a router reads: a norm without a module of its own, times a factor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterInput {
    /// The tensor of the norm's gains, within the block.
    pub gain: String,
    /// Factor on the normalised vector.
    pub scale: HexF32,
}

/// The router: how experts are selected and weighed. The `top_k` experts with the largest score
/// plus correction are taken, the earlier of equal ones; they are weighed by their scores without
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Router {
    /// From logits to scores.
    #[serde(rename = "scoring")]
    pub scores: Scores,
    /// Logits become `cap · tanh(logit / cap)` before that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<HexF32>,
    /// How far from the best one a logit counts, for [`Scores::SparseMixer`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<HexF32>,
    /// Whether the logits have a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Whether there is a correction bias, which counts for the selection alone.
    #[serde(rename = "correction_bias", default, skip_serializing_if = "is_false")]
    pub correction: bool,
    /// Only experts of the best groups are taken.
    #[serde(rename = "expert_groups", default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<ExpertGroups>,
    /// Whether the weights are divided by their sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renormalise: Option<Renormalise>,
    /// Factor on the weights, after that.
    pub scale: HexF32,
    /// What it reads, if not what experts read.
    #[serde(rename = "input_norm", default, skip_serializing_if = "Option::is_none")]
    pub input: Option<RouterInput>,
    /// The tensor, within the block, of a factor for each expert's weight.
    #[serde(rename = "per_expert_scale", default, skip_serializing_if = "Option::is_none")]
    pub expert_scales: Option<String>,
}

/// From a router's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// The logits themselves; the weights are the softmax over those that were taken.
    #[serde(rename = "softmax_of_top_k")]
    SoftmaxOfTopK,
    /// Sigmoid of each.
    Sigmoid,
    /// `sqrt(ln(1 + exp(logit)))` of each.
    SqrtSoftplus,
    /// The logits themselves; the weights are the sigmoids of those that were taken.
    #[serde(rename = "sigmoid_of_top_k")]
    SigmoidOfTopK,
    /// The logits themselves. The weight of each expert that is taken is its share in the softmax
    /// over those that were not taken before it and whose distance from it, divided by the larger
    /// of its logit and their logit's magnitude, is at most twice the jitter (`PhiMoE`).
    SparseMixer,
}

/// Experts in groups of equal size, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertGroups {
    /// Groups.
    pub count: u32,
    /// Groups of which experts are taken.
    #[serde(rename = "top_k")]
    pub kept: u32,
    /// What makes a group good.
    #[serde(rename = "scoring")]
    pub by: GroupScore,
}

/// What a group of experts counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its best expert.
    #[serde(rename = "max")]
    Best,
    /// The sum of its two best experts.
    #[serde(rename = "top_2_sum")]
    BestTwo,
}

/// Weights become `weight / max(sum + added, least)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renormalise {
    /// Added to the sum.
    pub added: HexF32,
    /// Smallest divisor.
    pub least: HexF32,
}

/// A shared expert, which every token goes to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedExpert {
    /// Inner width.
    #[serde(rename = "intermediate_size")]
    pub size: u32,
    /// Whether it counts `sigmoid(gate · x)` instead of one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gated: bool,
    /// Factor on what comes out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<HexF32>,
    /// Largest gate, before the activation, and largest magnitude of `up`.
    #[serde(rename = "swiglu_limit", default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<HexF32>,
}

/// What the modules of a mixture of experts are called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoeNames {
    /// The whole within its layer.
    pub block: String,
    /// The router within the block.
    pub router: String,
    /// The tensor of the correction within the block.
    pub correction: String,
    /// The experts within the block.
    pub experts: String,
    /// The shared expert within the block.
    pub shared: String,
    /// The gate of the shared expert within the block.
    pub shared_gate: String,
}

impl Default for MoeNames {
    fn default() -> Self {
        Self {
            block: "mlp".to_owned(),
            router: "gate".to_owned(),
            correction: "gate.e_score_correction_bias".to_owned(),
            experts: "switch_mlp".to_owned(),
            shared: "shared_experts".to_owned(),
            shared_gate: "shared_expert_gate".to_owned(),
        }
    }
}

impl MoeNames {
    /// Whether all of them are the usual ones.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}
