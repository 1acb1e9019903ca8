//! Chooses the ranges of every axis.

use std::collections::{BTreeMap, BTreeSet};

use shardpack_formats::{Axis as SourceAxis, Normalised, Role, rules::EXPERTS_AXIS};
use shardpack_manifests::{
    Layout,
    layout::{Axis, Stages, UnitRange},
    manifest::Quantization,
    partition::{lcm, level, split_preferring, split_weighted, units_per_group},
};

use super::{ExpertSharding, RankMemory, files, formats::format_of};

/// The embedding is replicated while it is below one part in this many of a node's bytes (5 %).
const REPLICATED_EMBEDDING_SHARE: u64 = 20;

/// Whole experts are worth it when the fullest rank would else have this much (in percent) more
/// of every expert than an even split gives it.
const TOLERATED_EXPERT_IMBALANCE_PERCENT: u64 = 12;

/// Fewer experts per rank than this balance worse than any sharding inside them.
const LEAST_EXPERTS_PER_RANK: u64 = 4;

/// The ranks of one stage, or all.
#[derive(Clone)]
pub(super) struct RankGroup {
    pub(super) ranks: u32,
    /// What each may take in proportion to the others; the same without them.
    pub(super) weights: Option<Vec<u64>>,
}

/// Decides which rank holds what, from shapes and formats only. The ranks of each group hold all
/// of every axis.
pub(super) fn plan(
    normalised: &Normalised,
    quantization: &Quantization,
    (stages, groups): (Stages, &[RankGroup]),
    experts: ExpertSharding,
) -> Layout {
    let ranks = groups.iter().map(|group| group.ranks).sum();
    let split = |axis: &SourceAxis| -> Vec<UnitRange> {
        groups.iter().flat_map(|group| split_axis(normalised, quantization, axis, group)).collect()
    };
    let mut axes = BTreeMap::new();
    let mut q_to_kv = Vec::new();
    let inner = expert_axes(normalised);
    let is_expert = |axis: &SourceAxis| axis.name == EXPERTS_AXIS || inner.contains(&&*axis.name);
    let mut add = |axis: &SourceAxis, ranges| {
        let ranges = Axis { size: axis.len.into(), unit: axis.unit.into(), ranges };
        axes.insert(axis.name.clone(), ranges);
    };
    let used = |axis: &SourceAxis| {
        normalised.tensors.iter().any(|tensor| tensor.sharding.axis() == Some(&axis.name))
    };
    for axis in normalised.axes.iter().filter(|axis| !is_expert(axis) && used(axis)) {
        match &axis.follow {
            None => add(axis, split(axis)),
            Some(follow) => {
                let leader = normalised.axes.iter().find(|other| other.name == follow.axis);
                let leader = leader.expect("the rules name axes that exist");
                let ranges = split(leader);
                add(axis, ranges.into_iter().map(|range| followed(&follow.map, range)).collect());
                // Local attention's is known from its sizes.
                if axis.name == "kv" {
                    q_to_kv.clone_from(&follow.map);
                }
            }
        }
    }
    let inside: Vec<(&SourceAxis, Vec<UnitRange>)> = normalised
        .axes
        .iter()
        .filter(|axis| inner.contains(&&*axis.name))
        .map(|axis| (axis, split(axis)))
        .collect();
    let whole = normalised.axes.iter().find(|axis| axis.name == EXPERTS_AXIS);
    let whole = whole.filter(|axis| match experts {
        ExpertSharding::Inside => false,
        ExpertSharding::Whole => true,
        ExpertSharding::Auto => {
            groups.iter().all(|group| {
                group.weights.is_none()
                    && u64::from(axis.len) >= LEAST_EXPERTS_PER_RANK * u64::from(group.ranks)
            }) && inside.iter().any(|(axis, ranges)| is_uneven(axis, ranges, groups.len()))
        }
    });
    match whole {
        Some(axis) => add(axis, split(axis)),
        None => inside.into_iter().for_each(|(axis, ranges)| add(axis, ranges)),
    }
    let embedding_sharded =
        normalised.spec.tied_embeddings || !embedding_is_small(normalised, quantization, ranks);
    Layout { ranks, stages, axes, q_to_kv, embedding_sharded }
}

/// Axes inside experts.
fn expert_axes(normalised: &Normalised) -> BTreeSet<&str> {
    let experts = normalised.tensors.iter().filter(|tensor| tensor.sharding.is_expert());
    experts.filter_map(|tensor| tensor.sharding.axis()).collect()
}

/// Of ranges that cover the axis in each of so many groups.
fn is_uneven(axis: &SourceAxis, ranges: &[UnitRange], groups: usize) -> bool {
    let largest = ranges.iter().map(|[start, end]| end - start).max().unwrap_or(0);
    let even = u64::from(axis.len) * (100 + TOLERATED_EXPERT_IMBALANCE_PERCENT);
    largest * (ranges.len() / groups) as u64 * 100 > even
}

/// Smallest range of units that these units of the leading axis use.
fn followed(map: &[u32], [start, end]: UnitRange) -> UnitRange {
    let used = &map[start as usize..end as usize];
    match (used.iter().min(), used.iter().max()) {
        (Some(first), Some(last)) => [u64::from(*first), u64::from(*last) + 1],
        _ => [0, 0],
    }
}

fn split_axis(
    normalised: &Normalised,
    quantization: &Quantization,
    axis: &SourceAxis,
    group: &RankGroup,
) -> Vec<UnitRange> {
    // A shard boundary along the inputs of a matrix must fall between its groups.
    let mut align = 1;
    let mut kernel = 0;
    for tensor in &normalised.tensors {
        if !tensor.sharding.shards_inputs() || tensor.sharding.axis() != Some(&axis.name) {
            continue;
        }
        if let Some((bits, group_size)) = format_of(tensor, quantization).groups() {
            // A value head may be narrower than a query head.
            let unit = tensor.columns() / u64::from(axis.len);
            align = lcm(align, units_per_group(unit, u64::from(group_size)));
            // MLX's fast decode kernel takes inputs in steps of 512 (up to 5 bits) or 256.
            kernel = lcm(kernel, units_per_group(unit, if bits < 6 { 512 } else { 256 }));
        }
    }
    if kernel == 0 {
        // No groups along this dimension: boundaries on whole vectors of eight outputs.
        kernel = units_per_group(axis.unit.into(), 8);
    }
    let whole_kv = sharing_units(normalised, axis);
    let preferred = [lcm(kernel, whole_kv), whole_kv, kernel];
    match &group.weights {
        None => split_preferring(axis.len.into(), group.ranks, align, &preferred),
        Some(weights) => split_weighted(axis.len.into(), weights, align, &preferred),
    }
}

/// Units that share a unit of the axis that follows this one (query heads with one key-value
/// head), so that a boundary between them stores nothing twice; 1 without such an axis or without a
/// constant ratio.
fn sharing_units(normalised: &Normalised, axis: &SourceAxis) -> u64 {
    let follower = normalised
        .axes
        .iter()
        .find(|other| other.follow.as_ref().is_some_and(|follow| follow.axis == axis.name));
    match follower {
        Some(follower) if axis.len.is_multiple_of(follower.len) => {
            u64::from(axis.len / follower.len)
        }
        _ => 1,
    }
}

/// Weights by which axes are sharded so that every rank of a stage keeps to its node's limit, if
/// the most even sharding does not and limits allow it at all.
pub(super) fn weights_within(even: &[RankMemory]) -> Option<Vec<u64>> {
    if even.iter().all(RankMemory::fits) {
        return None;
    }
    // Working memory and what is replicated stay; weights and cache follow the sharding.
    let limits: Option<Vec<u64>> = even
        .iter()
        .map(|rank| Some(rank.limit_bytes?.saturating_sub(rank.working_bytes)))
        .collect();
    let total = even.iter().map(|rank| rank.weight_bytes + rank.cache_bytes).sum();
    level(total, &limits?)
}

fn embedding_is_small(normalised: &Normalised, quantization: &Quantization, ranks: u32) -> bool {
    let size =
        |tensor| files::stored_size(tensor, format_of(tensor, quantization), quantization.dtype);
    let total: u64 = normalised.tensors.iter().map(size).sum();
    let embedding: u64 =
        normalised.tensors.iter().filter(|tensor| tensor.role == Role::Embed).map(size).sum();
    embedding * REPLICATED_EMBEDDING_SHARE * u64::from(ranks) < total
}
