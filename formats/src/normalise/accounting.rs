//! Every source tensor to its place, or a refusal that says which have none.

use std::collections::BTreeMap;

use super::{
    Axis, ResolveError, SourceTensor, TensorList, TensorPlan,
    family::FamilyRules,
    scopes::{at_layer, flag, size},
};
use crate::{
    expr::Scope,
    rules::{IgnoreRule, Presence, Role, TensorRule, matches},
};

/// The source tensors by normalised name.
pub(super) struct Inventory<'a> {
    tensors: BTreeMap<String, &'a SourceTensor>,
    ignored: Vec<(String, String)>,
}

/// What the rules make of an [`Inventory`].
pub(super) struct Plan {
    pub(super) tensors: Vec<TensorPlan>,
    pub(super) tied_duplicate: Option<String>,
    pub(super) ignored: Vec<(String, String)>,
    missing: TensorList,
}

impl<'a> Inventory<'a> {
    pub(super) fn new(
        family: &FamilyRules<'_>,
        sources: &'a [SourceTensor],
    ) -> Result<Self, ResolveError> {
        let file = &family.pack.file;
        let mut inventory = Self { tensors: BTreeMap::new(), ignored: Vec::new() };
        for tensor in sources {
            let mut name = tensor.name.clone();
            for rule in &file.strip {
                if let Some(rest) = name.strip_prefix(&rule.from) {
                    name = format!("{}{rest}", rule.to);
                }
            }
            if let Some(IgnoreRule { reason, .. }) =
                file.ignore.iter().find(|rule| matches(&rule.pattern, &name))
            {
                inventory.ignored.push((tensor.name.clone(), reason.clone()));
            } else if let Some(first) = inventory.tensors.insert(name.clone(), tensor) {
                let (first, second) = (first.name.clone(), tensor.name.clone());
                return Err(ResolveError::Duplicate { name, first, second });
            }
        }
        Ok(inventory)
    }

    /// Rows of a matrix.
    pub(super) fn rows(&self, name: &str) -> Option<i64> {
        i64::try_from(*self.tensors.get(name)?.shape.first()?).ok()
    }

    /// Takes every tensor that the rules name, in their order; the rules of a block with `{L}`
    /// are repeated layer by layer.
    pub(super) fn plan(
        mut self,
        family: &FamilyRules<'_>,
        scope: &Scope<'_>,
        layers: &[Scope<'_>],
        axes: &[Axis],
    ) -> Result<Plan, ResolveError> {
        let mut plan = Plan {
            tensors: Vec::new(),
            tied_duplicate: None,
            ignored: std::mem::take(&mut self.ignored),
            missing: TensorList::default(),
        };
        let rules = &family.pack.file.tensors;
        for block in rules.chunk_by(|left, right| left.name.per_layer() == right.name.per_layer()) {
            if block[0].name.per_layer() {
                for (layer, scope) in layers.iter().enumerate() {
                    for rule in block {
                        self.place(rule, Some(layer as u32), scope, axes, &mut plan)?;
                    }
                }
            } else {
                for rule in block {
                    self.place(rule, None, scope, axes, &mut plan)?;
                }
            }
        }
        let unknown =
            self.tensors.values().map(|tensor| (tensor.name.clone(), tensor.shape.clone()));
        let unknown = TensorList(unknown.collect());
        if plan.missing.0.is_empty() && unknown.0.is_empty() {
            return Ok(plan);
        }
        Err(ResolveError::Accounting { missing: plan.missing, unknown })
    }

    fn place(
        &mut self,
        rule: &TensorRule,
        layer: Option<u32>,
        scope: &Scope<'_>,
        axes: &[Axis],
        plan: &mut Plan,
    ) -> Result<(), ResolveError> {
        let name = rule.name.in_layer(layer.unwrap_or(0));
        let place = layer.map_or_else(|| name.clone(), |layer| at_layer(&name, layer as usize));
        let (wanted, required) = match &rule.required {
            Presence::Always => (true, true),
            Presence::Maybe => (true, false),
            Presence::Exactly(expression) => {
                let exists = flag(expression, scope, &place)?;
                (exists, exists)
            }
        };
        // A head that should not be there is the embedding once more, or an error.
        let duplicate = !wanted && rule.role == Role::Head;
        if !wanted && !duplicate {
            return Ok(());
        }
        let mut shape = Vec::with_capacity(rule.shape.len());
        for expression in &rule.shape {
            shape.push(u64::from(size(expression, scope, &place)?));
        }
        let Some(tensor) = self.tensors.remove(&name) else {
            if required {
                plan.missing.0.push((name, shape));
            }
            return Ok(());
        };
        check_shape(rule, tensor, &shape)?;
        if !tensor.dtype.is_float() {
            let (tensor, found) = (tensor.name.clone(), tensor.dtype);
            return Err(ResolveError::ElementType { tensor, found });
        }
        check_axis(rule, &name, &shape, axes)?;
        if duplicate {
            plan.tied_duplicate = Some(tensor.name.clone());
            return Ok(());
        }
        plan.tensors.push(TensorPlan {
            name,
            sources: vec![tensor.name.clone()],
            dtype: tensor.dtype,
            cut: rule.cut.clone(),
            role: rule.role,
            quantizable: shape.len() == 2 && rule.quantize.unwrap_or(rule.role.is_quantized()),
            shape,
            layer,
        });
        Ok(())
    }
}

fn check_shape(
    rule: &TensorRule,
    tensor: &SourceTensor,
    shape: &[u64],
) -> Result<(), ResolveError> {
    if tensor.shape == shape {
        return Ok(());
    }
    let expected: Vec<String> = rule
        .shape
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

/// A slip in a user's rules must not cut heads apart.
fn check_axis(
    rule: &TensorRule,
    name: &str,
    shape: &[u64],
    axes: &[Axis],
) -> Result<(), ResolveError> {
    let Some((_, dimension)) = rule.cut.dimensions() else { return Ok(()) };
    let axis = axes.iter().find(|axis| Some(axis.name.as_str()) == rule.cut.axis());
    let axis = axis.expect("rules name only axes that exist: checked when they were parsed");
    if axis.size() == shape[dimension] {
        return Ok(());
    }
    Err(ResolveError::AxisSize {
        tensor: name.to_owned(),
        axis: axis.name.clone(),
        axis_size: axis.size(),
        found: shape[dimension],
    })
}
