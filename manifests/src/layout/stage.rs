//! Pipeline stages: which ranks run which layers.

use std::ops::{Deref, Range};

use serde::{Deserialize, Serialize};

/// Feature that a package of a staged set requires of its reader: one that does not know it would
/// miss the other stages' layers.
pub const STAGES_FEATURE: &str = "stages";

/// Consecutive layers and the consecutive ranks that run them together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// First layer, and one past the last.
    pub layers: [u32; 2],
    /// First rank, and one past the last.
    pub ranks: [u32; 2],
}

impl Stage {
    /// Its layers.
    #[must_use]
    pub const fn layer_range(&self) -> Range<u32> {
        self.layers[0]..self.layers[1]
    }

    /// Its ranks.
    #[must_use]
    pub const fn rank_range(&self) -> Range<u32> {
        self.ranks[0]..self.ranks[1]
    }
}

/// The stages of a set in the order in which they run; none where every rank runs all layers. The
/// embedding belongs to the first, the last norm and the output head to the last; where the
/// embedding is the head too, both hold it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stages(pub Vec<Stage>);

impl Deref for Stages {
    type Target = [Stage];

    fn deref(&self) -> &[Stage] {
        &self.0
    }
}

impl Stages {
    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The stage of a rank.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Option<usize> {
        self.iter().position(|stage| stage.rank_range().contains(&rank))
    }

    /// The stage of a layer.
    #[must_use]
    pub fn of_layer(&self, layer: u32) -> Option<usize> {
        self.iter().position(|stage| stage.layer_range().contains(&layer))
    }

    /// Says what is wrong with the stages of a model of so many layers on so many ranks, if
    /// something is: each must have layers and ranks, and each layer and rank a stage.
    pub fn check(&self, layers: u32, ranks: u32) -> Result<(), String> {
        let (Some(first), Some(last)) = (self.first(), self.last()) else { return Ok(()) };
        let (starts, ends) = (first.layers[0].max(first.ranks[0]), [last.layers[1], last.ranks[1]]);
        if starts != 0 || ends != [layers, ranks] {
            return Err(format!("they do not cover {layers} layers and {ranks} ranks"));
        }
        for (index, stage) in self.iter().enumerate() {
            if stage.layer_range().is_empty() || stage.rank_range().is_empty() {
                return Err(format!("stage {index} has no layers or no ranks"));
            }
            let next = self.get(index + 1);
            let follows =
                |next: &Stage| next.layers[0] == stage.layers[1] && next.ranks[0] == stage.ranks[1];
            if !next.is_none_or(follows) {
                return Err(format!("stage {} does not follow stage {index}", index + 1));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(all: &[[[u32; 2]; 2]]) -> Stages {
        Stages(all.iter().map(|[layers, ranks]| Stage { layers: *layers, ranks: *ranks }).collect())
    }

    #[test]
    fn stages_cover_layers_and_ranks_once_and_in_order() {
        let good = stages(&[[[0, 3], [0, 2]], [[3, 7], [2, 4]]]);
        assert_eq!(good.check(7, 4), Ok(()));
        assert_eq!(Stages::default().check(7, 4), Ok(()));
        assert_eq!((good.of_rank(1), good.of_rank(2), good.of_rank(4)), (Some(0), Some(1), None));
        assert_eq!(
            (good.of_layer(2), good.of_layer(3), good.of_layer(7)),
            (Some(0), Some(1), None)
        );
        for bad in [
            stages(&[[[0, 3], [0, 2]]]),
            stages(&[[[0, 7], [0, 2]]]),
            stages(&[[[1, 7], [0, 4]]]),
            stages(&[[[0, 3], [0, 2]], [[4, 7], [2, 4]]]),
            stages(&[[[0, 3], [0, 2]], [[3, 7], [1, 4]]]),
            stages(&[[[0, 7], [0, 2]], [[7, 7], [2, 4]]]),
            stages(&[[[0, 3], [0, 4]], [[3, 7], [4, 4]]]),
            stages(&[[[0, 9], [0, 2]], [[9, 7], [2, 4]]]),
        ] {
            assert!(bad.check(7, 4).is_err(), "{bad:?}");
        }
    }
}
