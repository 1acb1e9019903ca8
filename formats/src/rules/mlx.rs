//! What mlx-lm changes in the values of a family's checkpoints when it converts them. Names and
//! shapes are those of other forms of the tensors; values do not say by themselves that they were
//! changed.

use serde::Deserialize;

use crate::expr::Expr;

/// How copies of mlx-lm are known, and what is to be taken back in them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MlxRules {
    /// Convolutions: `[channels, kernel, 1]` in a copy, `[channels, 1, kernel]` as published.
    #[serde(default)]
    pub(crate) convolutions: Vec<String>,
    /// Names by which mlx-lm itself knows values that it has not changed.
    #[serde(default)]
    pub(crate) published: Vec<String>,
    /// Tensors under names that a copy has, and the program's own packages.
    #[serde(default)]
    pub(crate) names: Vec<String>,
    pub(crate) values: Vec<MlxValueRule>,
}

/// Tensors whose values are other ones in a copy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MlxValueRule {
    /// `*` stands for any characters; the first rule that matches counts.
    pub(crate) patterns: Vec<String>,
    /// What is added there.
    pub(crate) added: Option<f64>,
    /// What rows are multiplied by there.
    #[serde(default)]
    pub(crate) multiplied: Vec<Expr>,
    /// Rows of each factor, where there is more than one.
    #[serde(default)]
    pub(crate) rows: Vec<Expr>,
}

impl MlxRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        self.values.iter().flat_map(|rule| rule.multiplied.iter().chain(&rule.rows))
    }
}
