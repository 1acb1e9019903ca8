//! Which rank holds which part of which axis.

use std::{collections::BTreeMap, ops::Range};

use serde::{Deserialize, Serialize};

/// A half-open range of an axis's units.
pub type UnitRange = [u64; 2];

/// How a model is cut over the ranks; the same in every package of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Number of ranks.
    pub ranks: u32,
    /// Per axis (`q`, `kv`, `ffn`, `vocab`, …) one range of units per rank, in rank order. The
    /// ranges of `kv` may overlap: a key-value head is stored on every rank that needs it.
    pub axes: BTreeMap<String, Axis>,
    /// For every query head of the model, the key-value head that it reads.
    pub q_to_kv: Vec<u32>,
    /// Whether the embedding is cut by vocabulary (else every rank holds it whole).
    pub embedding_cut: bool,
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

/// Which part of an uncut tensor a package holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// All of it, on every rank.
    Replicated,
    /// All of it, on rank 0 alone; the bias of a row-cut matrix is added once.
    Once,
    /// Elements `start..end` of dimension `dim`, which has `full` elements in the uncut tensor.
    /// Counted in stored elements: words of a packed dimension, groups of scales.
    Range {
        /// The axis that decides the range.
        axis: String,
        /// The dimension that is cut.
        dim: u32,
        /// First element.
        start: u64,
        /// One past the last element.
        end: u64,
        /// Elements of the uncut dimension.
        full: u64,
    },
}
