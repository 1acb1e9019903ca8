//! What each stage has learned, in files: those of the last whole step, and beside them those of the step
//! that is being made. A run that is killed goes on after its last whole step.

use std::{
    fs,
    io::{self, Write as _},
    path::PathBuf,
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use shardpack_engine::distillation::LearnedStages;
use shardpack_manifests::Digest;

use crate::{commands::calibrate::work::WorkFolder, failure::Failure};

/// Bytes of a digest before the numbers of a stage.
const DIGEST_BYTES: usize = 32;

/// `steps.json`.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Steps {
    /// Steps that are whole.
    done: usize,
    /// KL divergence over the held-out tokens before the first.
    before: f64,
}

/// The files.
pub(super) struct StageFiles<'a> {
    work: &'a WorkFolder,
    steps: Option<Steps>,
}

impl<'a> StageFiles<'a> {
    /// Takes up what an earlier run has written.
    pub(super) fn open(work: &'a WorkFolder) -> Result<Self, Failure> {
        let path = work.path().join("steps.json");
        let shown = || path.display().to_string();
        let steps = match fs::read(&path) {
            Ok(bytes) => Some(serde_json::from_slice(&bytes).with_context(shown)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(anyhow::Error::from(error).context(shown()).into()),
        };
        Ok(Self { work, steps })
    }

    /// The KL divergence before the first step, once it is known.
    pub(super) fn before(&self) -> Option<f64> {
        self.steps.map(|it| it.before)
    }

    /// Steps that are whole.
    pub(super) fn done(&self) -> usize {
        self.steps.map_or(0, |it| it.done)
    }

    /// Notes that no step is made yet.
    pub(super) fn begin(&mut self, before: f64) -> Result<(), Failure> {
        self.keep(Steps { done: 0, before })
    }

    /// A step is whole: all stages are written.
    pub(super) fn commit(&mut self) -> Result<(), Failure> {
        let Some(Steps { done, before }) = self.steps else {
            return Err(anyhow::anyhow!("a step before the first").into());
        };
        self.keep(Steps { done: done + 1, before })
    }

    fn keep(&mut self, steps: Steps) -> Result<(), Failure> {
        let text = serde_json::to_vec(&steps).context("steps")?;
        self.work.replace(&self.work.path().join("steps.json"), &text)?;
        self.steps = Some(steps);
        Ok(())
    }

    fn path(&self, stage: usize, steps: usize) -> PathBuf {
        self.work.path().join(format!("params-{stage}-{}", steps % 2))
    }
}

impl LearnedStages for StageFiles<'_> {
    fn read(&mut self, stage: usize) -> io::Result<Option<Vec<f32>>> {
        if self.done() == 0 {
            return Ok(None);
        }
        let path = self.path(stage, self.done());
        let named = |problem: &dyn std::fmt::Display| {
            let folder = self.work.path().display();
            io::Error::other(format!("{}: {problem}; remove {folder}", path.display()))
        };
        let bytes = fs::read(&path).map_err(|error| named(&error))?;
        let (digest, numbers) = bytes
            .split_first_chunk::<DIGEST_BYTES>()
            .ok_or_else(|| named(&"it is shorter than it was written"))?;
        if Digest::of(numbers).0 != *digest {
            return Err(named(&"it is not what was written"));
        }
        let (floats, _) = numbers.as_chunks::<4>();
        Ok(Some(floats.iter().map(|four| f32::from_le_bytes(*four)).collect()))
    }

    fn write(&mut self, stage: usize, values: &[f32]) -> io::Result<()> {
        let numbers: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut file = fs::File::create(self.path(stage, self.done() + 1))?;
        file.write_all(&Digest::of(&numbers).0)?;
        file.write_all(&numbers)
    }
}
