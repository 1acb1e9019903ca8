//! Gradients against slopes: the loss is computed beside each parameter.

use std::{collections::BTreeMap, io};

use shardpack_engine_api::TokenId;

use super::*;
use crate::testing::{
    mlx::mlx,
    package::{Recipe, Weights},
    streams::InMemory,
};

#[derive(Clone, Default)]
struct Stages(BTreeMap<usize, Vec<f32>>);

impl LearnedStages for Stages {
    fn read(&mut self, stage: usize) -> io::Result<Option<Vec<f32>>> {
        Ok(self.0.get(&stage).cloned())
    }

    fn write(&mut self, stage: usize, values: &[f32]) -> io::Result<()> {
        self.0.insert(stage, values.to_vec());
        Ok(())
    }
}

/// How far a parameter is moved to either side, in steps of its group.
const BESIDE: f32 = 0.02;

/// Computes and keeps nothing that a step does.
const STANDING: Rate = Rate { number: 1, size: 0.0 };

fn check(model: &'static str) {
    let Some(mlx) = mlx() else { return };
    let mlx = mlx.exact();
    let folder = tempfile::tempdir().unwrap();
    let teacher = Recipe::plain(model, 1).write(&folder.path().join("16")).remove(0);
    let weights = Weights::Affine { bits: 4, group: 32 };
    let student = Recipe { weights, ..Recipe::plain(model, 1) };
    let student = student.write(&folder.path().join("4")).remove(0);
    let sequences: Vec<Vec<TokenId>> =
        (0..2).map(|at| (0..9 + at).map(|k| TokenId((7 * k + at) % 50 + 1)).collect()).collect();
    let run = DistillationRun::open([&teacher, &student], &sequences, &mlx, 1).unwrap();
    let mut reference = InMemory::default();
    run.teach_embedding(&mut reference).unwrap();
    for layer in 0..run.layers() {
        reference.turn();
        run.teach_layer(layer, &mut reference, &mut |_| ()).unwrap();
    }
    reference.turn();

    let mut stages = Stages::default();
    let mut loss =
        |stages: &mut Stages| run.step(&[0, 1], &mut reference, stages, STANDING).unwrap();
    let before = loss(&mut stages);
    assert!(before > 0.0, "{before}");
    let mut compared = 0;
    for stage in [0, 1, run.layers()] {
        let mut start = 0;
        for matrix in run.stage(stage, &mut stages).unwrap() {
            let groups = matrix.params(None).scales.len();
            // Moves of scales and of middles, then the means of both: a tenth of the gradients.
            for at in [groups / 3, groups + groups / 2] {
                let gradient = f64::from(stages.0[&stage][start + 2 * groups + at]) * 10.0;
                let beside = [BESIDE, -BESIDE].map(|move_| {
                    let mut stages = stages.clone();
                    stages.0.get_mut(&stage).unwrap()[start + at] = move_;
                    loss(&mut stages)
                });
                let slope = (beside[0] - beside[1]) / f64::from(2.0 * BESIDE);
                // Losses are sums in f32.
                let limit = 0.03 * slope.abs() + 2e-6 * before / f64::from(BESIDE);
                let name = matrix.module();
                assert!((slope - gradient).abs() < limit, "{name} {at}: {gradient}, slope {slope}");
                compared += usize::from(slope.abs() > 10.0 * limit);
            }
            start += 6 * groups;
        }
    }
    assert!(compared >= 6, "{compared} slopes were large enough to tell anything");
}

#[test]
fn mlx_gradients_are_slopes_with_a_tied_head() {
    check("llama-tied");
}

#[test]
fn mlx_gradients_are_slopes_with_norms_of_heads() {
    check("qwen3");
}
