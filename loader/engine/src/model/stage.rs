//! A rank's place in a pipeline: whose work it goes on with, and who goes on with its own.
//!
//! Every rank of a stage has the same hidden vectors after each layer's sum, so each gives them
//! to its own counterparts of the next stage, all at the same time.

use std::ops::Range;

use shardpack_collectives::GroupError;
use shardpack_manifests::{Layout, layout::Stage};
use zerocopy::IntoBytes;

use super::step::Step;
use crate::backend::{Backend, StepError};

/// One rank's place in a pipeline of at least two stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Layers that are run here.
    pub layers: Range<usize>,
    /// Ranks that run them.
    pub ranks: Range<u32>,
    /// Whether the embedding is here.
    pub is_first: bool,
    /// Whether the output head is here.
    pub is_last: bool,
    /// The rank of the stage before whose hidden vectors this rank goes on with.
    pub taken_from: Option<u32>,
    /// Ranks of the next stage that go on with those of this one.
    pub given_to: Vec<u32>,
}

impl Place {
    /// The place of `rank`; none where every rank runs all layers.
    pub(super) fn new(layout: &Layout, rank: u32) -> Option<Self> {
        let stages = &layout.stages;
        let index = stages.of_rank(rank).filter(|_| stages.len() > 1)?;
        let stage = &stages[index];
        // Counterparts go round where stages have different numbers of ranks.
        let giver = |giving: &Range<u32>, taking: &Range<u32>, rank: u32| {
            giving.start + (rank - taking.start) % giving.len() as u32
        };
        let ranks = stage.rank_range();
        let before = index.checked_sub(1).map(|before| stages[before].rank_range());
        let taken_from = before.map(|before| giver(&before, &ranks, rank));
        let next = stages.get(index + 1).map_or(0..0, Stage::rank_range);
        let mine = |to: &u32| giver(&ranks, &next, *to) == rank;
        Some(Self {
            layers: stage.layers[0] as usize..stage.layers[1] as usize,
            is_first: index == 0,
            is_last: index + 1 == stages.len(),
            taken_from,
            given_to: next.clone().filter(mine).collect(),
            ranks,
        })
    }
}

/// The hidden vectors of the stage before, `[rows, hidden_size]` for each residual stream.
pub(super) fn take<B: Backend>(step: &Step<'_, B>, from: u32) -> Result<B::Tensor, StepError> {
    let (rows, width) = (step.batch.tokens.len(), step.spec.residual_width());
    let mut bytes = Vec::new();
    step.ranks.group.receive(from, &mut bytes, step.ranks.deadline())?;
    let (floats, rest) = bytes.as_chunks::<4>();
    if floats.len() != rows * width || !rest.is_empty() {
        return Err(StepError::Group(GroupError::OutOfStep {
            rank: from,
            expected: format!("hidden vectors of {rows} tokens, {} bytes", rows * width * 4),
            found: format!("{} bytes", bytes.len()),
        }));
    }
    let values = floats.iter().map(|four| f32::from_le_bytes(*four)).collect();
    Ok(step.backend.tensor(values, width))
}

/// Gives hidden vectors to ranks of the next stage.
pub(super) fn give<B: Backend>(
    step: &Step<'_, B>,
    x: B::Tensor,
    to: &[u32],
) -> Result<(), StepError> {
    let values = step.backend.read(x, step.ranks)?;
    for rank in to {
        step.ranks.group.send(*rank, values.as_bytes(), step.ranks.deadline())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardpack_manifests::layout::Stages;

    use super::*;

    /// Of every rank whom it takes from and whom it gives to.
    fn ways(sizes: &[u32]) -> Vec<(Option<u32>, Vec<u32>)> {
        let mut first = 0;
        let stage = |(index, size): (u32, &u32)| {
            first += size;
            Stage { layers: [index, index + 1], ranks: [first - size, first] }
        };
        let stages = Stages((0..).zip(sizes).map(stage).collect());
        let ranks = sizes.iter().sum();
        let (axes, q_to_kv) = (BTreeMap::new(), Vec::new());
        let layout = Layout { ranks, stages, axes, q_to_kv, embedding_cut: false };
        let place = |rank| Place::new(&layout, rank).unwrap();
        (0..ranks).map(place).map(|place| (place.taken_from, place.given_to)).collect()
    }

    #[test]
    fn every_rank_is_given_what_one_of_the_stage_before_has() {
        let none = Vec::new;
        let two = [(None, vec![2]), (None, vec![3]), (Some(0), none()), (Some(1), none())];
        assert_eq!(ways(&[2, 2]), two);
        assert_eq!(ways(&[1, 1, 1])[1], (Some(0), vec![2]));
        let wide = [(None, vec![1, 2]), (Some(0), none()), (Some(0), none())];
        assert_eq!(ways(&[1, 2]), wide);
        let narrow = [(None, vec![2]), (None, none()), (Some(0), none())];
        assert_eq!(ways(&[2, 1]), narrow);
    }
}
