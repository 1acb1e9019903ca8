//! Which tensors a published checkpoint has, and which logical tensors of a plan fill them: the
//! rules that read checkpoints, run backwards.

use std::collections::BTreeMap;

use shardpack_formats::{
    Published,
    normalise::{View, rows_and_columns},
    rules::Turn,
};
use shardpack_quantize::Dtype;

use crate::plan::TensorConversion;

/// A tensor of the checkpoint.
pub(super) struct Target {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) dtype: Dtype,
    /// The steps that give its elements, each with the number of its sources that this one is.
    pub(super) parts: Vec<(usize, u64)>,
    /// Whether it is put together matrix by matrix: some part of it is turned or in rows apart.
    pub(super) assembled: bool,
}

/// What a step gives.
pub(super) struct Form {
    /// To each of its targets.
    pub(super) view: View,
    /// Indices of those.
    pub(super) targets: Vec<usize>,
}

/// All tensors in the order of the steps, and the form of each step. A tensor that the steps would
/// not fill to the last element (rules of a user's own can leave some out) is not one: its parts
/// keep their own names.
pub(super) fn targets(steps: &[TensorConversion], dtype: Dtype) -> (Vec<Target>, Vec<Form>) {
    let mut forms: Vec<Published> = steps.iter().map(published).collect();
    let targets = loop {
        let targets = collect(steps, &forms, dtype);
        let mut partial: Vec<usize> = targets
            .values()
            .filter(|target| !is_whole(target, &forms, steps, dtype))
            .flat_map(|target| target.parts.iter().map(|(step, _)| *step))
            .collect();
        partial.sort_unstable();
        partial.dedup();
        if partial.is_empty() {
            break targets;
        }
        for step in partial {
            // Its own name is no other tensor's: this ends.
            forms[step] = own(&steps[step]);
        }
    };
    let mut targets: Vec<Target> = targets.into_values().collect();
    targets.sort_by(|a, b| a.parts[0].cmp(&b.parts[0]));
    let by_name: BTreeMap<&str, usize> =
        targets.iter().enumerate().map(|(index, target)| (target.name.as_str(), index)).collect();
    let form = |published: &Published| Form {
        view: published.view,
        targets: published.names.iter().map(|name| by_name[name.as_str()]).collect(),
    };
    let forms: Vec<Form> = forms.iter().map(form).collect();
    spread(&mut targets, &forms);
    (targets, forms)
}

/// The published form of a step.
fn published(step: &TensorConversion) -> Published {
    step.tensor.published.clone().unwrap_or_else(|| own(step))
}

/// The form under its own name.
fn own(step: &TensorConversion) -> Published {
    let [rows, columns] = rows_and_columns(&step.tensor.shape);
    Published {
        names: vec![step.tensor.name.clone()],
        shape: step.tensor.shape.clone(),
        view: View::whole(rows, columns),
    }
}

/// The element type that a step is written in: what the source holds in full is no less exact, and
/// tables of whole numbers are integers.
fn dtype_of(step: &TensorConversion, dtype: Dtype) -> Dtype {
    if step.tensor.below.is_some() {
        return Dtype::I64;
    }
    let exact = step.tensor.exact && step.parts[0].dtype == Dtype::F32;
    if exact { Dtype::F32 } else { dtype }
}

fn collect(
    steps: &[TensorConversion],
    forms: &[Published],
    dtype: Dtype,
) -> BTreeMap<String, Target> {
    let mut targets: BTreeMap<String, Target> = BTreeMap::new();
    for (index, (form, step)) in forms.iter().zip(steps).enumerate() {
        for (source, name) in form.names.iter().enumerate() {
            let target = targets.entry(name.clone()).or_insert_with(|| Target {
                name: name.clone(),
                shape: form.shape.clone(),
                dtype: dtype_of(step, dtype),
                parts: Vec::new(),
                assembled: false,
            });
            target.parts.push((index, source as u64));
            target.assembled |= form.view.turn != Turn::None || form.view.step != 1;
        }
    }
    targets
}

/// Whether the parts of a tensor are matrices of one form that share out its rows.
fn is_whole(
    target: &Target,
    forms: &[Published],
    steps: &[TensorConversion],
    dtype: Dtype,
) -> bool {
    let form = |part: &(usize, u64)| &forms[part.0];
    let matrix = |view: &View| (view.blocks, view.rows, view.columns, view.turn == Turn::Source);
    let first = form(&target.parts[0]);
    let mut taken = vec![0_u8; usize::try_from(first.view.rows).unwrap_or(0)];
    for part in &target.parts {
        let Published { shape, view, .. } = form(part);
        let alike = *shape == target.shape
            && matrix(view) == matrix(&first.view)
            && dtype_of(&steps[part.0], dtype) == target.dtype;
        if !alike || !view.is_possible() {
            return false;
        }
        for row in 0..view.count {
            let row = &mut taken[(view.first + row * view.step) as usize];
            *row = row.saturating_add(1);
        }
    }
    taken.iter().all(|times| *times == 1)
}

/// A step gives all its targets in one way: as soon as one is put together, all are.
fn spread(targets: &mut [Target], forms: &[Form]) {
    loop {
        let mut more = false;
        for form in forms {
            if form.targets.iter().any(|target| targets[*target].assembled) {
                for target in &form.targets {
                    more |= !std::mem::replace(&mut targets[*target].assembled, true);
                }
            }
        }
        if !more {
            return;
        }
    }
}
