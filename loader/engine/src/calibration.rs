//! Second moments of what every matrix reads over a calibration text: all sequences pass through one
//! layer, whose moments are then complete, before the next one is loaded.
//!
//! Memory holds one layer, its moments and one sequence; where the hidden states of the others are
//! kept is the caller's. Results do not depend on the number of threads: sums over a sequence are the
//! kernels', and sequences are added in order.

mod moments;
mod sensitivity;

use std::{io, path::Path, sync::Arc};

use shardpack_collectives::Group;
use shardpack_engine_api::TokenId;
use shardpack_formats::Spec;
use shardpack_manifests::{Manifest, manifest::TensorEntry};

use crate::{
    backend::{Cpu, CpuError, Ranks, StepError, TensorParallel as _, Tensors as _},
    engine::{EngineOptions, memory_group},
    loading::{OpenError, OpenOptions, Package},
    model::{Batch, CrossLayerState, LayerwiseModel, LoadError},
};
use moments::MomentSums;
pub use moments::{Moments, float_bytes, float_bytes_mut};
pub use sensitivity::{Round, RoundingError, SensitivityRun};

/// Why a model cannot be calibrated.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationRunError {
    /// The package cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The package holds no model that can be run.
    #[error("cannot load the package")]
    Load(#[from] LoadError),
    /// A package of several ranks.
    #[error(
        "the package is rank {rank} of {ranks}: calibration needs the whole model; reshard the set for one node"
    )]
    Sharded {
        /// The package's rank.
        rank: u32,
        /// Ranks of its set.
        ranks: u32,
    },
    /// A token that the model does not have, or a sequence that is too long.
    #[error("the model does not take these tokens: {0}")]
    Tokens(String),
    /// There is no backend.
    #[error("cannot compute on this machine")]
    Backend(#[from] CpuError),
    /// A step failed.
    #[error("the step failed")]
    Step(#[from] StepError),
    /// Hidden states cannot be kept.
    #[error("cannot keep the hidden vectors")]
    Keep(#[from] io::Error),
    /// The model's answers are no numbers when this module is rounded, or before.
    #[error(
        "the logits are not finite with {module:?} rounded: compare the model at 16 bits with its publisher's"
    )]
    NotFinite {
        /// The module.
        module: String,
    },
    /// A matrix cannot be rounded.
    #[error("cannot round a matrix")]
    Round(#[source] RoundingError),
}

/// Where the hidden states of all sequences are between two layers.
pub trait Streams {
    /// The stream of a sequence as it was written last, or by the stage before.
    fn read(&mut self, sequence: usize) -> io::Result<Vec<f32>>;
    /// Takes the stream of the next sequence in order.
    fn write(&mut self, sequence: usize, values: &[f32]) -> io::Result<()>;
}

/// A model that is calibrated.
pub struct CalibrationRun<'a> {
    directory: &'a Path,
    threads: usize,
    backend: Cpu,
    group: Arc<dyn Group>,
    sums: Arc<MomentSums>,
    sequences: Vec<Batch>,
    states: Vec<CrossLayerState<Cpu>>,
    model: LayerwiseModel<Cpu>,
    manifest: Manifest,
}

/// Whether layers hand something to later ones apart from the residual stream.
pub(crate) fn hands_over_more_than_the_stream(spec: &Spec) -> bool {
    spec.layers.iter().any(|layer| layer.reuses_top_k)
        || spec.moe.as_ref().is_some_and(|moe| moe.shortcut)
}

/// Whether a tensor belongs to a layer.
pub(crate) fn layer_of(tensor: &TensorEntry) -> Option<usize> {
    tensor.name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

/// Refuses what is no whole model, and sequences that it does not take.
pub(crate) fn check_tokens(
    manifest: &Manifest,
    sequences: &[Vec<TokenId>],
) -> Result<(), CalibrationRunError> {
    if manifest.layout.ranks != 1 {
        let (rank, ranks) = (manifest.rank, manifest.layout.ranks);
        return Err(CalibrationRunError::Sharded { rank, ranks });
    }
    let spec = &manifest.architecture;
    for sequence in sequences {
        if sequence.len() > spec.max_positions as usize {
            let why = format!("{} are more than {}", sequence.len(), spec.max_positions);
            return Err(CalibrationRunError::Tokens(why));
        }
        if let Some(token) = sequence.iter().find(|token| token.0 >= spec.vocab_size) {
            return Err(CalibrationRunError::Tokens(format!("token {} is unknown", token.0)));
        }
    }
    Ok(())
}

impl<'a> CalibrationRun<'a> {
    /// Opens the package of a whole model, to run `sequences` through it.
    pub fn open(
        directory: &'a Path,
        sequences: &[Vec<TokenId>],
        threads: usize,
    ) -> Result<Self, CalibrationRunError> {
        let sums = Arc::new(MomentSums::default());
        let backend = Cpu::new(threads)?.with_observer(Arc::clone(&sums) as _);
        let options = OpenOptions::stored(threads);
        let outside = Package::open_some(directory, &options, &|it| layer_of(it).is_none())?;
        let manifest = outside.manifest().clone();
        check_tokens(&manifest, sequences)?;
        let model = LayerwiseModel::load(&outside, &backend)?;
        sums.name(&outside);
        let states = sequences.iter().map(|_| CrossLayerState::default()).collect();
        let sequences = sequences.iter().map(|tokens| whole_sequence(tokens)).collect();
        let group = memory_group(1)?.remove(0);
        Ok(Self { directory, threads, backend, group, sums, sequences, states, model, manifest })
    }

    /// The package's manifest.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.manifest.architecture.layers.len()
    }

    /// Whether layers hand something to later ones apart from the residual stream: such a model is run
    /// from its beginning.
    #[must_use]
    pub fn has_cross_layer_state(&self) -> bool {
        hands_over_more_than_the_stream(&self.manifest.architecture)
    }

    /// Numbers of a sequence's residual stream.
    #[must_use]
    pub fn stream_len(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens.len() * self.manifest.architecture.residual_width()
    }

    /// Number of sequences.
    #[must_use]
    pub const fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Writes the streams before the first layer.
    pub fn embed(&self, streams: &mut dyn Streams) -> Result<(), CalibrationRunError> {
        for (index, batch) in self.sequences.iter().enumerate() {
            let values = self.in_step(|ranks| {
                let x = self.model.embed(&self.backend, batch, ranks)?;
                self.backend.read(x, ranks)
            })?;
            streams.write(index, &values)?;
        }
        Ok(())
    }

    /// Runs all sequences through a layer; the moments of what its matrices read.
    pub fn layer(
        &mut self,
        index: usize,
        streams: &mut dyn Streams,
        note: &mut dyn FnMut(usize),
    ) -> Result<Vec<Moments>, CalibrationRunError> {
        let options = OpenOptions::stored(self.threads);
        let wanted = |tensor: &TensorEntry| layer_of(tensor) == Some(index);
        let package = Package::open_some(self.directory, &options, &wanted)?;
        let layer = self.model.layer(&package, &self.backend, index)?;
        self.sums.name(&package);
        let width = self.manifest.architecture.residual_width();
        let mut states = std::mem::take(&mut self.states);
        for (sequence, (batch, state)) in self.sequences.iter().zip(&mut states).enumerate() {
            let x = self.backend.tensor(streams.read(sequence)?, width);
            let values = self.in_step(|ranks| {
                let layer = (&layer, &mut *state);
                let x = self.model.forward(&self.backend, layer, batch, x, ranks)?;
                self.backend.read(x, ranks)
            })?;
            streams.write(sequence, &values)?;
            note(sequence + 1);
        }
        self.states = states;
        Ok(self.sums.take())
    }

    /// The moments of what the head reads after the last layer.
    pub fn head(&self, streams: &mut dyn Streams) -> Result<Vec<Moments>, CalibrationRunError> {
        // Its products would be most of the work, and nobody reads them.
        let tied = self.manifest.architecture.tied_embeddings;
        let head = if tied { "model.embed_tokens" } else { "lm_head" };
        let hidden = self.manifest.architecture.hidden_size as usize;
        let width = self.manifest.architecture.residual_width();
        for (sequence, batch) in self.sequences.iter().enumerate() {
            let x = self.backend.tensor(streams.read(sequence)?, width);
            self.in_step(|ranks| {
                let inputs = self.model.head_inputs(&self.backend, batch, &x, ranks);
                self.sums.add(head, hidden, &self.backend.read(inputs, ranks)?);
                Ok(())
            })?;
        }
        Ok(self.sums.take())
    }

    fn in_step<R: Send>(
        &self,
        work: impl FnOnce(&Ranks<'_>) -> Result<R, StepError> + Send,
    ) -> Result<R, StepError> {
        self.sums.begin();
        in_step(&self.backend, self.group.as_ref(), work)
    }
}

/// Runs work as a step of a model that is on one rank.
fn in_step<R: Send>(
    backend: &Cpu,
    group: &dyn Group,
    work: impl FnOnce(&Ranks<'_>) -> Result<R, StepError> + Send,
) -> Result<R, StepError> {
    let timeout = EngineOptions::STANDARD.collective_timeout;
    let ranks = Ranks::all(group, timeout);
    backend.run(|| work(&ranks))
}

/// A whole sequence as one step.
pub(crate) fn whole_sequence(tokens: &[TokenId]) -> Batch {
    Batch {
        tokens: tokens.iter().map(|token| token.0).collect(),
        positions: (0..tokens.len() as u32).collect(),
        lengths: vec![tokens.len()],
        totals: vec![tokens.len() as u32],
        ..Batch::default()
    }
}

#[cfg(test)]
mod tests;
