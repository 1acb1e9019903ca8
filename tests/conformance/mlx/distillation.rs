//! Every family can be distilled, or is refused in words.

use std::{collections::BTreeMap, io};

use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::Mlx,
    calibration::Streams,
    distillation::{DistillationError, DistillationRun, LearnedStages, Rate},
};
use shardpack_formats::memory::KvType;
use shardpack_mlx::runtime;
use tempfile::tempdir;

use super::{families, mlx, tokens};
use crate::{reference_models::write, skip::mlx_runtime};

/// Tokens of each family that are learned: its products are computed by a BLAS for reference here.
const TOKENS: usize = 8;

/// Far enough that the loss falls beyond its rounding, and near enough that its slope still holds.
const SIZE: f32 = 0.01;

#[derive(Default)]
struct InMemory {
    from: Vec<f32>,
    to: Vec<f32>,
}

impl Streams for InMemory {
    fn read(&mut self, _: usize) -> io::Result<Vec<f32>> {
        Ok(self.from.clone())
    }

    fn write(&mut self, _: usize, values: &[f32]) -> io::Result<()> {
        self.to = values.to_vec();
        Ok(())
    }
}

#[derive(Default)]
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

/// The divergence before a step and after it.
fn step(mlx: &Mlx, model: &std::path::Path) -> Result<[f64; 2], DistillationError> {
    let folder = tempdir().unwrap();
    let [teacher, student] = [16, 4].map(|bits| {
        let set = folder.path().join(bits.to_string());
        write(model, &set, bits, 1, ExpertSharding::Inside);
        set.join("node-0")
    });
    let sequence = tokens(model).into_iter().take(TOKENS).collect();
    let run = DistillationRun::open([&teacher, &student], &[sequence], mlx, 1)?;
    let mut reference = InMemory::default();
    run.teach_embedding(&mut reference)?;
    for layer in 0..run.layers() {
        reference.from = std::mem::take(&mut reference.to);
        run.teach_layer(layer, &mut reference, &mut |_| ())?;
    }
    reference.from = std::mem::take(&mut reference.to);
    let mut stages = Stages::default();
    let rate = Rate { number: 1, size: SIZE };
    let before = run.step(&[0], &mut reference, &mut stages, rate)?;
    let standing = Rate { number: 2, size: 0.0 };
    Ok([before, run.step(&[0], &mut reference, &mut stages, standing)?])
}

#[test]
fn mlx_distillation_lowers_the_divergence_of_every_family() {
    let Some(folder) = mlx_runtime(runtime::FOLDER) else { return };
    let mlx = mlx(&folder, KvType::F32).exact();
    let (mut lower, mut refused, mut worse) = (Vec::new(), Vec::new(), Vec::new());
    for model in families() {
        let name = model.file_name().unwrap().to_string_lossy().into_owned();
        match step(&mlx, &model) {
            Ok([before, after]) if after < before => lower.push(name),
            Ok([before, after]) => worse.push(format!("{name}: {before} before, {after} after")),
            Err(DistillationError::CrossLayerState | DistillationError::LinearAttention) => {
                refused.push(name);
            }
            Err(error) => worse.push(format!("{name}: {error:?}")),
        }
    }
    println!("lower: {}; refused: {}", lower.len(), refused.join(", "));
    assert!(worse.is_empty(), "{}", worse.join("\n"));
    assert!(lower.len() > 60, "{}", lower.len());
}
