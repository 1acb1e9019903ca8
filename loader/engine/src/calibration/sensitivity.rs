//! How far the model's answers move when one matrix is rounded: every rounded matrix makes a variant of
//! the model, whose hidden states branch off at its layer and pass through all later ones with the others.
//!
//! Memory holds one layer and one sequence; the hidden states of all variants are the caller's, as those of
//! a calibration are. A layer is loaded once for all of them.

use std::{error::Error, io, path::Path, sync::Arc};

use shardpack_collectives::Group;
use shardpack_engine_api::TokenId;
use shardpack_manifests::{Manifest, manifest::TensorEntry};

use super::{CalibrationRunError, Streams, check_tokens, in_step, layer_of, whole_sequence};
use crate::{
    backend::{Cpu, Ranks, StepError, TensorParallel as _, Tensors as _},
    engine::memory_group,
    loading::{OpenOptions, Package, PackageTensor},
    model::{Batch, CrossLayerState, LayerwiseModel, LoadedLayer},
};

/// Rows whose logits are computed at once.
const ROWS: usize = 64;

const EMBEDDING: &str = "model.embed_tokens";

/// Why a matrix was not rounded.
pub type RoundingError = Box<dyn Error + Send + Sync>;

/// Rounds the matrix of a module: its bytes as they read back, in the same type; none of what is never
/// quantized.
pub type Round<'a> = dyn FnMut(&str, &PackageTensor) -> Result<Option<Vec<u8>>, RoundingError> + 'a;

/// A model of which each matrix is rounded by itself.
///
/// Streams are those of all sequences of the unquantized model, then those of each variant's.
pub struct SensitivityRun<'a> {
    directory: &'a Path,
    threads: usize,
    backend: Cpu,
    group: Arc<dyn Group>,
    sequences: Vec<Batch>,
    model: LayerwiseModel<Cpu>,
    manifest: Manifest,
}

impl<'a> SensitivityRun<'a> {
    /// Opens the package of a whole model that hands nothing from layer to layer but the residual
    /// stream, to run `sequences` through it.
    pub fn open(
        directory: &'a Path,
        sequences: &[Vec<TokenId>],
        threads: usize,
    ) -> Result<Self, CalibrationRunError> {
        let backend = Cpu::new(threads)?;
        let outside = outside(directory, threads)?;
        let manifest = outside.manifest().clone();
        check_tokens(&manifest, sequences)?;
        let model = LayerwiseModel::load(&outside, &backend)?;
        let sequences = sequences.iter().map(|tokens| whole_sequence(tokens)).collect();
        let group = memory_group(1)?.remove(0);
        Ok(Self { directory, threads, backend, group, sequences, model, manifest })
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.manifest.architecture.layers.len()
    }

    /// Numbers of each sequence's residual stream.
    #[must_use]
    pub fn stream_lengths(&self) -> Vec<usize> {
        let width = self.manifest.architecture.residual_width();
        self.sequences.iter().map(|batch| batch.tokens.len() * width).collect()
    }

    /// Writes the streams before the first layer, and those of the model with a rounded embedding.
    /// Returns the modules of the variants.
    pub fn embed(
        &self,
        streams: &mut dyn Streams,
        round: &mut Round<'_>,
    ) -> Result<Vec<String>, CalibrationRunError> {
        let mut place = 0;
        self.embed_all(&self.model, &mut place, streams)?;
        let mut package = outside(self.directory, self.threads)?;
        if !replace(&mut package, EMBEDDING, round)? {
            return Ok(Vec::new());
        }
        let rounded = LayerwiseModel::load(&package, &self.backend)?;
        self.embed_all(&rounded, &mut place, streams)?;
        Ok(vec![EMBEDDING.to_owned()])
    }

    fn embed_all(
        &self,
        model: &LayerwiseModel<Cpu>,
        place: &mut usize,
        streams: &mut dyn Streams,
    ) -> Result<(), CalibrationRunError> {
        for batch in &self.sequences {
            let values = self.in_step(|ranks| {
                let x = model.embed(&self.backend, batch, ranks)?;
                self.backend.read(x, ranks)
            })?;
            streams.write(*place, &values)?;
            *place += 1;
        }
        Ok(())
    }

    /// Runs all streams of the model and its `variants` through a layer, then the model's own through
    /// that layer with each of its matrices rounded. Returns the modules of the new variants.
    pub fn layer(
        &self,
        index: usize,
        variants: usize,
        streams: &mut dyn Streams,
        round: &mut Round<'_>,
        note: &mut dyn FnMut(),
    ) -> Result<Vec<String>, CalibrationRunError> {
        let options = OpenOptions::stored(self.threads);
        let wanted = |tensor: &TensorEntry| layer_of(tensor) == Some(index);
        let mut package = Package::open_some(self.directory, &options, &wanted)?;
        let layer = self.model.layer(&package, &self.backend, index)?;
        let count = self.sequences.len();
        let mut place = 0;
        while place < (1 + variants) * count {
            let x = self.forward(&layer, place % count, streams.read(place)?)?;
            streams.write(place, &x)?;
            place += 1;
            note();
        }
        drop(layer);
        let mut found = Vec::new();
        let modules = self.manifest.tensors.iter().filter(|tensor| wanted(tensor));
        for module in modules.filter_map(|tensor| tensor.name.strip_suffix(".weight")) {
            let name = format!("{module}.weight");
            let Some(own) = package.tensor(&name).cloned() else { continue };
            if !replace(&mut package, module, round)? {
                continue;
            }
            let layer = self.model.layer(&package, &self.backend, index)?;
            for sequence in 0..count {
                let x = self.forward(&layer, sequence, streams.read(sequence)?)?;
                streams.write(place, &x)?;
                place += 1;
                note();
            }
            found.push(module.to_owned());
            drop(layer);
            package.replace(&name, own.bytes());
        }
        Ok(found)
    }

    /// The mean KL divergence in nats of each variant from the model, over all rows: of `variants` in
    /// order, then of the model whose head alone is rounded, if it is not the embedding. `note` is called
    /// for each sequence of each.
    pub fn divergences(
        &self,
        variants: &[String],
        streams: &mut dyn Streams,
        round: &mut Round<'_>,
        note: &mut dyn FnMut(),
    ) -> Result<Vec<(String, f64)>, CalibrationRunError> {
        let tied = self.manifest.architecture.tied_embeddings;
        let head = if tied { EMBEDDING } else { "lm_head" };
        let mut package = outside(self.directory, self.threads)?;
        let rounded_head = replace(&mut package, head, round)?
            .then(|| LayerwiseModel::load(&package, &self.backend))
            .transpose()?;
        let mut sums: Vec<(String, f64)> =
            variants.iter().map(|module| (module.clone(), 0.0)).collect();
        if !tied && rounded_head.is_some() {
            sums.push((head.to_owned(), 0.0));
        }
        let count = self.sequences.len();
        let mut rows = 0;
        for (sequence, batch) in self.sequences.iter().enumerate() {
            let own = self.logits(&self.model, batch, &streams.read(sequence)?)?;
            rows += batch.tokens.len();
            for (variant, (module, sum)) in sums.iter_mut().enumerate() {
                let is_head = module == head;
                let place =
                    if is_head && !tied { sequence } else { (1 + variant) * count + sequence };
                let model = rounded_head.as_ref().filter(|_| is_head).unwrap_or(&self.model);
                let other = self.logits(model, batch, &streams.read(place)?)?;
                let vocab = own.len() / batch.tokens.len();
                let pairs = own.chunks_exact(vocab).zip(other.chunks_exact(vocab));
                *sum += pairs.map(|(own, other)| divergence(own, other)).sum::<f64>();
                note();
            }
        }
        for (module, sum) in &mut sums {
            *sum /= rows as f64;
            if !sum.is_finite() {
                return Err(CalibrationRunError::NotFinite { module: module.clone() });
            }
        }
        Ok(sums)
    }

    fn forward(
        &self,
        layer: &LoadedLayer<Cpu>,
        sequence: usize,
        x: Vec<f32>,
    ) -> Result<Vec<f32>, StepError> {
        let x = self.backend.tensor(x, self.manifest.architecture.residual_width());
        self.in_step(|ranks| {
            let layer = (layer, &mut CrossLayerState::default());
            let batch = &self.sequences[sequence];
            let x = self.model.forward(&self.backend, layer, batch, x, ranks)?;
            self.backend.read(x, ranks)
        })
    }

    /// Logits of all rows.
    fn logits(
        &self,
        model: &LayerwiseModel<Cpu>,
        batch: &Batch,
        x: &[f32],
    ) -> Result<Vec<f32>, StepError> {
        let x = self.backend.tensor(x.to_vec(), self.manifest.architecture.residual_width());
        let all: Vec<usize> = (0..batch.tokens.len()).collect();
        let mut out = Vec::new();
        for rows in all.chunks(ROWS) {
            out.extend(self.in_step(|ranks| {
                let logits = model.logits(&self.backend, batch, &x, rows, ranks);
                self.backend.read(logits, ranks)
            })?);
        }
        Ok(out)
    }

    fn in_step<R: Send>(
        &self,
        work: impl FnOnce(&Ranks<'_>) -> Result<R, StepError> + Send,
    ) -> Result<R, StepError> {
        in_step(&self.backend, self.group.as_ref(), work)
    }
}

/// What belongs to no layer.
fn outside(directory: &Path, threads: usize) -> Result<Package, CalibrationRunError> {
    let options = OpenOptions::stored(threads);
    Ok(Package::open_some(directory, &options, &|it| layer_of(it).is_none())?)
}

/// Puts a rounded matrix in the place of a package's own; whether there is one.
fn replace(
    package: &mut Package,
    module: &str,
    round: &mut Round<'_>,
) -> Result<bool, CalibrationRunError> {
    let name = format!("{module}.weight");
    let Some(own) = package.tensor(&name).cloned() else { return Ok(false) };
    let rounded = round(module, &own).map_err(CalibrationRunError::Round)?;
    let Some(rounded) = rounded else { return Ok(false) };
    if rounded.len() != own.bytes().len() {
        let (found, expected) = (rounded.len(), own.bytes().len());
        let problem = format!("{module}: {found} bytes come of {expected}");
        return Err(CalibrationRunError::Keep(io::Error::other(problem)));
    }
    package.replace(&name, &rounded);
    Ok(true)
}

/// `Σ p · (ln p − ln q)` of two rows of logits.
fn divergence(own: &[f32], other: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        most + row.iter().map(|it| (f64::from(*it) - most).exp()).sum::<f64>().ln()
    };
    let [own_sum, other_sum] = [log_sum(own), log_sum(other)];
    let terms = own.iter().zip(other).map(|(own, other)| {
        let [own, other] = [f64::from(*own) - own_sum, f64::from(*other) - other_sum];
        own.exp() * (own - other)
    });
    let sum: f64 = terms.sum();
    // Rounding may lead below zero; what is no number stays so.
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_the_distributions() {
        let [p, q] = [[0.5_f32, 0.25, 0.25], [0.25, 0.5, 0.25]];
        // Logits are logarithms up to a constant.
        let logits = |row: [f32; 3], shift: f32| row.map(|it| it.ln() + shift);
        let expected = 0.25 * 2_f64.ln();
        let found = divergence(&logits(p, 3.0), &logits(q, -7.0));
        assert!((found - expected).abs() < 1e-6, "{found}");
        assert!(divergence(&logits(p, 1.0), &logits(p, 1.0)) < 1e-12);
        assert!(divergence(&[f32::NAN, 0.0], &[0.0, 0.0]).is_nan(), "no divergence at all");
    }
}
