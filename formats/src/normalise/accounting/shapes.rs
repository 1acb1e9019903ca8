//! Shapes and types of source tensors against those that rules expect.

use crate::{
    expr::Expr,
    normalise::{Axis, ResolveError, SourceTensor},
    rules::{EXPERTS_AXIS, TensorRule},
};

/// One of several sources of a tensor that are all alike.
pub(super) fn check_apart(
    tensor: &SourceTensor,
    shape: &[u64],
    first: Option<&SourceTensor>,
) -> Result<(), ResolveError> {
    check_float(tensor)?;
    if !same_elements(&tensor.shape, shape) {
        let (tensor, found) = (tensor.name.clone(), tensor.shape.clone());
        return Err(ResolveError::Shape { tensor, found, expected: format!("{shape:?}") });
    }
    match first.filter(|first| first.dtype != tensor.dtype) {
        None => Ok(()),
        Some(first) => Err(ResolveError::MixedTypes {
            tensor: tensor.name.clone(),
            found: tensor.dtype,
            expected: first.dtype,
        }),
    }
}

pub(super) fn check_float(tensor: &SourceTensor) -> Result<(), ResolveError> {
    if tensor.dtype.is_float() {
        return Ok(());
    }
    let (tensor, found) = (tensor.name.clone(), tensor.dtype);
    Err(ResolveError::ElementType { tensor, found })
}

/// Whether two shapes are of the same elements in the same order: dimensions of one are nobody's.
pub(super) fn same_elements(found: &[u64], expected: &[u64]) -> bool {
    let real = |shape: &[u64]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    real(found) == real(expected)
}

pub(super) fn check_shape(
    expressions: &[Expr],
    tensor: &SourceTensor,
    shape: &[u64],
) -> Result<(), ResolveError> {
    if same_elements(&tensor.shape, shape) {
        return Ok(());
    }
    let expected: Vec<String> = expressions
        .iter()
        .zip(shape)
        .map(|(expression, value)| format!("{expression} = {value}"))
        .collect();
    Err(ResolveError::Shape {
        tensor: tensor.name.clone(),
        found: tensor.shape.clone(),
        expected: format!("[{}]", expected.join(", ")),
    })
}

/// A slip in a user's rules must not split heads.
pub(super) fn check_axis(
    rule: &TensorRule,
    name: &str,
    shape: &[u64],
    axes: &[Axis],
) -> Result<(), ResolveError> {
    let find = |axis: &str| axes.iter().find(|other| other.name == axis);
    if rule.shard.is_expert() {
        let axis = find(EXPERTS_AXIS).expect("checked when the rules were parsed");
        if axis.size() != shape[0] {
            return Err(axis_size(name, axis, shape[0]));
        }
    }
    let Some(dimension) = rule.shard.dimension(shape.len()) else { return Ok(()) };
    let axis = rule.shard.axis().and_then(find);
    let axis = axis.expect("rules name only axes that exist: checked when they were parsed");
    let found = shape[dimension];
    let sizes = std::iter::once(&axis.unit).chain(&axis.also);
    if sizes.into_iter().any(|unit| u64::from(axis.len) * u64::from(*unit) == found) {
        return Ok(());
    }
    Err(axis_size(name, axis, found))
}

fn axis_size(name: &str, axis: &Axis, found: u64) -> ResolveError {
    ResolveError::AxisSize {
        tensor: name.to_owned(),
        axis: axis.name.clone(),
        axis_size: axis.size(),
        found,
    }
}
