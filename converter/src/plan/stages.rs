//! Assigns layers and ranks to pipeline stages.

use std::ops::Range;

use shardpack_formats::{Normalised, Role, Spec};
use shardpack_manifests::{
    Layout,
    layout::{Stage, Stages},
    manifest::Quantization,
};

use super::{
    ConvertOptions, PlanError, RankMemory, files,
    formats::format_of,
    layout::{RankGroup, weights_within},
};

/// A choice of layers for each stage, and the ranks of each.
pub(super) type Division = (Stages, Vec<RankGroup>);

/// Refuses stage counts that nodes or layers cannot be divided into.
pub(crate) fn check(options: &ConvertOptions, spec: &Spec) -> Result<(), PlanError> {
    let (stages, nodes) = (options.stages, options.nodes.count());
    let layers = (0..spec.layers.len()).filter(|layer| spec.may_begin(*layer)).count();
    let possible = |stages: u32| nodes.is_multiple_of(stages) && stages as usize <= layers;
    if stages > 0 && possible(stages) {
        return Ok(());
    }
    let problem = if stages as usize > layers {
        let all = spec.layers.len();
        let those = match &spec.moe {
            _ if layers == all => "",
            Some(moe) if moe.shortcut => " that do not depend on the layer before them",
            _ => " with an indexer of their own",
        };
        format!("the model has {layers} layers{those}, and every stage must begin with one")
    } else {
        format!("{nodes} nodes are not {stages} groups of the same size")
    };
    let all = (1..=nodes).filter(|stages| possible(*stages));
    let nearest = all.min_by_key(|it| it.abs_diff(stages)).unwrap_or(1);
    Err(PlanError::Stages { stages, problem, nearest })
}

/// Bytes of weights of every layer, and of the embedding and LM head.
pub(super) struct Costs {
    layers: Vec<Cost>,
    begins: Vec<bool>,
    first: u64,
    last: u64,
}

/// Bytes of one layer's weights.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// What the ranks of a stage share out.
    sharded: u64,
    /// What each of them holds.
    whole: u64,
}

impl Costs {
    pub(super) fn new(normalised: &Normalised, quantization: &Quantization) -> Self {
        let layers = vec![Cost::default(); normalised.spec.layers.len()];
        let spec = &normalised.spec;
        let begins = (0..spec.layers.len()).map(|layer| spec.may_begin(layer)).collect();
        let mut costs = Self { layers, begins, first: 0, last: 0 };
        for tensor in &normalised.tensors {
            let format = format_of(tensor, quantization);
            let bytes = files::stored_size(tensor, format, quantization.dtype);
            match (tensor.layer, tensor.role) {
                (Some(layer), _) if tensor.sharding.axis().is_some() => {
                    costs.layers[layer as usize].sharded += bytes;
                }
                (Some(layer), _) => costs.layers[layer as usize].whole += bytes,
                (None, Role::Embed) if normalised.spec.tied_embeddings => {
                    costs.first += bytes;
                    costs.last += bytes;
                }
                (None, Role::Embed) => costs.first += bytes,
                (None, _) => costs.last += bytes,
            }
        }
        costs
    }

    /// All bytes of a stage of `ranks` ranks, where each layer needs `extra` besides its weights;
    /// none where there cannot be such a stage.
    fn of_stage(&self, layers: &Range<usize>, ranks: u64, extra: &[u64]) -> Option<u64> {
        if !self.begins[layers.start] {
            return None;
        }
        let weights = self.layers[layers.clone()].iter().map(|it| it.sharded + it.whole * ranks);
        let first = if layers.start == 0 { self.first } else { 0 };
        let last = if layers.end == self.layers.len() { self.last } else { 0 };
        Some(weights.sum::<u64>() + extra[layers.clone()].iter().sum::<u64>() + first + last)
    }
}

/// The most even division by bytes of weights.
pub(super) fn even(costs: &Costs, options: &ConvertOptions) -> Division {
    let (stages, ranks) = shape(options);
    let nothing = vec![0; costs.layers.len()];
    let cost = |_, layers: &Range<usize>| costs.of_stage(layers, ranks.into(), &nothing);
    let ends = divide(costs.layers.len(), stages, &cost);
    division(&ends.expect("there are no more stages than layers to begin them"), ranks)
}

/// The most even division whose stages' nodes have memory for their layers together, where that
/// of the `memory` given has not and there is one. `caches` are bytes of each layer's keys and
/// values on all ranks of a stage.
pub(super) fn within(
    costs: &Costs,
    options: &ConvertOptions,
    memory: &[RankMemory],
    caches: &[u64],
) -> Option<Division> {
    let (stages, ranks) = shape(options);
    if stages == 1 || memory.iter().all(RankMemory::fits) {
        return None;
    }
    let room = |rank: &RankMemory| Some(rank.limit_bytes?.saturating_sub(rank.working_bytes));
    let rooms: Option<Vec<u64>> =
        memory.chunks(ranks as usize).map(|stage| stage.iter().map(room).sum()).collect();
    let rooms = rooms?;
    let cost = |stage: usize, layers: &Range<usize>| {
        costs.of_stage(layers, ranks.into(), caches).filter(|bytes| *bytes <= rooms[stage])
    };
    Some(division(&divide(costs.layers.len(), stages, &cost)?, ranks))
}

/// The same stages, each sharded within the limits of its own nodes, where an even split is not and
/// limits allow it at all.
pub(super) fn weighted(layout: &Layout, memory: &[RankMemory]) -> Option<Division> {
    let group = |stage| {
        let ranks = layout.stage_ranks(stage);
        let weights = weights_within(&memory[ranks.start as usize..ranks.end as usize]);
        RankGroup { ranks: ranks.len() as u32, weights }
    };
    let groups: Vec<RankGroup> = (0..layout.stage_count()).map(group).collect();
    let changes = groups.iter().any(|group| group.weights.is_some());
    changes.then(|| (layout.stages.clone(), groups))
}

/// Number of stages, and of ranks in each.
fn shape(options: &ConvertOptions) -> (usize, u32) {
    (options.stages as usize, options.nodes.count() / options.stages)
}

/// Stages that end before these layers.
fn division(ends: &[usize], ranks: u32) -> Division {
    let groups = vec![RankGroup { ranks, weights: None }; ends.len()];
    if ends.len() == 1 {
        return (Stages::default(), groups);
    }
    let mut start = 0;
    let stage = |(index, end): (u32, &usize)| {
        let layers = [start, *end as u32];
        start = *end as u32;
        Stage { layers, ranks: [index * ranks, (index + 1) * ranks] }
    };
    (Stages((0..).zip(ends).map(stage).collect()), groups)
}

/// What consecutive layers cost as a stage; none where it cannot have them.
type StageCost<'a> = &'a dyn Fn(usize, &Range<usize>) -> Option<u64>;

/// The division into consecutive stages, none of them empty, whose most expensive one costs
/// least, and of those the one with the least sum of squares: where each stage ends.
fn divide(layers: usize, stages: usize, cost: StageCost) -> Option<Vec<usize>> {
    let (most, _) = cheapest(layers, stages, cost, &|all, one| all.max(one.into()))?;
    let within = |stage: usize, layers: &Range<usize>| {
        cost(stage, layers).filter(|cost| u128::from(*cost) <= most)
    };
    let squares = |all: u128, one: u64| all.saturating_add(u128::from(one) * u128::from(one));
    cheapest(layers, stages, &within, &squares).map(|(_, ends)| ends)
}

/// The least value that costs come to, added up stage by stage, and where the stages end then.
fn cheapest(
    layers: usize,
    stages: usize,
    cost: StageCost,
    add: &dyn Fn(u128, u64) -> u128,
) -> Option<(u128, Vec<usize>)> {
    // By the number of layers that the stages so far have.
    let mut best: Vec<Option<(u128, Vec<usize>)>> = vec![None; layers + 1];
    best[0] = Some((0, Vec::new()));
    for stage in 0..stages {
        let through = |end: usize| {
            let ways = (0..end).filter_map(|start| {
                let (before, _) = best[start].as_ref()?;
                Some((add(*before, cost(stage, &(start..end))?), start))
            });
            let (value, start) = ways.min()?;
            let mut ends = best[start].as_ref()?.1.clone();
            ends.push(end);
            Some((value, ends))
        };
        best = (0..=layers).map(through).collect();
    }
    best.pop()?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(costs: &[u64], rooms: &[u64]) -> Option<Vec<usize>> {
        let cost = |stage: usize, layers: &Range<usize>| {
            let sum: u64 = costs[layers.clone()].iter().sum();
            (sum <= rooms[stage]).then_some(sum)
        };
        divide(costs.len(), rooms.len(), &cost)
    }

    #[test]
    fn stages_are_even_by_bytes() {
        const ROOM: u64 = u64::MAX;
        assert_eq!(ends(&[1; 10], &[ROOM; 4]).unwrap().len(), 4);
        let sizes = |ends: Vec<usize>| {
            let starts = std::iter::once(0).chain(ends.clone());
            starts.zip(ends).map(|(start, end)| end - start).collect::<Vec<_>>()
        };
        let mut four = sizes(ends(&[1; 10], &[ROOM; 4]).unwrap());
        four.sort_unstable();
        assert_eq!(four, [2, 2, 3, 3], "and not 1, 3, 3, 3");
        assert_eq!(ends(&[9, 1, 1, 1, 1, 1], &[ROOM; 2]), Some(vec![1, 6]));
        assert_eq!(ends(&[1, 1, 1, 1, 9], &[ROOM; 3]), Some(vec![2, 4, 5]));
        assert_eq!(ends(&[5, 5], &[ROOM; 2]), Some(vec![1, 2]));
        assert_eq!(ends(&[5, 5, 5], &[ROOM]), Some(vec![3]));
    }

    #[test]
    fn stages_keep_to_their_rooms_where_they_can() {
        assert_eq!(ends(&[2; 6], &[100, 100]), Some(vec![3, 6]));
        assert_eq!(ends(&[2; 6], &[5, 100]), Some(vec![2, 6]));
        // The middle one has room for one layer; the others share the rest.
        assert_eq!(ends(&[2; 6], &[100, 3, 100]), Some(vec![2, 3, 6]));
        assert_eq!(ends(&[2; 6], &[5, 5]), None);
    }
}
