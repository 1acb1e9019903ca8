//! Tensors that stand in weight files under one name, one after the other.
//!
//! Packages split fused projections, because a rank's shard of one is not one range. Other programs
//! expect the fused matrix. Rows are quantized one by one, so the projections laid end to end are
//! the fused matrix: a file's header names it as a whole, and the manifest names its projections.

use std::mem::discriminant;

use shardpack_formats::StoredAs;
use shardpack_manifests::{TensorShard, manifest::MatrixFormat};

use super::{Destination, StoredTensor, TensorConversion, module_name};

/// Tensors under one name, or one tensor.
pub(crate) struct Stack<'a> {
    /// In the order of their rows.
    pub(crate) steps: Vec<&'a TensorConversion>,
    /// How files list it, if not as the tensor itself.
    pub(crate) stored_as: Option<&'a StoredAs>,
}

impl Stack<'_> {
    /// How files list a stored part. Parts of a quantized matrix have the dimensions of integers,
    /// scales or biases.
    pub(super) fn part_stored_as(&self, index: usize) -> Option<StoredAs> {
        let (step, stored_as) = (self.steps[0], self.stored_as?);
        let own = module_name(&step.tensor.name).len();
        let ending = &step.parts[index].name[own..];
        let inner = stored_as.inner.clone().filter(|_| step.format == MatrixFormat::Plain);
        Some(StoredAs { name: format!("{}{ending}", module_name(&stored_as.name)), inner })
    }
}

/// All tensors in the order of files: those of one name stand at the first one's place. What
/// cannot stand as one matrix (rules of a user's own can ask for anything) keeps its own name.
pub(crate) fn stacks(steps: &[TensorConversion]) -> Vec<Stack<'_>> {
    let mut stacks = Vec::new();
    let mut done = vec![false; steps.len()];
    for (index, step) in steps.iter().enumerate() {
        if std::mem::replace(&mut done[index], true) {
            continue;
        }
        let own = Stack { steps: vec![step], stored_as: None };
        let Some(stored_as) = &step.tensor.stored_as else {
            stacks.push(own);
            continue;
        };
        let same = |other: &(usize, &TensorConversion)| {
            other.1.tensor.stored_as.as_ref() == Some(stored_as)
        };
        // A layer's tensors stand together: the whole list is not searched for each.
        let near = steps.iter().enumerate().skip(index);
        let near = near.take_while(|(_, other)| other.tensor.layer == step.tensor.layer);
        let members: Vec<(usize, &TensorConversion)> = near.filter(same).collect();
        if !members.iter().all(|(_, other)| is_alike(step, other, members.len())) {
            stacks.push(own);
            continue;
        }
        for (at, _) in &members {
            done[*at] = true;
        }
        let steps = members.into_iter().map(|(_, step)| step).collect();
        stacks.push(Stack { steps, stored_as: Some(stored_as) });
    }
    stacks
}

/// Whether the rows of both can follow each other in one matrix of every rank.
fn is_alike(first: &TensorConversion, other: &TensorConversion, members: usize) -> bool {
    let by_rows = |(one, other): (&StoredTensor, &StoredTensor)| {
        (one.dtype, &one.shape[1..], &one.stages) == (other.dtype, &other.shape[1..], &other.stages)
            && [one, other].into_iter().all(|part| is_by_rows(&part.destination))
            && discriminant(&one.destination) == discriminant(&other.destination)
    };
    // One tensor alone only has another name.
    members == 1
        || first.format == other.format
            && first.parts.len() == other.parts.len()
            && first.parts.iter().zip(&other.parts).all(by_rows)
}

/// Whether a rank holds whole rows.
fn is_by_rows(destination: &Destination) -> bool {
    let by_rows =
        |shard: &TensorShard| !matches!(shard, TensorShard::Range { dim, .. } if *dim != 0);
    match destination {
        Destination::Shared | Destination::Once => true,
        Destination::Sharded(shards) => shards.iter().all(by_rows),
    }
}
