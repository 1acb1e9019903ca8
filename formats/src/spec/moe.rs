//! Mixtures of experts.

use serde::{Deserialize, Serialize};

use super::{Activation, is_false};
use crate::hex::HexF32;

/// A mixture of experts in place of a dense feed-forward part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: u32,
    /// Experts that a token goes to.
    pub top_k: u32,
    /// Inner width of an expert.
    pub size: u32,
    /// What stands between an expert's projections.
    pub activation: Activation,
    /// In place of the activation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamped: Option<ClampedSwiglu>,
    /// Whether the projections of experts have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// What chooses experts.
    pub router: Router,
    /// An expert that every token goes to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedExpert>,
    /// What its modules are called.
    #[serde(default, skip_serializing_if = "MoeNames::is_usual")]
    pub names: MoeNames,
}

/// `(clamp(up, −limit, limit) + 1) · g · sigmoid(alpha · g)` with `g = min(gate, limit)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClampedSwiglu {
    /// Factor within the sigmoid.
    pub alpha: HexF32,
    /// Largest gate and largest magnitude of `up`.
    pub limit: HexF32,
}

/// How experts are chosen and weighed. The `top_k` experts with the largest score plus correction
/// are taken, the earlier of equal ones; they are weighed by their scores without it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Router {
    /// From logits to scores.
    pub scores: Scores,
    /// Whether the logits have a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Whether there is a correction, which counts for the choice alone.
    #[serde(default, skip_serializing_if = "is_false")]
    pub correction: bool,
    /// Only experts of the best groups are taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<ExpertGroups>,
    /// Whether the weights are divided by their sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renormalise: Option<Renormalise>,
    /// Factor on the weights, after that.
    pub scale: HexF32,
}

/// From a router's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// The logits themselves; the weights are the softmax over those that were taken.
    SoftmaxOfTaken,
    /// Sigmoid of each.
    Sigmoid,
}

/// Experts in groups of equal size, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertGroups {
    /// Groups.
    pub count: u32,
    /// Groups of which experts are taken.
    pub kept: u32,
    /// What makes a group good.
    pub by: GroupScore,
}

/// What a group of experts counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its best expert.
    Best,
    /// The sum of its two best experts.
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

/// An expert that every token goes to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedExpert {
    /// Inner width.
    pub size: u32,
    /// Whether it counts `sigmoid(gate · x)` instead of one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gated: bool,
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
