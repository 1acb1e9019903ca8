//! Which rank holds which part of which axis.

mod stage;

use std::{collections::BTreeMap, ops::Range};

use serde::{Deserialize, Serialize};

pub use stage::{STAGES_FEATURE, Stage, Stages};

/// A half-open range of an axis's units.
pub type UnitRange = [u64; 2];

/// How a model is sharded over the ranks; the same in every package of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Number of ranks.
    pub ranks: u32,
    /// Which layers run where; without stages every rank runs all layers.
    #[serde(default, skip_serializing_if = "Stages::is_empty")]
    pub stages: Stages,
    /// Per axis (`q`, `kv`, `ffn`, `vocab`, …) one range of units per rank, in rank order; those
    /// of a stage's ranks cover the axis. The ranges of `kv` may overlap: a key-value head is
    /// stored on every rank that needs it.
    pub axes: BTreeMap<String, Axis>,
    /// For every query head of the model, the key-value head that it reads.
    pub q_to_kv: Vec<u32>,
    /// Whether the embedding is sharded by vocabulary (else every rank holds it whole).
    pub embedding_sharded: bool,
}

impl Layout {
    /// The index of the stage that `rank` is part of.
    #[must_use]
    pub fn stage_of(&self, rank: u32) -> usize {
        self.stages.of_rank(rank).unwrap_or(0)
    }

    /// The ranks of a stage: all, without stages.
    #[must_use]
    pub fn stage_ranks(&self, stage: usize) -> Range<u32> {
        self.stages.get(stage).map_or(0..self.ranks, Stage::rank_range)
    }

    /// Number of stages; 1 where every rank runs all layers.
    #[must_use]
    pub fn stage_count(&self) -> usize {
        self.stages.len().max(1)
    }

    /// The layout of one stage by itself: its ranks, counted from 0, with what they hold of each of
    /// its layers.
    #[must_use]
    pub fn of_stage(&self, stage: usize) -> Self {
        let ranks = self.stage_ranks(stage);
        let within = |axis: &Axis| {
            let ranges = axis.ranges[ranks.start as usize..ranks.end as usize].to_vec();
            Axis { ranges, size: axis.size, unit: axis.unit }
        };
        Self {
            ranks: ranks.len() as u32,
            stages: Stages::default(),
            axes: self.axes.iter().map(|(name, axis)| (name.clone(), within(axis))).collect(),
            q_to_kv: self.q_to_kv.clone(),
            embedding_sharded: self.embedding_sharded,
        }
    }

    /// The stages that hold a tensor of `layer`.
    #[must_use]
    pub fn stages_of_layer(&self, layer: u32) -> Range<usize> {
        self.stages.of_layer(layer).map_or(0..1, |stage| stage..stage + 1)
    }
}

/// One axis and its ranges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// Units of the whole axis (heads, features, tokens).
    pub size: u64,
    /// Rows or columns of a matrix per unit (head width; 1 elsewhere).
    pub unit: u64,
    /// One `[start, end]` of units per rank; `start == end` for a rank that holds nothing.
    pub ranges: Vec<UnitRange>,
}

impl Axis {
    /// The units of `rank`.
    #[must_use]
    pub fn units(&self, rank: u32) -> Range<u64> {
        let [start, end] = self.ranges[rank as usize];
        start..end
    }
}

/// Which part of a whole tensor a package holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorShard {
    /// All of it, on every rank of the stages that have it.
    Replicated,
    /// All of it, on its stage's first rank only; the bias of a row-sharded matrix is added once.
    Once,
    /// Elements `start..end` of dimension `dim`, which has `full` elements in the whole tensor.
    /// Counted in stored elements: u32 elements of a packed dimension, groups of scales.
    Range {
        /// The axis that decides the range.
        axis: String,
        /// The dimension that is sharded.
        dim: u32,
        /// First element.
        start: u64,
        /// One past the last element.
        end: u64,
        /// Elements of the whole dimension.
        full: u64,
    },
}
