//! Pipeline parallelism: the stage that a rank belongs to, and the transfer of hidden vectors between
//! stages.
//!
//! Every rank of a stage has the same hidden vectors after each layer's all-reduce, so each sends them
//! to its own counterparts of the next stage, all at the same time.

use std::ops::Range;

use shardpack_collectives::GroupError;
use shardpack_manifests::{Layout, layout::Stage};
use zerocopy::IntoBytes;

use super::step::ForwardPass;
use crate::backend::{Backend, StepError};

/// The stage of one rank in a pipeline of at least two stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineStage {
    /// Layers that are run here.
    pub layers: Range<usize>,
    /// Ranks that run them.
    pub ranks: Range<u32>,
    /// Whether the embedding is here.
    pub is_first: bool,
    /// Whether the output head is here.
    pub is_last: bool,
    /// The rank of the stage before that sends hidden vectors to this one.
    pub recv_from: Option<u32>,
    /// Ranks of the next stage that this one sends its hidden vectors to.
    pub send_to: Vec<u32>,
}

impl PipelineStage {
    /// The stage of `rank`; none where every rank runs all layers.
    pub(super) fn new(layout: &Layout, rank: u32) -> Option<Self> {
        let stages = &layout.stages;
        let index = stages.of_rank(rank).filter(|_| stages.len() > 1)?;
        let stage = &stages[index];
        // Counterparts go round where stages have different numbers of ranks.
        let sender = |sending: &Range<u32>, receiving: &Range<u32>, rank: u32| {
            sending.start + (rank - receiving.start) % sending.len() as u32
        };
        let ranks = stage.rank_range();
        let before = index.checked_sub(1).map(|before| stages[before].rank_range());
        let recv_from = before.map(|before| sender(&before, &ranks, rank));
        let next = stages.get(index + 1).map_or(0..0, Stage::rank_range);
        let mine = |to: &u32| sender(&ranks, &next, *to) == rank;
        Some(Self {
            layers: stage.layers[0] as usize..stage.layers[1] as usize,
            is_first: index == 0,
            is_last: index + 1 == stages.len(),
            recv_from,
            send_to: next.clone().filter(mine).collect(),
            ranks,
        })
    }
}

/// Receives the hidden vectors of the stage before, `[rows, hidden_size]` for each residual stream.
pub(super) fn recv<B: Backend>(
    pass: &ForwardPass<'_, B>,
    from: u32,
) -> Result<B::Tensor, StepError> {
    let (rows, width) = (pass.batch.tokens.len(), pass.spec.residual_width());
    let mut bytes = Vec::new();
    pass.ranks.group.receive(from, &mut bytes, pass.ranks.deadline())?;
    let (floats, rest) = bytes.as_chunks::<4>();
    if floats.len() != rows * width || !rest.is_empty() {
        return Err(StepError::Group(GroupError::OutOfStep {
            rank: from,
            expected: format!("hidden vectors of {rows} tokens, {} bytes", rows * width * 4),
            found: format!("{} bytes", bytes.len()),
        }));
    }
    let values = floats.iter().map(|four| f32::from_le_bytes(*four)).collect();
    Ok(pass.backend.tensor(values, width))
}

/// Sends hidden vectors to ranks of the next stage.
pub(super) fn send<B: Backend>(
    pass: &ForwardPass<'_, B>,
    x: B::Tensor,
    to: &[u32],
) -> Result<(), StepError> {
    let values = pass.backend.read(x, pass.ranks)?;
    for rank in to {
        pass.ranks.group.send(*rank, values.as_bytes(), pass.ranks.deadline())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shardpack_manifests::layout::Stages;

    use super::*;

    /// Of every rank whom it receives from and whom it sends to.
    fn transfers(sizes: &[u32]) -> Vec<(Option<u32>, Vec<u32>)> {
        let mut first = 0;
        let stage = |(index, size): (u32, &u32)| {
            first += size;
            Stage { layers: [index, index + 1], ranks: [first - size, first] }
        };
        let stages = Stages((0..).zip(sizes).map(stage).collect());
        let ranks = sizes.iter().sum();
        let (axes, q_to_kv) = (BTreeMap::new(), Vec::new());
        let layout = Layout { ranks, stages, axes, q_to_kv, embedding_sharded: false };
        let stage_of = |rank| PipelineStage::new(&layout, rank).unwrap();
        (0..ranks).map(stage_of).map(|stage| (stage.recv_from, stage.send_to)).collect()
    }

    #[test]
    fn every_rank_receives_from_one_of_the_stage_before() {
        let none = Vec::new;
        let two = [(None, vec![2]), (None, vec![3]), (Some(0), none()), (Some(1), none())];
        assert_eq!(transfers(&[2, 2]), two);
        assert_eq!(transfers(&[1, 1, 1])[1], (Some(0), vec![2]));
        let wide = [(None, vec![1, 2]), (Some(0), none()), (Some(0), none())];
        assert_eq!(transfers(&[1, 2]), wide);
        let narrow = [(None, vec![2]), (None, none()), (Some(0), none())];
        assert_eq!(transfers(&[2, 1]), narrow);
    }
}
