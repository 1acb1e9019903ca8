//! Scales and biases of a quantized model, tuned so that its answers are those of the model at 16 bits
//! (mlx-lm calls it DWQ): gradient descent on the KL divergence of the logits, integers as they are.
//!
//! A step passes some sequences through the quantized model layer by layer and keeps what each layer
//! read, then goes back: each layer is loaded again, computed again from what it read, and
//! differentiated by MLX. Memory holds one layer in f32, its gradients, and the hidden states of a
//! step; the parameters of the others are the caller's to keep. The answers of the model at 16 bits are
//! the hidden states after its last layer, computed once.

mod params;

use std::{io, path::Path, sync::Arc};

use shardpack_collectives::Group;
use shardpack_engine_api::TokenId;
use shardpack_manifests::{Manifest, manifest::MatrixFormat, manifest::TensorEntry};
use shardpack_quantize::Dtype;

use crate::{
    backend::{
        Mlx, Ranks, StepError, TensorParallel as _, Tensors as _,
        mlx::{GroupParams, PartGradients, PartInput, Substitute, Tensor},
    },
    calibration::{
        CalibrationRunError, Streams, check_tokens, hands_over_more_than_the_stream, layer_of,
        whole_sequence,
    },
    engine::{EngineOptions, memory_group},
    loading::{OpenError, OpenOptions, Package},
    model::{Batch, CrossLayerState, LayerwiseModel, LoadError},
};
pub use params::{LearnedMatrix, Rate};

/// Logits that are computed at once, in numbers.
const LOGITS_AT_ONCE: usize = 16 << 20;

/// Why a model cannot be distilled.
#[derive(Debug, thiserror::Error)]
pub enum DistillationError {
    /// A package cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A package holds no model that can be run.
    #[error("cannot load the package")]
    Load(#[from] LoadError),
    /// Sequences that the model does not take, or a package of several ranks.
    #[error(transparent)]
    Tokens(CalibrationRunError),
    /// A model whose layers are not run by themselves.
    #[error(
        "layers of this architecture hand more to each other than the residual stream, and are not differentiated one by one; use --rounding gptq"
    )]
    CrossLayerState,
    /// A model with layers that have no gradients.
    #[error(
        "layers of this architecture have linear attention, whose kernels have no gradients yet; use --rounding gptq"
    )]
    LinearAttention,
    /// Nothing to learn.
    #[error("no matrix is in affine groups: there are no scales to tune")]
    NothingToLearn,
    /// The answers are no numbers.
    #[error(
        "the KL divergence from the model at 16 bits is not finite: compare that model with its publisher's"
    )]
    NotFinite,
    /// A step failed.
    #[error("the step failed")]
    Step(#[from] StepError),
    /// Hidden states or parameters cannot be kept.
    #[error("cannot keep what is learned")]
    Keep(#[from] io::Error),
}

/// Where the parameters of each stage are between uses: stage 0 has what belongs to no layer, stage
/// `1 + i` has layer `i`.
pub trait LearnedStages {
    /// The numbers of a stage as they were written last; none before.
    fn read(&mut self, stage: usize) -> io::Result<Option<Vec<f32>>>;
    /// Takes the numbers of a stage.
    fn write(&mut self, stage: usize, values: &[f32]) -> io::Result<()>;
}

/// A model in a package: what belongs to no layer.
struct Outside<'a> {
    folder: &'a Path,
    package: Package,
    model: LayerwiseModel<Mlx>,
}

/// A quantized model and the one at 16 bits that it was made of.
pub struct DistillationRun<'a> {
    backend: &'a Mlx,
    group: Arc<dyn Group>,
    threads: usize,
    teacher: Outside<'a>,
    student: Outside<'a>,
    sequences: Vec<Batch>,
    manifest: Manifest,
    /// Type of stored scales.
    store: Dtype,
}

impl<'a> Outside<'a> {
    fn open(folder: &'a Path, threads: usize, backend: &Mlx) -> Result<Self, DistillationError> {
        let options = OpenOptions::stored(threads);
        let package = Package::open_some(folder, &options, &|it| layer_of(it).is_none())?;
        let model = LayerwiseModel::load(&package, backend)?;
        Ok(Self { folder, package, model })
    }
}

impl<'a> DistillationRun<'a> {
    /// Opens the packages of a whole model at 16 bits and in affine groups, to run `sequences` through
    /// both. `backend` computes in f32.
    pub fn open(
        [teacher, student]: [&'a Path; 2],
        sequences: &[Vec<TokenId>],
        backend: &'a Mlx,
        threads: usize,
    ) -> Result<Self, DistillationError> {
        let teacher = Outside::open(teacher, threads, backend)?;
        let student = Outside::open(student, threads, backend)?;
        for it in [&teacher, &student] {
            check_tokens(it.package.manifest(), sequences).map_err(DistillationError::Tokens)?;
        }
        let manifest = student.package.manifest().clone();
        if hands_over_more_than_the_stream(&manifest.architecture) {
            return Err(DistillationError::CrossLayerState);
        }
        if manifest.architecture.linear_attention.is_some() {
            return Err(DistillationError::LinearAttention);
        }
        let is_learned = |it: &&TensorEntry| {
            it.name.strip_suffix(".biases").is_some_and(|it| bits_of(&manifest, it).is_some())
        };
        let first = manifest.tensors.iter().find(is_learned);
        let store = first.ok_or(DistillationError::NothingToLearn)?.dtype;
        let sequences = sequences.iter().map(|tokens| whole_sequence(tokens)).collect();
        let group = memory_group(1)?.remove(0);
        Ok(Self { backend, group, threads, teacher, student, sequences, manifest, store })
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.manifest.architecture.layers.len()
    }

    /// Numbers of a sequence's residual stream.
    #[must_use]
    pub fn stream_len(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens.len() * self.width()
    }

    /// Tokens of a sequence.
    #[must_use]
    pub fn tokens(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens.len()
    }

    fn width(&self) -> usize {
        self.manifest.architecture.residual_width()
    }

    fn ranks(&self) -> Ranks<'_> {
        Ranks::all(self.group.as_ref(), EngineOptions::STANDARD.collective_timeout)
    }

    /// Writes the streams of the model at 16 bits before its first layer.
    pub fn teach_embedding(&self, streams: &mut dyn Streams) -> Result<(), DistillationError> {
        for (index, batch) in self.sequences.iter().enumerate() {
            let ranks = self.ranks();
            let values = self.backend.run(|| {
                let x = self.teacher.model.embed(self.backend, batch, &ranks)?;
                self.backend.read(x, &ranks)
            })?;
            streams.write(index, &values)?;
        }
        Ok(())
    }

    /// Runs the streams of the model at 16 bits through a layer.
    pub fn teach_layer(
        &self,
        index: usize,
        streams: &mut dyn Streams,
        note: &mut dyn FnMut(usize),
    ) -> Result<(), DistillationError> {
        let package = self.layer_package(&self.teacher, index)?;
        let model = &self.teacher.model;
        let layer = model.layer(&package, self.backend, index)?;
        for (sequence, batch) in self.sequences.iter().enumerate() {
            let (x, ranks) = (streams.read(sequence)?, self.ranks());
            let values = self.backend.run(|| {
                let x = self.backend.tensor(x, self.width());
                let layer = (&layer, &mut CrossLayerState::default());
                let x = model.forward(self.backend, layer, batch, x, &ranks)?;
                self.backend.read(x, &ranks)
            })?;
            streams.write(sequence, &values)?;
            note(sequence);
        }
        Ok(())
    }

    fn layer_package(&self, of: &Outside<'_>, index: usize) -> Result<Package, DistillationError> {
        let options = OpenOptions::stored(self.threads);
        let wanted = |tensor: &TensorEntry| layer_of(tensor) == Some(index);
        Ok(Package::open_some(of.folder, &options, &wanted)?)
    }

    /// The matrices of a stage as they are now.
    pub fn stage(
        &self,
        stage: usize,
        stages: &mut dyn LearnedStages,
    ) -> Result<Vec<LearnedMatrix>, DistillationError> {
        match stage.checked_sub(1) {
            None => self.matrices(stage, &self.student.package, stages),
            Some(layer) => self.matrices(stage, &self.layer_package(&self.student, layer)?, stages),
        }
    }

    fn matrices(
        &self,
        stage: usize,
        package: &Package,
        stages: &mut dyn LearnedStages,
    ) -> Result<Vec<LearnedMatrix>, DistillationError> {
        let mut found = Vec::new();
        for entry in &self.manifest.tensors {
            let Some(module) = entry.name.strip_suffix(".weight") else { continue };
            let Some(bits) = bits_of(&self.manifest, module) else { continue };
            let of = |part: &str| {
                package.tensor(&format!("{module}.{part}"))?.floats().map(|it| it.to_vec())
            };
            if let (Some(scales), Some(biases)) = (of("scales"), of("biases")) {
                let params = GroupParams { scales, biases };
                found.push(LearnedMatrix::new(module.to_owned(), bits, params));
            }
        }
        if let Some(values) = stages.read(stage)? {
            let mut values = &values[..];
            for matrix in &mut found {
                values =
                    matrix.restore(values).ok_or_else(|| io::Error::other("too few numbers"))?;
            }
        }
        Ok(found)
    }

    /// Tunes the parameters by one step over some sequences; `reference` has the streams of the model at
    /// 16 bits after its last layer. Returns the mean KL divergence before the step, in nats.
    pub fn step(
        &self,
        batch: &[usize],
        reference: &mut dyn Streams,
        stages: &mut dyn LearnedStages,
        rate: Rate,
    ) -> Result<f64, DistillationError> {
        let rows: usize = batch.iter().map(|it| self.tokens(*it)).sum();
        let mut read = vec![self.embedded(batch, stages, None)?];
        for layer in 0..self.layers() {
            let x = read.last().expect("the embedding's");
            let next = self.through(layer, batch, x, stages, None)?;
            read.push(next);
        }
        let mut outside = self.stage(0, stages)?;
        let last = read.pop().expect("the last layer's");
        let of_head = self.head(batch, (&last, 1.0 / rows as f32), reference, &outside)?;
        let mut gradients = of_head.input;
        for layer in (0..self.layers()).rev() {
            let x = read.pop().expect("what the layer read");
            gradients = self.back(layer, batch, (&x, &gradients), stages, rate)?;
        }
        let mut sums = of_head.params;
        for (index, sequence) in batch.iter().enumerate() {
            let part = self.embedding(*sequence, &gradients[index], &outside)?;
            add_params(&mut sums, part.params);
        }
        update(&mut outside, &sums, rate);
        stages.write(0, &values_of(&outside))?;
        of_head.mean
    }

    /// The mean KL divergence in nats over some sequences, with parameters as they are stored.
    pub fn divergence(
        &self,
        batch: &[usize],
        reference: &mut dyn Streams,
        stages: &mut dyn LearnedStages,
    ) -> Result<f64, DistillationError> {
        let rows: usize = batch.iter().map(|it| self.tokens(*it)).sum();
        let mut x = self.embedded(batch, stages, Some(self.store))?;
        for layer in 0..self.layers() {
            x = self.through(layer, batch, &x, stages, Some(self.store))?;
        }
        let outside = self.stage(0, stages)?;
        let mut sum = 0.0;
        for (sequence, x) in batch.iter().zip(&x) {
            let reference = reference.read(*sequence)?;
            let params = params_of(&outside, Some(self.store));
            let substitutes = substitutes(&outside, &params, &self.student.package);
            for rows in self.rows_at_once(*sequence) {
                let mut build =
                    |x: Option<Tensor>| self.divergences(*sequence, &rows, &reference, x);
                let input = Some((&x[..], self.width()));
                let found = self.backend.with_substitutes(&substitutes, input, &mut build)?;
                sum += found.iter().map(|it| f64::from(*it)).sum::<f64>();
            }
        }
        finite(sum / rows as f64)
    }

    /// What is stored in the end: scales and biases of a stage's matrices.
    pub fn result(
        &self,
        stage: usize,
        stages: &mut dyn LearnedStages,
    ) -> Result<Vec<(String, GroupParams)>, DistillationError> {
        let matrices = self.stage(stage, stages)?;
        let stored = |it: &LearnedMatrix| (it.module().to_owned(), it.params(Some(self.store)));
        Ok(matrices.iter().map(stored).collect())
    }

    /// Type of stored scales.
    #[must_use]
    pub const fn store(&self) -> Dtype {
        self.store
    }

    /// The quantized model's package.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The streams before the first layer.
    fn embedded(
        &self,
        batch: &[usize],
        stages: &mut dyn LearnedStages,
        store: Option<Dtype>,
    ) -> Result<Vec<Vec<f32>>, DistillationError> {
        let outside = self.stage(0, stages)?;
        let params = params_of(&outside, store);
        let substitutes = substitutes(&outside, &params, &self.student.package);
        let embed = |sequence: &usize| {
            let mut build = |_| self.embed(*sequence);
            self.backend.with_substitutes(&substitutes, None, &mut build)
        };
        batch.iter().map(embed).collect()
    }

    /// Streams after a layer.
    fn through(
        &self,
        layer: usize,
        batch: &[usize],
        x: &[Vec<f32>],
        stages: &mut dyn LearnedStages,
        store: Option<Dtype>,
    ) -> Result<Vec<Vec<f32>>, DistillationError> {
        let package = self.layer_package(&self.student, layer)?;
        let matrices = self.matrices(1 + layer, &package, stages)?;
        let params = params_of(&matrices, store);
        let substitutes = substitutes(&matrices, &params, &package);
        let forward = |(sequence, x): (&usize, &Vec<f32>)| {
            let mut build = |x: Option<Tensor>| self.forward(&package, layer, *sequence, x);
            let input = Some((&x[..], self.width()));
            self.backend.with_substitutes(&substitutes, input, &mut build)
        };
        batch.iter().zip(x).map(forward).collect()
    }

    /// Tunes a layer; the loss by what it read.
    fn back(
        &self,
        layer: usize,
        batch: &[usize],
        (x, gradients): (&[Vec<f32>], &[Vec<f32>]),
        stages: &mut dyn LearnedStages,
        rate: Rate,
    ) -> Result<Vec<Vec<f32>>, DistillationError> {
        let package = self.layer_package(&self.student, layer)?;
        let mut matrices = self.matrices(1 + layer, &package, stages)?;
        let params = params_of(&matrices, None);
        let substitutes = substitutes(&matrices, &params, &package);
        let (mut sums, mut inputs) = (Vec::new(), Vec::new());
        for ((sequence, x), gradient) in batch.iter().zip(x).zip(gradients) {
            let mut build = |x: Option<Tensor>| self.forward(&package, layer, *sequence, x);
            let input = Some((&x[..], self.width()));
            let cotangent = (&gradient[..], self.width());
            let found = self.backend.gradients(&substitutes, input, cotangent, &mut build)?;
            add_params(&mut sums, found.params);
            inputs.push(found.input);
        }
        update(&mut matrices, &sums, rate);
        stages.write(1 + layer, &values_of(&matrices))?;
        Ok(inputs)
    }

    /// The loss of all sequences by the streams after the last layer, and by the head.
    fn head(
        &self,
        batch: &[usize],
        (x, share): (&[Vec<f32>], f32),
        reference: &mut dyn Streams,
        outside: &[LearnedMatrix],
    ) -> Result<HeadGradients, DistillationError> {
        let params = params_of(outside, None);
        let substitutes = substitutes(outside, &params, &self.student.package);
        let (mut sums, mut inputs, mut loss) = (Vec::new(), Vec::new(), 0.0);
        for (sequence, x) in batch.iter().zip(x) {
            let reference = reference.read(*sequence)?;
            let mut gradient = vec![0.0; x.len()];
            for rows in self.rows_at_once(*sequence) {
                let mut build =
                    |x: Option<Tensor>| self.divergences(*sequence, &rows, &reference, x);
                let input: Option<PartInput<'_>> = Some((x, self.width()));
                let cotangent = vec![share; rows.len()];
                let found =
                    self.backend.gradients(&substitutes, input, (&cotangent, 1), &mut build)?;
                loss += found.value.iter().map(|it| f64::from(*it)).sum::<f64>();
                gradient.iter_mut().zip(&found.input).for_each(|(sum, it)| *sum += it);
                add_params(&mut sums, found.params);
            }
            inputs.push(gradient);
        }
        Ok(HeadGradients { mean: finite(loss * f64::from(share)), input: inputs, params: sums })
    }

    /// The loss by the embedding.
    fn embedding(
        &self,
        sequence: usize,
        gradient: &[f32],
        outside: &[LearnedMatrix],
    ) -> Result<PartGradients, DistillationError> {
        let params = params_of(outside, None);
        let substitutes = substitutes(outside, &params, &self.student.package);
        let mut build = |_| self.embed(sequence);
        self.backend.gradients(&substitutes, None, (gradient, self.width()), &mut build)
    }

    fn embed(&self, sequence: usize) -> Result<Tensor, DistillationError> {
        let model = LayerwiseModel::load(&self.student.package, self.backend)?;
        Ok(model.embed(self.backend, &self.sequences[sequence], &self.ranks())?)
    }

    fn forward(
        &self,
        package: &Package,
        layer: usize,
        sequence: usize,
        x: Option<Tensor>,
    ) -> Result<Tensor, DistillationError> {
        let model = &self.student.model;
        let layer = model.layer(package, self.backend, layer)?;
        let layer = (&layer, &mut CrossLayerState::default());
        let x = x.expect("a layer has an input");
        Ok(model.forward(self.backend, layer, &self.sequences[sequence], x, &self.ranks())?)
    }

    /// The KL divergence of some rows, `[rows, 1]`.
    fn divergences(
        &self,
        sequence: usize,
        rows: &[usize],
        reference: &[f32],
        x: Option<Tensor>,
    ) -> Result<Tensor, DistillationError> {
        let (batch, ranks) = (&self.sequences[sequence], self.ranks());
        let reference = self.backend.tensor(reference.to_vec(), self.width());
        let own = self.teacher.model.logits(self.backend, batch, &reference, rows, &ranks);
        let model = LayerwiseModel::load(&self.student.package, self.backend)?;
        let x = x.expect("a head has an input");
        let logits = model.logits(self.backend, batch, &x, rows, &ranks);
        Ok(self.backend.divergence(&own, &logits))
    }

    /// The rows of a sequence in parts whose logits are computed at once.
    fn rows_at_once(&self, sequence: usize) -> Vec<Vec<usize>> {
        let vocab = self.manifest.architecture.vocab_size as usize;
        let all: Vec<usize> = (0..self.tokens(sequence)).collect();
        all.chunks((LOGITS_AT_ONCE / vocab).max(1)).map(<[usize]>::to_vec).collect()
    }
}

/// What the head does to the loss.
struct HeadGradients {
    mean: Result<f64, DistillationError>,
    input: Vec<Vec<f32>>,
    params: Vec<GroupParams>,
}

/// Bits of a module in affine groups.
fn bits_of(manifest: &Manifest, module: &str) -> Option<u32> {
    match manifest.quantization.format_of(module) {
        MatrixFormat::Affine { bits, .. } => Some(bits),
        MatrixFormat::Plain | MatrixFormat::Float(_) => None,
    }
}

fn finite(loss: f64) -> Result<f64, DistillationError> {
    if loss.is_finite() { Ok(loss) } else { Err(DistillationError::NotFinite) }
}

fn params_of(matrices: &[LearnedMatrix], store: Option<Dtype>) -> Vec<GroupParams> {
    matrices.iter().map(|it| it.params(store)).collect()
}

fn values_of(matrices: &[LearnedMatrix]) -> Vec<f32> {
    matrices.iter().flat_map(LearnedMatrix::values).collect()
}

fn substitutes<'a>(
    matrices: &[LearnedMatrix],
    params: &'a [GroupParams],
    package: &'a Package,
) -> Vec<Substitute<'a>> {
    let of = |(matrix, params): (&LearnedMatrix, &'a GroupParams)| {
        let stored = package.tensor(&format!("{}.scales", matrix.module()));
        Substitute { stored: stored.expect("it was found there"), params }
    };
    matrices.iter().zip(params).map(of).collect()
}

fn add_params(sums: &mut Vec<GroupParams>, more: Vec<GroupParams>) {
    if sums.is_empty() {
        *sums = more;
        return;
    }
    for (sum, it) in sums.iter_mut().zip(more) {
        sum.scales.iter_mut().zip(it.scales).for_each(|(sum, it)| *sum += it);
        sum.biases.iter_mut().zip(it.biases).for_each(|(sum, it)| *sum += it);
    }
}

fn update(matrices: &mut [LearnedMatrix], gradients: &[GroupParams], rate: Rate) {
    for (matrix, gradients) in matrices.iter_mut().zip(gradients) {
        matrix.update(gradients, rate);
    }
}

#[cfg(test)]
mod tests;
