//! Why a checkpoint is refused.

use std::fmt;

use crate::{expr::ExprError, rope::RopeError};
use shardpack_quantize::dtype::Dtype;

/// Most tensors that a message lists.
const MAX_LISTED: usize = 20;

/// A checkpoint that the rules do not account for in full.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The configuration is not a JSON object.
    #[error("the configuration is not a JSON object")]
    NotAnObject,
    /// No pack has rules for it.
    #[error("unknown architecture: model_type is {found}; known: {known}")]
    UnknownFamily {
        /// The configuration's `model_type`.
        found: String,
        /// Every `model_type` that a pack knows.
        known: String,
    },
    /// Known by name, and beyond the engine.
    #[error("{model_type} models are not read: {reason}")]
    Refused {
        /// The configuration's `model_type`, or that of the text model in it.
        model_type: String,
        /// What is missing.
        reason: String,
    },
    /// A class that the family's rules are not for.
    #[error("a {family} model of class {found}; known: {known}")]
    UnknownClass {
        /// `model_type`.
        family: String,
        /// The configuration's `architectures`.
        found: String,
        /// Classes that the rules are for.
        known: String,
    },
    /// Keys that may change what the model computes.
    #[error("config keys that the rules of {family} do not know: {keys}")]
    UnknownKeys {
        /// `model_type`.
        family: String,
        /// Names and values.
        keys: String,
    },
    /// A value that cannot be honoured.
    #[error("{message} ({values})")]
    Unsupported {
        /// The rule's reason.
        message: String,
        /// Names and values of the keys it depends on.
        values: String,
    },
    /// An expression of the rules that the configuration gives no value.
    #[error("{place} cannot be computed")]
    Expression {
        /// What it is for.
        place: String,
        /// Why not.
        source: ExprError,
    },
    /// A value of the wrong kind or size.
    #[error("{place}: `{expression}` is {found}, expected {expected}")]
    Value {
        /// What it is for.
        place: String,
        /// The expression of the rules.
        expression: String,
        /// What is needed.
        expected: String,
        /// Its value.
        found: String,
    },
    /// A position embedding that cannot be honoured.
    #[error("unusable position embedding")]
    Rope(#[from] RopeError),
    /// Two source tensors with one normalised name.
    #[error("tensors {first:?} and {second:?} are both {name:?}")]
    Duplicate {
        /// The normalised name.
        name: String,
        /// One source name.
        first: String,
        /// The other.
        second: String,
    },
    /// Tensors whose values depend on who wrote them.
    #[error(
        "tensor {tensor:?} has the name that mlx-lm and this program give it, but neither has signed the files: mlx-lm stores other values than the publisher under such names, and without \"format\": \"mlx\" in the files' metadata or a manifest.json beside them nobody can tell which these are; convert the publisher's own checkpoint"
    )]
    UnknownWriter {
        /// The first such tensor.
        tensor: String,
    },
    /// The tensors are not those of the configuration.
    #[error("{}", accounting_message(missing, unknown))]
    Accounting {
        /// Tensors that the rules require.
        missing: TensorList,
        /// Tensors that no rule names.
        unknown: TensorList,
    },
    /// A tensor of another shape than the configuration's.
    #[error("tensor {tensor:?} has shape {found:?}, expected {expected}")]
    Shape {
        /// Its source name.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// The rules' shape, with the value of each expression.
        expected: String,
    },
    /// A tensor that does not hold floats.
    #[error("tensor {tensor:?} has element type {found}, expected F32, F16 or BF16")]
    ElementType {
        /// Its source name.
        tensor: String,
        /// Its type.
        found: Dtype,
    },
    /// A tensor that is stored in parts of which one is missing.
    #[error("{first:?} is there, but not {missing:?}; there should be {count} of them")]
    Incomplete {
        /// The first part.
        first: String,
        /// The part that is not there.
        missing: String,
        /// Parts.
        count: u64,
    },
    /// Parts of one tensor with different element types.
    #[error("tensor {tensor:?} has element type {found}, the others of its stack have {expected}")]
    MixedTypes {
        /// A part.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// The first part's.
        expected: Dtype,
    },
    /// Rules that take something of another size out of a source.
    #[error(
        "tensor {tensor} takes {} rows of {} from {source_name}, expected the shape {expected:?}",
        gives[0], gives[1]
    )]
    View {
        /// Its normalised name.
        tensor: String,
        /// Where it comes from.
        source_name: String,
        /// Rows and columns that the rules take.
        gives: [u64; 2],
        /// The shape that it should have.
        expected: Vec<u64>,
    },
    /// A pack that shards a tensor along an axis of another size.
    #[error("tensor {tensor:?} is sharded along axis {axis} of {axis_size}, but has {found} there")]
    AxisSize {
        /// Its normalised name.
        tensor: String,
        /// The axis.
        axis: String,
        /// Rows or columns of the axis.
        axis_size: u64,
        /// Rows or columns of the tensor.
        found: u64,
    },
}

/// Tensors with their shapes; a message shows the first 20.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorList(pub Vec<(String, Vec<u64>)>);

impl fmt::Display for TensorList {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, shape)) in self.0.iter().take(MAX_LISTED).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{name} {shape:?}")?;
        }
        match self.0.len().checked_sub(MAX_LISTED) {
            None | Some(0) => Ok(()),
            Some(more) => write!(formatter, " and {more} more"),
        }
    }
}

fn accounting_message(missing: &TensorList, unknown: &TensorList) -> String {
    let parts =
        [(missing, "missing", "expected by the rules"), (unknown, "unknown", "named by no rule")];
    let parts: Vec<String> = parts
        .iter()
        .filter(|(list, ..)| !list.0.is_empty())
        .map(|(list, word, why)| {
            let count = list.0.len();
            let noun = if count == 1 { "tensor" } else { "tensors" };
            format!("{count} {word} {noun} ({why}): {list}")
        })
        .collect();
    parts.join("; ")
}
