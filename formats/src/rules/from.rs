//! Where a tensor comes from when it is not a source tensor of its own name.

use serde::{Deserialize, Deserializer, de};

use super::name::NamePattern;
use crate::expr::Expr;

/// One way in which checkpoints store a tensor.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FromRule {
    /// With `{E}`: one source for each index of the tensor's first dimension.
    pub(crate) name: NamePattern,
    /// Shape of a source; that of the tensor if absent, without the first dimension for `{E}`.
    pub(crate) shape: Option<Vec<Expr>>,
    /// Matrices that a source holds one after the other; 1 if absent.
    pub(crate) blocks: Option<Expr>,
    /// Rows that are taken of each matrix; all if absent.
    pub(crate) rows: Option<RowsRule>,
    /// Which matrices are transposed.
    #[serde(default, deserialize_with = "turn")]
    pub(crate) transpose: Turn,
    /// Whether rows are single elements: the last dimension is what rows are taken of.
    #[serde(default)]
    pub(crate) elements: bool,
}

/// Which matrices are transposed on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// None.
    #[default]
    None,
    /// The source's, before rows are taken of them.
    Source,
    /// The taken rows of each matrix.
    Result,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowsRule {
    pub(crate) first: Expr,
    pub(crate) count: Expr,
    #[serde(default = "one")]
    pub(crate) step: u64,
}

const fn one() -> u64 {
    1
}

fn turn<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Turn, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "source" => Ok(Turn::Source),
        "result" => Ok(Turn::Result),
        other => Err(de::Error::custom(format!("transpose {other:?}; known: source, result"))),
    }
}
